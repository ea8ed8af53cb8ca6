"""Exact span from log-probabilities and scores to rewards, advantages and returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from goldenppo.reference.exact.gae import advantages_and_returns
from goldenppo.reference.exact.number import Answer, Grid, Mask, Number, Real, Row
from goldenppo.reference.exact.shaped_rewards import score_slot, shaped_rewards
from goldenppo.reference.exact.whiten import whitened

__all__ = ["experience"]


def experience(
    logprobs: Grid,
    ref_logprobs: Grid,
    values: Grid,
    scores: Row,
    mask: Mask,
    *,
    kl_coef: Real,
    gamma: Real,
    lam: Real,
    score_clip: Real | None = None,
    score_at: str = "last_token",
    estimator: str = "k1",
    gaps: str = "skip",
    whitening: str = "none",
) -> Answer:
    """Return rewards of `shaped_rewards` and the advantages and returns that `gae` makes of them.

    Under first_pad and first_pad_with_kl the position that the score lands on is one more link of the row's
    chain: reward and value there are kept, V after it is 0. Whitening (unbiased, var + 1e-8) is over the
    tokens only.

    Args:
        logprobs, ref_logprobs, values: floats [B, T].
        scores: floats [B].
        mask: bools [B, T].
        kl_coef, gamma, lam, score_clip: parameters; score_clip may be none.

    Returns:
        {"rewards", "advantages", "returns": Numbers [B, T]}, None where the mask is False; a reward also
        stands where the score lands.
    """
    shaping: dict[str, Any] = {"score_clip": score_clip, "estimator": estimator, "score_at": score_at}
    rewards = shaped_rewards(logprobs, ref_logprobs, scores, mask, kl_coef=kl_coef, **shaping)["rewards"]
    slots = [score_slot(row, score_at) for row in mask]
    chain = [[bool(m) or t == slot for t, m in enumerate(row)] for row, slot in zip(mask, slots, strict=True)]
    estimates = advantages_and_returns(rewards, values, chain, gamma=gamma, lam=lam, gaps=gaps)
    advantages, returns = (_at_tokens(estimate, mask) for estimate in estimates)
    if whitening == "inside":
        advantages = whitened(advantages, mask)
    return {"rewards": rewards, "advantages": advantages, "returns": returns}


def _at_tokens(rows: Sequence[Sequence[Number | None]], mask: Mask) -> list[list[Number | None]]:
    return [[v if m else None for v, m in zip(*row, strict=True)] for row in zip(rows, mask, strict=True)]
