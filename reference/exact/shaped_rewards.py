"""Exact token rewards from KL penalty and terminal score."""

from __future__ import annotations

from collections.abc import Sequence

from goldenppo.reference.exact.kl_penalty import estimate
from goldenppo.reference.exact.number import (
    ZERO,
    Answer,
    Grid,
    Mask,
    Number,
    Real,
    Row,
    clip,
    lift,
    parameter,
    total,
    widest,
)

__all__ = ["score_slot", "shaped_rewards"]


def shaped_rewards(
    logprobs: Grid,
    ref_logprobs: Grid,
    scores: Row,
    mask: Mask,
    *,
    kl_coef: Real,
    score_clip: Real | None = None,
    eos_penalty: Real | None = None,
    ended: Sequence[bool] | None = None,
    estimator: str = "k1",
    score_at: str = "last_token",
    level: str = "token",
    missing_eos: str = "subtract",
) -> Answer:
    """Return −kl_coef·kl_t at each token, plus the score at one position.

    The score is clipped to ±score_clip first; where `ended` is False eos_penalty is then subtracted from it,
    or takes its place. It lands on the last token, or one position later if there is one (first_pad, where
    that position has no KL of its own, and first_pad_with_kl, where it has). `level: sequence` is 0
    everywhere but there, where it holds score − kl_coef·Σ kl.

    Args:
        logprobs, ref_logprobs: floats [B, T].
        scores: floats [B].
        mask: bools [B, T].
        kl_coef, score_clip, eos_penalty: parameters; the last two may be none.
        ended: bools [B], or none.

    Returns:
        {"rewards": Numbers [B, T]}, None where the mask is False unless the score lands there.

    Source: Ziegler et al. 2019 (arXiv:1909.08593) section 2; Stiennon et al. 2020 (arXiv:2009.01325).
    """
    final = [lift(s) for s in scores]
    if score_clip is not None:
        final = [clip(s, -parameter(score_clip), parameter(score_clip)) for s in final]
    if eos_penalty is not None and ended is not None:
        penalty = parameter(eos_penalty)
        cut_off = [penalty if missing_eos == "replace" else s - penalty for s in final]
        final = [s if e else c for s, c, e in zip(final, cut_off, ended, strict=True)]
    rows = zip(logprobs, ref_logprobs, final, mask, strict=True)
    return {"rewards": [_row(*row, parameter(kl_coef), estimator, score_at, level) for row in rows]}


def score_slot(mask: Sequence[bool], score_at: str = "last_token") -> int | None:
    """Return the position of a row that the score lands on; None if the row has no token.

    Args:
        mask: bools [T].
    """
    tokens = [t for t, m in enumerate(mask) if m]
    if not tokens:
        return None
    return tokens[-1] if score_at == "last_token" else min(tokens[-1] + 1, len(mask) - 1)


def _row(
    new: Row,
    ref: Row,
    score: Number,
    mask: Sequence[bool],
    kl_coef: Number,
    estimator: str,
    score_at: str,
    level: str,
) -> list[Number | None]:
    """Return the rewards of one row."""
    slot = score_slot(mask, score_at)
    with_kl = [t for t, m in enumerate(mask) if m or (t == slot and score_at == "first_pad_with_kl")]
    kl = {t: estimate(new[t], ref[t], estimator) for t in with_kl}
    rewards = {t: ZERO if level == "sequence" else -kl_coef * kl[t] for t in kl}
    if slot is not None and level == "sequence":
        penalty = widest(kl_coef * total(kl.values()), total([kl_coef * value for value in kl.values()]))
        rewards[slot] = score - penalty
    elif slot is not None:
        rewards[slot] = rewards[slot] + score if slot in rewards else score
    return [rewards.get(t) for t in range(len(mask))]
