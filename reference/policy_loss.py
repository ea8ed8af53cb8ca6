"""Clipped surrogate."""

from typing import NamedTuple

import torch

from goldenppo.reference.aggregate import aggregate
from goldenppo.reference.checks import inside, one_of, same_shape
from goldenppo.reference.ratio import log_ratio


class PolicyLoss(NamedTuple):
    """The loss and the two statistics that trainers log beside it; all 0-d tensors."""

    loss: torch.Tensor
    clip_fraction: torch.Tensor
    approx_kl: torch.Tensor


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low,
    clip_high,
    dual_clip=None,
    horizon=None,
    aggregation="token_mean",
    empty_rows="excluded",
    log_ratio_clamp="none",
    approx_kl="k1",
    clip_fraction="larger_loss",
):
    """Computes PPO's clipped surrogate loss.

        r = exp(ℓ − ℓ_old)
        L = agg( max( −A·r, −A·clip(r, 1 − clip_low, 1 + clip_high) ) )

    and with dual_clip c, where A < 0, the per-token term is min(that, −c·A). No gradient reaches ℓ_old or A.

    Args:
        logprobs: log-probabilities under the policy being trained, float [B, T].
        old_logprobs: log-probabilities under the policy that sampled, float [B, T].
        advantages: float [B, T].
        mask: bool [B, T], True = counts.
        clip_low, clip_high: widths of the band below and above 1.
        dual_clip: bound c > 1 on −L/A where A < 0, or None.
        horizon: see `aggregate`.
        aggregation, empty_rows: see `aggregate`.
        log_ratio_clamp: "none" or 20, see `ratio`.
        approx_kl: token mean of k1 = −d, minus_k1 = d, k2 = ½d² or k3 = exp(d) − 1 − d, where d = ℓ − ℓ_old.
        clip_fraction: share of tokens whose clipped term is the larger loss ("larger_loss"; before dual clip), or whose
            ratio lies outside the band ("outside_band").

    Returns:
        PolicyLoss(loss, clip_fraction, approx_kl).

    Raises:
        ValueError: shapes differ, the mask is not boolean, or an axis has no such value.

    Source: Schulman et al. 2017 (arXiv:1707.06347) equation 7; dual clip: Ye et al. 2020 (arXiv:1912.09729) equation 5.
    """
    terms = policy_terms(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        approx_kl=approx_kl,
        clip_fraction=clip_fraction,
    )
    return PolicyLoss(
        aggregate(terms.loss, mask, horizon=horizon, aggregation=aggregation, empty_rows=empty_rows),
        aggregate(terms.clip_fraction, mask),
        aggregate(terms.approx_kl, mask),
    )


def policy_terms(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low,
    clip_high,
    dual_clip=None,
    log_ratio_clamp="none",
    approx_kl="k1",
    clip_fraction="larger_loss",
):
    """Per token, what `policy_loss` aggregates: PolicyLoss of [B, T] tensors. Arguments as there."""
    same_shape(logprobs=logprobs, advantages=advantages)
    one_of("clip_fraction", clip_fraction, ("larger_loss", "outside_band"))
    d = log_ratio(logprobs, old_logprobs.detach(), mask, log_ratio_clamp)
    r, A = d.exp(), inside(advantages.detach(), mask)
    unclipped, clipped = -A * r, -A * r.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)  # PL-1
    if dual_clip is not None:
        loss = torch.where(A < 0, torch.minimum(loss, -dual_clip * A), loss)
    outside = (r < 1 - clip_low) | (r > 1 + clip_high)
    acted = clipped > unclipped if clip_fraction == "larger_loss" else outside
    return PolicyLoss(loss, acted.to(d.dtype), _estimate(d.detach(), approx_kl))


def _estimate(d, approx_kl):
    """The estimate of KL(old ‖ new) at each token, from samples of the old policy."""
    one_of("approx_kl", approx_kl, ("k1", "minus_k1", "k2", "k3"))
    if approx_kl == "k3":
        return d.exp() - 1 - d
    return {"k1": -d, "minus_k1": d, "k2": 0.5 * d * d}[approx_kl]
