"""Clipped critic loss."""

from typing import NamedTuple

import torch

from goldenppo.reference.aggregate import aggregate
from goldenppo.reference.checks import inside, one_of, same_shape


class ValueLoss(NamedTuple):
    """The loss and the share of tokens at which the clip acts; 0-d tensors."""

    loss: torch.Tensor
    clip_fraction: torch.Tensor


def value_loss(
    values,
    old_values,
    returns,
    mask,
    *,
    clip=None,
    horizon=None,
    aggregation="token_mean",
    empty_rows="excluded",
    factor="half",
    form="max",
):
    """Computes the critic's loss with the value clipped around the old value.

        V_clip = clip(V, V_old − clip, V_old + clip)
        L = factor · agg( max( (V − R)², (V_clip − R)² ) )

    Args:
        values: float [B, T], the critic being trained.
        old_values: float [B, T], the critic at rollout.
        returns: float [B, T], the targets R.
        mask: bool [B, T], True = counts.
        clip: how far a value may move from the old one, or None for the plain squared error.
        horizon, aggregation, empty_rows: see `aggregate`.
        factor: "half" (½) or "one".
        form: "max" as above; "clipped_only": (V_clip − R)²; "clamped_error": min((V − R)², clip).

    Returns:
        ValueLoss(loss, clip_fraction); the fraction counts tokens whose clipped error is strictly the larger, 0 without clip.

    Raises:
        ValueError: shapes differ, the mask is not boolean, or an axis has no such value.

    Source: openai/baselines, ppo2/model.py (the max form); stable-baselines3, PPO.train (clipped_only); RLlib (clamped_error).
    """
    terms = value_terms(values, old_values, returns, mask, clip=clip, form=form)
    one_of("factor", factor, ("half", "one"))
    mean = aggregate(terms.loss, mask, horizon=horizon, aggregation=aggregation, empty_rows=empty_rows)
    return ValueLoss(0.5 * mean if factor == "half" else mean, aggregate(terms.clip_fraction, mask))


def value_terms(values, old_values, returns, mask, *, clip=None, form="max"):
    """Per token, what `value_loss` aggregates: ValueLoss of [B, T] tensors, the error without the factor. Arguments as there."""
    same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    one_of("form", form, ("max", "clipped_only", "clamped_error"))
    V, V_old, R = inside(values, mask), inside(old_values.detach(), mask), inside(returns.detach(), mask)
    error = (V - R) ** 2
    acted = torch.zeros_like(error)
    if clip is not None:
        clipped = (V.clamp(V_old - clip, V_old + clip) - R) ** 2
        acted = (clipped > error).to(error.dtype)
        if form == "max":  # VL-1
            error = torch.maximum(error, clipped)
        else:
            error = clipped if form == "clipped_only" else error.clamp(max=clip)
    return ValueLoss(error, acted)
