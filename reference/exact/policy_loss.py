"""Exact clipped surrogate with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from goldenppo.reference.exact.aggregate import flags, reduced, spread, weights
from goldenppo.reference.exact.cuts import any_of, beyond, candidates
from goldenppo.reference.exact.number import (
    ONE,
    ZERO,
    Answer,
    Grid,
    Mask,
    Number,
    Real,
    clip,
    exceeds,
    exp,
    lift,
    max_,
    min_,
    parameter,
    widest,
)
from goldenppo.reference.exact.ratio import log_ratio

__all__ = ["approximate_kl", "policy_loss"]

Bounds: TypeAlias = tuple[Number, Number, Number | None]  # 1 − clip_low, 1 + clip_high, dual_clip


def policy_loss(
    logprobs: Grid,
    old_logprobs: Grid,
    advantages: Grid,
    mask: Mask,
    *,
    clip_low: Real,
    clip_high: Real,
    dual_clip: Real | None = None,
    horizon: Real | None = None,
    aggregation: str = "token_mean",
    empty_rows: str = "excluded",
    log_ratio_clamp: str | int = "none",
    approx_kl: str = "k1",
    clip_fraction: str = "larger_loss",
    sides: bool = False,
) -> Answer:
    """Return the clipped surrogate, its gradient, the clip fraction and the approximate KL.

    d = ℓ − ℓ_old (clamped if log_ratio_clamp says so), r = e^d, lo = 1 − clip_low, hi = 1 + clip_high; term =
    max(−A·r, −A·clip(r, lo, hi)), under dual clip min(term, −dual_clip·A) where A < 0; loss = agg(term).
    ∂term/∂ℓ = −A·r, and 0 where the bound holds: r > hi and A > 0, r < lo and A < 0, r > dual_clip and A < 0,
    or d beyond its clamp.

    Args:
        logprobs, old_logprobs, advantages: floats [B, T].
        mask: bools [B, T].
        clip_low, clip_high, dual_clip, horizon: parameters; dual_clip may be none.
        sides: True adds grad_logprobs_low and grad_logprobs_high, the smallest and the largest of the
            one-sided derivatives at tokens on (or within rounding of) an edge; elsewhere both equal
            grad_logprobs.

    Returns:
        {"loss", "clip_fraction", "approx_kl": Number, "grad_logprobs": Numbers [B, T]}.

    Source: Schulman et al. 2017 (arXiv:1707.06347) equation 7; dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """
    bounds = (
        1 - parameter(clip_low),
        1 + parameter(clip_high),
        None if dual_clip is None else parameter(dual_clip),
    )
    how: dict[str, Any] = {"aggregation": aggregation, "empty_rows": empty_rows, "horizon": horizon}
    inputs, counts = (logprobs, old_logprobs, advantages), flags(mask, aggregation)
    tokens = _tokens(inputs, counts, log_ratio_clamp)
    weight = weights(counts, **how)
    slopes = [[_slopes(*token, bounds, log_ratio_clamp) for token in row] for row in tokens]
    measured = [token for row in _tokens(inputs, flags(mask), log_ratio_clamp) for token in row]
    result = {
        "loss": reduced([[_surrogate(A, exp(d), bounds) for _, d, A in row] for row in tokens], **how),
        "clip_fraction": reduced([[_clipped(A, exp(d), bounds, clip_fraction) for _, d, A in measured]]),
        "approx_kl": reduced([[approximate_kl(d, approx_kl) for _, d, _ in measured]]),
        "grad_logprobs": spread([[s[0] for s in row] for row in slopes], counts, weight),
    }
    if sides:
        result["grad_logprobs_low"] = spread([[s[1] for s in row] for row in slopes], counts, weight)
        result["grad_logprobs_high"] = spread([[s[2] for s in row] for row in slopes], counts, weight)
    return result


def approximate_kl(d: Number, kind: str) -> Number:
    """Return one token's term: k1 = −d, minus_k1 = d, k2 = ½d², k3 = (e^d − 1) − d or (e^d − d) − 1."""
    if kind in ("k1", "minus_k1"):
        return -d if kind == "k1" else d
    if kind == "k2":
        return Fraction(1, 2) * (d * d)
    if kind == "k3":
        return widest((exp(d) - 1) - d, (exp(d) - d) - 1)
    raise ValueError(f"approx_kl is {kind!r}; expected k1, minus_k1, k2 or k3.")


def _tokens(inputs: Sequence[Grid], mask: Mask, log_ratio_clamp: str | int) -> list[list[tuple[Number, Number, Number]]]:
    """Return per row the (unclamped d, clamped d, A) of the tokens that count."""
    rows = zip(*inputs, mask, strict=True)
    return [
        [(lift(new) - lift(old), log_ratio(new, old, log_ratio_clamp), lift(A)) for new, old, A, m in zip(*row, strict=True) if m]
        for row in rows
    ]


def _surrogate(A: Number, r: Number, bounds: Bounds) -> Number:
    low, high, dual = bounds
    plain, bounded = -A * r, -A * clip(r, low, high)
    # inside the band both branches are one function, and without an advantage both are 0: no edge there
    same = low <= r <= high or A.value == 0
    term = widest(plain, bounded) if same else max_(plain, bounded)
    return min_(term, -dual * A) if dual is not None and A < 0 else term


def _clipped(A: Number, r: Number, bounds: Bounds, kind: str) -> Number:
    """Return 1 for a token that clip_fraction counts, else 0; larger_loss is judged before dual clip."""
    low, high, _ = bounds
    outside = exceeds(r, high) or exceeds(low, r)
    if kind == "outside_band":
        return ONE if outside else ZERO
    larger = outside and A.value != 0 and exceeds(-A * clip(r, low, high), -A * r)
    return ONE if larger else ZERO


def _slopes(raw: Number, d: Number, A: Number, bounds: Bounds, log_ratio_clamp: str | int) -> tuple[Number, Number, Number]:
    """Return ∂term/∂ℓ of one token, and the smallest and largest of its one-sided values."""
    low, high, dual = bounds
    r = exp(d)
    cuts = [beyond(r, high) if A > 0 else beyond(low, r)]
    if dual is not None and A < 0:
        cuts.append(beyond(r, dual))
    if log_ratio_clamp != "none":
        cuts += [beyond(raw, int(log_ratio_clamp)), beyond(-raw, int(log_ratio_clamp))]
    return candidates(-A * r, any_of(cuts))
