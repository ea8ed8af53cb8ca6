"""Known mistakes in the weighted sum of the loss terms."""

from goldenppo.reference import total_loss
from goldenppo.reference.deviations._common import deviation_of


@deviation_of(total_loss)
def tl_entropy_added(*terms, **coefs):
    """Add the entropy in place of subtracting it, so that the bonus lowers it."""
    return total_loss(*terms, **{**coefs, "entropy_coef": -coefs["entropy_coef"]})


@deviation_of(total_loss)
def tl_kl_subtracted(*terms, **coefs):
    """Subtract the KL term, so that distance from the reference model is rewarded."""
    return total_loss(*terms, **{**coefs, "kl_loss_coef": -coefs["kl_loss_coef"]})


@deviation_of(total_loss)
def tl_value_subtracted(*terms, **coefs):
    """Subtract the critic's loss."""
    return total_loss(*terms, **{**coefs, "vf_coef": -coefs["vf_coef"]})


@deviation_of(total_loss)
def tl_policy_subtracted(policy_loss, *terms, **coefs):
    """Subtract the policy term."""
    return total_loss(-policy_loss, *terms, **coefs)


@deviation_of(total_loss)
def tl_vf_coef_missing(*terms, **coefs):
    """Add the critic's loss with the weight 1."""
    return total_loss(*terms, **{**coefs, "vf_coef": 1.0})


@deviation_of(total_loss)
def tl_entropy_coef_missing(*terms, **coefs):
    """Subtract the entropy with the weight 1."""
    return total_loss(*terms, **{**coefs, "entropy_coef": 1.0})


@deviation_of(total_loss)
def tl_kl_coef_missing(*terms, **coefs):
    """Add the KL term with the weight 1."""
    return total_loss(*terms, **{**coefs, "kl_loss_coef": 1.0})


@deviation_of(total_loss)
def tl_value_dropped(*terms, **coefs):
    """Leave the critic's loss out."""
    return total_loss(*terms, **{**coefs, "vf_coef": 0.0})


@deviation_of(total_loss)
def tl_entropy_dropped(*terms, **coefs):
    """Leave the entropy out."""
    return total_loss(*terms, **{**coefs, "entropy_coef": 0.0})


@deviation_of(total_loss)
def tl_kl_dropped(*terms, **coefs):
    """Leave the KL term out."""
    return total_loss(*terms, **{**coefs, "kl_loss_coef": 0.0})


@deviation_of(total_loss)
def tl_entropy_and_kl_coefs_swapped(*terms, **coefs):
    """Exchange the weights of the entropy and of the KL term."""
    swapped = {"entropy_coef": coefs["kl_loss_coef"], "kl_loss_coef": coefs["entropy_coef"]}
    return total_loss(*terms, **{**coefs, **swapped})


@deviation_of(total_loss)
def tl_vf_and_entropy_coefs_swapped(*terms, **coefs):
    """Exchange the weights of the critic's loss and of the entropy."""
    swapped = {"entropy_coef": coefs["vf_coef"], "vf_coef": coefs["entropy_coef"]}
    return total_loss(*terms, **{**coefs, **swapped})


@deviation_of(total_loss)
def tl_vf_coef_on_everything(*terms, **coefs):
    """Weigh the whole loss behind the policy term with vf_coef, a bracket set too wide."""
    wide = {name: coefs[name] * coefs["vf_coef"] for name in ("entropy_coef", "kl_loss_coef")}
    return total_loss(*terms, **{**coefs, **wide})


@deviation_of(total_loss)
def tl_entropy_detached(policy_loss, value_loss, entropy, kl_loss, **coefs):
    """Let no gradient reach the entropy: the bonus is in the number but trains nothing."""
    return total_loss(policy_loss, value_loss, entropy.detach(), kl_loss, **coefs)


@deviation_of(total_loss)
def tl_value_detached(policy_loss, value_loss, entropy, kl_loss, **coefs):
    """Let no gradient reach the critic's loss."""
    return total_loss(policy_loss, value_loss.detach(), entropy, kl_loss, **coefs)


@deviation_of(total_loss)
def tl_kl_detached(policy_loss, value_loss, entropy, kl_loss, **coefs):
    """Let no gradient reach the KL term: the penalty is in the number but holds nothing back."""
    return total_loss(policy_loss, value_loss, entropy, kl_loss.detach(), **coefs)


@deviation_of(total_loss)
def tl_gradient_dead(*terms, **coefs):
    """Cut the graph: the right value without a gradient."""
    return total_loss(*(term.detach() for term in terms), **coefs)
