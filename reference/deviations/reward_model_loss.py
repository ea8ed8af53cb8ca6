"""Known mistakes in the pairwise reward-model loss."""

import torch

from goldenppo.reference import reward_model_loss
from goldenppo.reference.deviations._common import deviation_of


def _gap(chosen, rejected, margin):
    """Return chosen − rejected − margin, [B]."""
    return chosen - rejected if margin is None else chosen - rejected - margin


def _negated(margin):
    return None if margin is None else -margin


@deviation_of(reward_model_loss)
def rm_sign(chosen, rejected, *, margin):
    """Exchange chosen and rejected."""
    return reward_model_loss(rejected, chosen, margin=margin)


@deviation_of(reward_model_loss)
def rm_margin_sign(chosen, rejected, *, margin):
    """Add the margin on the wrong side: softplus(rejected − chosen − margin) lowers the loss by it."""
    return reward_model_loss(chosen, rejected, margin=_negated(margin))


@deviation_of(reward_model_loss)
def rm_margin_ignored(chosen, rejected, *, margin):
    """Ignore the margin that was given."""
    return reward_model_loss(chosen, rejected)


@deviation_of(reward_model_loss)
def rm_margin_broadcast(chosen, rejected, *, margin):
    """Subtract margins [B] from differences [B, 1]: every pair meets every margin, B·B terms."""
    if margin is None:
        return reward_model_loss(chosen, rejected)
    return torch.nn.functional.softplus(margin - (chosen - rejected)[:, None]).mean()


@deviation_of(reward_model_loss)
def rm_log_exp_without_margin(chosen, rejected, *, margin):
    """Form log(1 + exp(rejected − chosen)): the margin is ignored, and the exponential overflows."""
    return torch.log(1 + torch.exp(rejected - chosen)).mean()


@deviation_of(reward_model_loss)
def rm_log_of_sigmoid(chosen, rejected, *, margin):
    """Form −log(sigmoid(d)) literally: inf (gradient NaN) for a large negative d, 0 for a large positive.

    log(1 + exp(−d)) formed literally gives the same.
    """
    return -torch.log(torch.sigmoid(_gap(chosen, rejected, margin))).mean()


@deviation_of(reward_model_loss)
def rm_probability(chosen, rejected, *, margin):
    """Leave the logarithm out: −sigmoid(d)."""
    return -torch.sigmoid(_gap(chosen, rejected, margin)).mean()


@deviation_of(reward_model_loss)
def rm_difference(chosen, rejected, *, margin):
    """Leave the log-sigmoid out: −d, which rewards any distance without end."""
    return -_gap(chosen, rejected, margin).mean()


@deviation_of(reward_model_loss)
def rm_softplus_of_mean(chosen, rejected, *, margin):
    """Average the differences before the log-sigmoid."""
    return torch.nn.functional.softplus(-_gap(chosen, rejected, margin).mean())


@deviation_of(reward_model_loss)
def rm_sum(chosen, rejected, *, margin):
    """Sum over pairs where the mean belongs."""
    return reward_model_loss(chosen, rejected, margin=margin) * len(chosen)


@deviation_of(reward_model_loss)
def rm_divided_inside_loop(chosen, rejected, *, margin):
    """Divide the running sum by B after each pair: Σ l_i / B^(B−i+1), i = 1 … B."""
    loss = torch.zeros((), dtype=chosen.dtype, device=chosen.device)
    for term in torch.nn.functional.softplus(-_gap(chosen, rejected, margin)):
        loss = (loss + term) / len(chosen)
    return loss


@deviation_of(reward_model_loss)
def rm_gradient_dead(chosen, rejected, *, margin):
    """Cut the graph: the right value without a gradient."""
    return reward_model_loss(chosen.detach(), rejected.detach(), margin=margin)


@deviation_of(reward_model_loss)
def rm_rejected_detached(chosen, rejected, *, margin):
    """Let no gradient reach the rejected score."""
    return reward_model_loss(chosen, rejected.detach(), margin=margin)
