"""Exact reduction of per-token terms to one number, and its derivative with respect to each term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from goldenppo.reference.exact.number import (
    NAN,
    ONE,
    ZERO,
    Answer,
    Grid,
    Mask,
    Number,
    Real,
    lift,
    literal,
    parameter,
    total,
    widest,
)

__all__ = ["aggregate", "flags", "reduced", "spread", "weights"]


def aggregate(
    x: Grid,
    mask: Mask,
    *,
    horizon: Real | None = None,
    aggregation: str = "token_mean",
    empty_rows: str = "excluded",
    denominator: str = "n",
) -> Answer:
    """Reduce x over the tokens that count.

    With n_b = Σ_t m_bt, N = Σ_b n_b, s_b = Σ_t x_bt over the tokens of row b, and K the number of rows
    (`counted`) or of rows with a token (`excluded`):

        token_mean                Σ_b s_b / N
        token_sum                 Σ_b s_b
        seq_mean_token_mean       Σ_b (s_b/n_b) / K
        seq_mean_token_sum        Σ_b s_b / K
        seq_mean_token_sum_norm   Σ_b (s_b/horizon) / K
        plain_mean                the mean over all slots, the mask not read

    Args:
        x: floats or Numbers [B, T].
        mask: bools [B, T].
        horizon: constant that seq_mean_token_sum_norm divides by.
        aggregation, empty_rows, denominator: variant axes; `denominator` replaces the token counts N and n_b.

    Returns:
        {"value": Number}; the answer of 0/0 where nothing is averaged.
    """
    mask = flags(mask, aggregation)
    rows = [[lift(v) for v, m in zip(*row, strict=True) if m] for row in zip(x, mask, strict=True)]
    how: dict[str, Any] = {"aggregation": aggregation, "empty_rows": empty_rows, "horizon": horizon}
    return {"value": reduced(rows, denominator=denominator, **how)}


def flags(mask: Mask, aggregation: str = "token_mean") -> list[list[bool]]:
    """Return the mask as bools [B, T]; under plain_mean every slot counts whatever the mask says."""
    return [[bool(m) or aggregation == "plain_mean" for m in row] for row in mask]


def reduced(
    rows: Sequence[Sequence[Number]],
    *,
    horizon: Real | None = None,
    aggregation: str = "token_mean",
    empty_rows: str = "excluded",
    denominator: str = "n",
) -> Number:
    """Reduce ragged rows of the terms that count; see `aggregate` for formulas and options.

    The norm is taken before or after the sum over rows (the larger gauge holds); Σ x·m/N and the mean over
    the selected terms do the same operations.
    """
    flat = [term for row in rows for term in row]
    if aggregation == "token_sum":
        return total(flat)
    if aggregation == "plain_mean":
        return total(flat) / len(flat)
    if aggregation == "token_mean":
        return total(flat) / _count(len(flat), denominator)
    kept = [row for row in rows if row or empty_rows == "counted"]
    if not kept:
        return NAN
    if aggregation == "seq_mean_token_mean":
        means = [total(row) / _count(len(row), denominator) if row else ZERO for row in kept]
        return total(means) / len(kept)
    sums = [total(row) for row in kept]
    if aggregation == "seq_mean_token_sum":
        return total(sums) / len(kept)
    if aggregation == "seq_mean_token_sum_norm":
        size = _horizon(horizon)
        return widest(total([s / size for s in sums]) / len(kept), total(sums) / len(kept) / size)
    raise ValueError(f"aggregation is {aggregation!r}; expected a value of the axis in spec/ops.yaml.")


def weights(
    mask: Mask, *, horizon: Real | None = None, aggregation: str = "token_mean", empty_rows: str = "excluded"
) -> list[Number]:
    """Return the derivative of the reduced value with respect to a term of each row.

    Args:
        mask: bools [B, T] as `flags` returns them.

    Returns:
        One Number per row: 1/N, 1, 1/(n_b·K), 1/K, 1/(horizon·K); an exact 0 for a row without tokens.
    """
    lengths = [sum(row) for row in mask]
    tokens = sum(lengths)
    rows = len(mask) if empty_rows == "counted" else sum(n > 0 for n in lengths)
    if aggregation == "token_sum":
        return [ONE] * len(mask)
    if aggregation in ("token_mean", "plain_mean"):
        return [ONE / tokens if n else ZERO for n in lengths]
    if aggregation == "seq_mean_token_mean":
        return [ONE / n / rows if n else ZERO for n in lengths]
    if aggregation == "seq_mean_token_sum":
        return [ONE / rows if n else ZERO for n in lengths]
    return [ONE / _horizon(horizon) / rows if n else ZERO for n in lengths]


def spread(slopes: Sequence[Sequence[Number]], mask: Mask, weight: Sequence[Number]) -> list[list[Number]]:
    """Place slope·weight at each position that counts and an exact 0 elsewhere.

    Args:
        slopes: derivative of the term at (b, t) with respect to its input, Numbers [B][n_b] in order of t.
        mask: bools [B, T].
        weight: Numbers [B] as `weights` returns them.

    Returns:
        Gradient, Numbers [B, T].
    """
    gradient = []
    for row, counts, w in zip(slopes, mask, weight, strict=True):
        source = iter(row)
        gradient.append([next(source) * w if m else ZERO for m in counts])
    return gradient


def _count(n: int, denominator: str) -> Number:
    if denominator == "n+1e-8":
        return n + parameter(1e-8)
    return literal(max(n, 1) if denominator == "max(n,1)" else n)


def _horizon(horizon: Real | None) -> Number:
    if horizon is None:
        raise ValueError("horizon is none but seq_mean_token_sum_norm divides by it; give a number.")
    return parameter(horizon)
