"""Known mistakes in the direct preference optimisation loss."""

import torch

from goldenppo.reference import dpo_loss
from goldenppo.reference.deviations._common import deviation_of


def _smoothed(likely, unlikely, label_smoothing):
    """Return the mean of the two losses of each pair, weighed by the label smoothing."""
    eps = 0.0 if label_smoothing is None else label_smoothing
    return ((1 - eps) * likely + eps * unlikely).mean()


def _preference(policy_chosen, policy_rejected, ref_chosen, ref_rejected):
    return (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)


@deviation_of(dpo_loss)
def dpo_sign(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Exchange chosen and rejected."""
    return dpo_loss(policy_rejected, policy_chosen, ref_rejected, ref_chosen, **params)


@deviation_of(dpo_loss)
def dpo_policy_is_reference(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Use the policy as its own reference: every Δ is 0 and the loss log 2 for ever."""
    return dpo_loss(policy_chosen, policy_rejected, policy_chosen, policy_rejected, **params)


@deviation_of(dpo_loss)
def dpo_reference_missing(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Leave the reference model out: Δ = π_c − π_r."""
    nothing = torch.zeros_like(ref_chosen)
    return dpo_loss(policy_chosen, policy_rejected, nothing, nothing, **params)


@deviation_of(dpo_loss)
def dpo_reference_added(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Add the reference model's difference in place of subtracting it."""
    return dpo_loss(policy_chosen, policy_rejected, ref_rejected, ref_chosen, **params)


@deviation_of(dpo_loss)
def dpo_beta_missing(*logprobs, **params):
    """Leave β out: the loss of β = 1."""
    return dpo_loss(*logprobs, **{**params, "beta": 1.0})


@deviation_of(dpo_loss)
def dpo_beta_outside(*logprobs, **params):
    """Multiply the loss by β in place of the difference inside the log-sigmoid."""
    return params["beta"] * dpo_loss(*logprobs, **{**params, "beta": 1.0})


@deviation_of(dpo_loss)
def dpo_label_smoothing_ignored(*logprobs, **params):
    """Ignore the label smoothing that was given."""
    return dpo_loss(*logprobs, beta=params["beta"])


@deviation_of(dpo_loss)
def dpo_label_smoothing_exchanged(*logprobs, **params):
    """Weigh the right label with ε and the wrong one with 1 − ε."""
    if params["label_smoothing"] is None:
        return dpo_loss(*logprobs, **params)
    return dpo_loss(*logprobs, beta=params["beta"], label_smoothing=1 - params["label_smoothing"])


@deviation_of(dpo_loss)
def dpo_label_smoothing_inside(*logprobs, **params):
    """Scale the difference by 1 − 2ε in place of mixing the two losses."""
    eps = params["label_smoothing"] or 0.0
    return dpo_loss(*logprobs, beta=params["beta"] * (1 - 2 * eps))


@deviation_of(dpo_loss)
def dpo_log_of_sigmoid(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing):
    """Form −log(sigmoid(βΔ)) literally: inf for a large negative Δ, 0 for a large positive one."""
    x = beta * _preference(policy_chosen, policy_rejected, ref_chosen.detach(), ref_rejected.detach())
    likely, unlikely = -torch.log(torch.sigmoid(x)), -torch.log(torch.sigmoid(-x))
    return likely.mean() if label_smoothing is None else _smoothed(likely, unlikely, label_smoothing)


@deviation_of(dpo_loss)
def dpo_sum(*logprobs, **params):
    """Sum over pairs where the mean belongs."""
    return dpo_loss(*logprobs, **params) * len(logprobs[0])


@deviation_of(dpo_loss)
def dpo_probability(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing):
    """Leave the logarithm out: −sigmoid(βΔ)."""
    x = beta * _preference(policy_chosen, policy_rejected, ref_chosen.detach(), ref_rejected.detach())
    return _smoothed(-torch.sigmoid(x), -torch.sigmoid(-x), label_smoothing)


@deviation_of(dpo_loss)
def dpo_softplus_of_mean(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Average over pairs before the log-sigmoid."""
    logprobs = (policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return dpo_loss(*(x.mean(0, keepdim=True) for x in logprobs), **params)


@deviation_of(dpo_loss)
def dpo_rejected_detached(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Let no gradient reach the rejected answer."""
    return dpo_loss(policy_chosen, policy_rejected.detach(), ref_chosen, ref_rejected, **params)


@deviation_of(dpo_loss)
def dpo_gradient_dead(policy_chosen, policy_rejected, ref_chosen, ref_rejected, **params):
    """Cut the graph: the right value without a gradient."""
    return dpo_loss(policy_chosen.detach(), policy_rejected.detach(), ref_chosen, ref_rejected, **params)


@deviation_of(dpo_loss)
def dpo_reference_not_detached(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, label_smoothing):
    """Let the gradient reach the reference log-probabilities as well."""
    x = beta * _preference(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    logsigmoid = torch.nn.functional.logsigmoid  # softplus is the identity from 20 on, 2e-9 off at float64
    return _smoothed(-logsigmoid(x), -logsigmoid(-x), label_smoothing)
