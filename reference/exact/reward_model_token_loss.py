"""Exact pairwise reward-model loss over token scores, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from goldenppo.reference.exact.number import ZERO, Answer, Grid, lift, literal, sigmoid, softplus, total

__all__ = ["compared_positions", "reward_model_token_loss"]


def reward_model_token_loss(
    chosen: Grid,
    rejected: Grid,
    chosen_tokens: Sequence[Sequence[int]],
    rejected_tokens: Sequence[Sequence[int]],
    *,
    pad_id: int,
) -> Answer:
    """Return the mean over pairs of the mean over positions of softplus(rejected − chosen), with gradients.

    With P_b the compared positions of pair b and x = rejected − chosen: loss = (1/B)·Σ_b (1/|P_b|)·Σ_{t∈P_b}
    softplus(x_bt); the gradients are ∓σ(x_bt)/(|P_b|·B) there and 0 elsewhere.

    Args:
        chosen, rejected: token scores, floats [B, L].
        chosen_tokens, rejected_tokens: ints [B, L].
        pad_id: token id that ends an answer.

    Returns:
        {"loss": Number, "grad_chosen", "grad_rejected": Numbers [B, L]}.

    Source: deepspeedai/DeepSpeedExamples, applications/DeepSpeed-Chat, RewardModel.forward.
    """
    count = literal(len(chosen))
    means, slopes = [], []
    for c, r, tokens_c, tokens_r in zip(chosen, rejected, chosen_tokens, rejected_tokens, strict=True):
        positions = compared_positions(tokens_c, tokens_r, pad_id)
        x = {t: lift(r[t]) - lift(c[t]) for t in positions}
        means.append(total([softplus(value) for value in x.values()]) / len(x))
        slopes.append([sigmoid(x[t]) * (1 / literal(len(x)) / count) if t in x else ZERO for t in range(len(c))])
    return {
        "loss": total(means) / count,
        "grad_chosen": [[-slope for slope in row] for row in slopes],
        "grad_rejected": slopes,
    }


def compared_positions(chosen_tokens: Sequence[int], rejected_tokens: Sequence[int], pad_id: int) -> list[int]:
    """Return a pair's positions: first differing token to the longer answer's end; the last one if none."""
    length = len(chosen_tokens)
    differing = [t for t in range(length) if chosen_tokens[t] != rejected_tokens[t]]
    if not differing:
        return [length - 1]
    ends = [row.index(pad_id) if pad_id in row else length for row in (list(chosen_tokens), list(rejected_tokens))]
    return list(range(differing[0], max(ends)))
