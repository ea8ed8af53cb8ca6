"""Known mistakes in the importance ratio."""

import torch

from goldenppo.reference import ratio
from goldenppo.reference.deviations._common import deviation_of, select


@deviation_of(ratio)
def ratio_inverted(logprobs, old_logprobs, mask, *, log_ratio_clamp):
    """Divide the old by the new probability: exp(ℓ_old − ℓ)."""
    return ratio(old_logprobs, logprobs, mask, log_ratio_clamp=log_ratio_clamp)


@deviation_of(ratio)
def ratio_of_itself(logprobs, old_logprobs, mask, *, log_ratio_clamp):
    """Compare the new log-probabilities with themselves: 1 at every token."""
    return ratio(logprobs, logprobs, mask, log_ratio_clamp=log_ratio_clamp)


@deviation_of(ratio)
def ratio_not_exponentiated(logprobs, old_logprobs, mask, *, log_ratio_clamp):
    """Return the log-ratio itself: ℓ − ℓ_old."""
    return torch.log(ratio(logprobs, old_logprobs, mask, log_ratio_clamp=log_ratio_clamp).where(mask, 1.0))


@deviation_of(ratio)
def ratio_of_log_probabilities(logprobs, old_logprobs, mask, *, log_ratio_clamp):
    """Divide the log-probabilities: ℓ / ℓ_old."""
    return select(logprobs, mask) / old_logprobs.where(mask, 1.0)


@deviation_of(ratio)
def ratio_probability_difference(logprobs, old_logprobs, mask, *, log_ratio_clamp):
    """Subtract the probabilities: exp(ℓ) − exp(ℓ_old)."""
    return select(logprobs, mask).exp() - select(old_logprobs, mask).exp()


@deviation_of(ratio)
def ratio_softmax_quotient(logprobs, old_logprobs, mask, *, log_ratio_clamp):
    """Take log-probabilities for scores: softmax(ℓ) / softmax(ℓ_old), each over the tokens of its row."""
    new, old = (_log_softmax(x, mask) for x in (logprobs, old_logprobs))
    return ratio(new, old, mask, log_ratio_clamp=log_ratio_clamp)


def _log_softmax(x, mask):
    return torch.log_softmax(x.where(mask, -1e30), dim=1)
