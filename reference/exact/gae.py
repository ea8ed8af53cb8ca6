"""Exact generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Sequence

from goldenppo.reference.exact.number import (
    ONE,
    ZERO,
    Answer,
    Grid,
    Mask,
    Number,
    Real,
    Row,
    lift,
    parameter,
    total,
    widest,
)
from goldenppo.reference.exact.whiten import whitened

__all__ = ["advantages_and_returns", "gae"]


def gae(
    rewards: Grid,
    values: Grid,
    mask: Mask,
    *,
    gamma: Real,
    lam: Real,
    gaps: str = "skip",
    whitening: str = "none",
    variance: str = "unbiased",
    epsilon: str = "var+1e-8",
) -> Answer:
    """Return advantages and returns at tokens.

    Along a chain of positions 0 … n−1 of a row:

        δ_t = r_t + γ·V_{t+1} − V_t, t in [0, n−1], with V_n = 0
        A_t = Σ_{l=0}^{n−1−t} (γλ)^l·δ_{t+l}
        R_t = A_t + V_t, with A before whitening

    A chain holds the row's tokens (`skip`), the positions from its first to its last token with r = V = 0 at
    the gaps (`zero`), or one run of neighbouring tokens, every run a chain of its own (`cut`).

    Args:
        rewards, values: floats or Numbers [B, T].
        mask: bools [B, T].
        gamma, lam: parameters.
        whitening: inside returns the advantages as `whiten` gives them over the tokens, mean removed.
        variance, epsilon: axes of `whiten`.

    Returns:
        {"advantages", "returns": Numbers [B, T]}, None where the mask is False.

    Source: Schulman et al. 2016 (arXiv:1506.02438) equation 16.
    """
    advantages, returns = advantages_and_returns(rewards, values, mask, gamma=gamma, lam=lam, gaps=gaps)
    if whitening == "inside":
        advantages = whitened(advantages, mask, variance=variance, epsilon=epsilon)
    return {"advantages": advantages, "returns": returns}


def advantages_and_returns(
    rewards: Grid, values: Grid, mask: Mask, *, gamma: Real, lam: Real, gaps: str = "skip"
) -> tuple[list[list[Number | None]], list[list[Number | None]]]:
    """Return unwhitened advantages and the returns, Numbers [B, T], None where the mask is False."""
    gamma, lam = parameter(gamma), parameter(lam)
    powers = _powers(gamma * lam, max((len(row) for row in mask), default=0))
    rows = [_row(*row, gamma, lam, powers, gaps) for row in zip(rewards, values, mask, strict=True)]
    return [advantages for advantages, _ in rows], [returns for _, returns in rows]


def _powers(factor: Number, count: int) -> list[Number]:
    powers = [ONE]
    while len(powers) < count:
        powers.append(powers[-1] * factor)
    return powers


def _row(
    rewards: Row,
    values: Row,
    mask: Sequence[bool],
    gamma: Number,
    lam: Number,
    powers: Sequence[Number],
    gaps: str,
) -> tuple[list[Number | None], list[Number | None]]:
    """Return one row's advantages and returns."""
    advantages: list[Number | None] = [None] * len(mask)
    returns: list[Number | None] = [None] * len(mask)
    for chain in _chains(mask, gaps):
        r = [lift(rewards[t]) if mask[t] else ZERO for t in chain]
        V = [lift(values[t]) if mask[t] else ZERO for t in chain]
        for t, A, R in zip(chain, *_along(r, V, gamma, lam, powers), strict=True):
            if mask[t]:
                advantages[t], returns[t] = A, R
    return advantages, returns


def _chains(mask: Sequence[bool], gaps: str) -> list[list[int]]:
    """Return the chains of a row, each a list of positions."""
    tokens = [t for t, m in enumerate(mask) if m]
    if not tokens:
        return []
    if gaps == "skip":
        return [tokens]
    if gaps == "zero":
        return [list(range(tokens[0], tokens[-1] + 1))]
    starts = [t for t in tokens if t == 0 or not mask[t - 1]]
    ends = [*starts[1:], len(mask)]
    return [[t for t in tokens if first <= t < end] for first, end in zip(starts, ends, strict=True)]


def _along(
    r: Sequence[Number], V: Sequence[Number], gamma: Number, lam: Number, powers: Sequence[Number]
) -> tuple[list[Number], list[Number]]:
    """Return the advantages and returns of one chain.

    The value is that of the sum over l. Trainers run backwards, A_t = δ_t + γλ·A_{t+1}, or apply the powers
    of γλ at once, and form R_t as A_t + V_t or as r_t + γ·((1 − λ)·V_{t+1} + λ·R_{t+1}): the largest gauge
    holds. The range is that of the recursion, whose steps stay as large as the answers; the powers do not.
    """
    after = [*V[1:], ZERO]
    delta = [total([r_t, gamma * next_V, -V_t]) for r_t, next_V, V_t in zip(r, after, V, strict=True)]
    decay = gamma * lam
    advantages, returns = [], []
    A = R = ZERO
    for t in reversed(range(len(delta))):
        summed = total([power * d for power, d in zip(powers, delta[t:], strict=False)])
        A = widest(delta[t] + decay * A, summed)
        R = widest(A + V[t], r[t] + gamma * ((1 - lam) * after[t] + lam * R))
        advantages.append(A)
        returns.append(R)
    return advantages[::-1], returns[::-1]
