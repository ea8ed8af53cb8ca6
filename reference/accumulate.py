"""One optimizer step's loss, accumulated over micro-batches and over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from goldenppo.reference.policy_loss import policy_loss
from goldenppo.reference.value_loss import value_loss


def accumulated_policy_loss(
    parts,
    *,
    clip_low,
    clip_high,
    dual_clip=None,
    horizon=None,
    aggregation="token_mean",
    empty_rows="excluded",
    log_ratio_clamp="none",
):
    """Computes the policy loss of a step from its micro-batches.

        L = Σ_k w_k·L_k,  w_k = what the micro-batch holds / what the whole step holds, over all ranks

    in tokens under token_mean, in rows under the modes that are means over rows and under plain_mean; w_k = 1 under
    token_sum. A micro-batch that holds nothing adds nothing. Times the number of ranks, because gradients are averaged over
    them afterwards.

    Args:
        parts: micro-batches of this rank, tuples (logprobs, old_logprobs, advantages, mask) of shape [b, T].
        clip_low, clip_high, dual_clip, horizon, aggregation, empty_rows, log_ratio_clamp: see `policy_loss`.

    Returns:
        A 0-d tensor, differentiable in each micro-batch's logprobs.

    Source: INV-6 and INV-7.
    """
    how = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip, "log_ratio_clamp": log_ratio_clamp}
    how |= {"horizon": horizon, "aggregation": aggregation, "empty_rows": empty_rows}
    return _accumulated(lambda part: policy_loss(*part, **how).loss, parts, aggregation, empty_rows)


def accumulated_value_loss(
    parts, *, clip=None, horizon=None, aggregation="token_mean", empty_rows="excluded", factor="half", form="max"
):
    """Computes the value loss of a step from its micro-batches, as `accumulated_policy_loss` does the policy loss.

    Args:
        parts: micro-batches of this rank, tuples (values, old_values, returns, mask) of shape [b, T].
        clip, horizon, aggregation, empty_rows, factor, form: see `value_loss`.

    Returns:
        A 0-d tensor, differentiable in each micro-batch's values.

    Source: INV-6 and INV-7.
    """
    how = {"clip": clip, "factor": factor, "form": form}
    how |= {"horizon": horizon, "aggregation": aggregation, "empty_rows": empty_rows}
    return _accumulated(lambda part: value_loss(*part, **how).loss, parts, aggregation, empty_rows)


def _accumulated(loss, parts, aggregation, empty_rows):
    """The weighted sum of the micro-batches' losses; every rank takes part in the count, whatever it holds."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    held = torch.stack([_held(part[-1], aggregation, empty_rows) for part in parts]).to(parts[0][0].device)
    whole = held.sum()
    if ranks > 1:
        dist.all_reduce(whole)
    total = sum(part[0][:0].sum() for part in parts)  # 0, with a graph even where no micro-batch holds anything
    for part, share in zip(parts, (held / whole).to(total.dtype), strict=True):
        if aggregation == "token_sum":
            total = total + loss(part) * ranks
        elif share > 0:
            total = total + loss(part) * share * ranks
    return total


def _held(mask, aggregation, empty_rows):
    """What a micro-batch weighs: tokens or rows, as float64, so that a quotient of counts is no float32."""
    if aggregation == "token_mean":
        return mask.sum().double()
    counted = aggregation == "plain_mean" or empty_rows == "counted"
    return (torch.tensor(len(mask)) if counted else mask.any(1).sum()).double()
