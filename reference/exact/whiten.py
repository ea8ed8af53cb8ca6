"""Exact masked whitening."""

from __future__ import annotations

from collections.abc import Sequence

from goldenppo.reference.exact.number import (
    Answer,
    Grid,
    Mask,
    Number,
    lift,
    literal,
    parameter,
    sqrt,
    total,
    widest,
)

__all__ = ["whiten", "whitened"]


def whiten(x: Grid, mask: Mask, *, variance: str = "unbiased", epsilon: str = "var+1e-8", mean: str = "removed") -> Answer:
    """Return x over the tokens that count with mean 0 and variance 1.

    With n tokens, μ = Σ x/n and v = Σ (x−μ)²/(n−1) or, biased, /n: (x−μ)·f(v), plus μ if the mean is kept.
    f(v) is 1/√(v + 1e-8), 1/(√v + e) with e = 1e-8, 1e-5 or 1e-4, or 1/√max(v, 1e-8), as `epsilon` says.

    Args:
        x: floats or Numbers [B, T].
        mask: bools [B, T].

    Returns:
        {"whitened": Numbers [B, T]}, None where the mask is False. One token has no unbiased variance (0/0).
    """
    return {"whitened": whitened(x, mask, variance=variance, epsilon=epsilon, mean=mean)}


def whitened(
    x: Grid, mask: Mask, *, variance: str = "unbiased", epsilon: str = "var+1e-8", mean: str = "removed"
) -> list[list[Number | None]]:
    """Return the nested list of `whiten`."""
    flat = [lift(v) for row, flags in zip(x, mask, strict=True) for v, m in zip(row, flags, strict=True) if m]
    if not flat:
        return [[None] * len(row) for row in mask]
    mu = total(flat) / len(flat)
    centred = [v - mu for v in flat]
    scaled = iter(_scaled(centred, _variance(centred, variance), epsilon))
    return [[_kept(next(scaled), mu, mean) if m else None for m in row] for row in mask]


def _variance(centred: Sequence[Number], kind: str) -> Number:
    """Return Σ c²/n, or Σ c²/(n−1), which some form as the biased one times n/(n−1)."""
    n = len(centred)
    squares = total([c * c for c in centred])
    if kind == "biased":
        return squares / n
    plain = squares / (n - 1)
    return plain if n == 1 else widest(plain, squares / n * (literal(n) / (n - 1)))


def _scaled(centred: Sequence[Number], v: Number, epsilon: str) -> list[Number]:
    """Return c·f(v), as a product with the reciprocal root or as a quotient."""
    if epsilon.startswith("std+"):
        root = sqrt(v) + parameter(float(epsilon.removeprefix("std+")))
    else:
        small = parameter(1e-8)
        # The floor is no edge for a case to stay clear of: the answer is continuous there and has no gradient.
        floored = small if v.value is not None and (v - small).value < 0 else v
        root = sqrt(v + small if epsilon == "var+1e-8" else floored)
    return [widest(c / root, c * (1 / root)) for c in centred]


def _kept(value: Number, mu: Number, mean: str) -> Number:
    return value + mu if mean == "kept" else value
