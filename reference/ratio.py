"""Importance ratio of the new to the old policy."""

import torch

from goldenppo.reference.checks import inside, is_mask, one_of, same_shape


def ratio(logprobs, old_logprobs, mask, *, log_ratio_clamp="none"):
    """Computes the importance ratio of each token.

        r_bt = exp(d_bt),  d_bt = ℓ_bt − ℓ_old,bt     at tokens, 0 elsewhere

    Args:
        logprobs: log-probabilities under the policy being trained, float [B, T].
        old_logprobs: log-probabilities under the policy that sampled, float [B, T].
        mask: bool [B, T], True = counts.
        log_ratio_clamp: "none", or 20 to clamp d to [−20, 20] before the exponential.

    Returns:
        Ratios [B, T].

    Raises:
        ValueError: shapes differ, the mask is not boolean, or the axis has no such value.

    Source: Schulman et al. 2017 (arXiv:1707.06347) section 3; the clamp: verl, core_algos.compute_policy_loss.
    """
    d = log_ratio(logprobs, old_logprobs, mask, log_ratio_clamp)
    return torch.where(mask, d.exp(), 0.0)  # RATIO-1


def log_ratio(logprobs, old_logprobs, mask, log_ratio_clamp="none"):
    """The log-ratio d [B, T], clamped where asked, 0 where the mask is False: selected before the exponential can overflow."""
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    is_mask(mask)
    one_of("log_ratio_clamp", log_ratio_clamp, ("none", 20))
    d = inside(logprobs, mask) - inside(old_logprobs, mask)
    return d if log_ratio_clamp == "none" else d.clamp(-log_ratio_clamp, log_ratio_clamp)
