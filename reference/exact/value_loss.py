"""Exact clipped critic loss with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from goldenppo.reference.exact.aggregate import flags, reduced, spread, weights
from goldenppo.reference.exact.cuts import OPEN, all_of, any_of, beyond, candidates
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
    lift,
    max_,
    min_,
    parameter,
    widest,
)

__all__ = ["value_loss"]

# the name `clip` is the parameter inside value_loss, as the op table has it
_clip = clip


def value_loss(
    values: Grid,
    old_values: Grid,
    returns: Grid,
    mask: Mask,
    *,
    clip: Real | None = None,
    horizon: Real | None = None,
    aggregation: str = "token_mean",
    empty_rows: str = "excluded",
    factor: str = "half",
    form: str = "max",
    sides: bool = False,
) -> Answer:
    """Return the critic loss, its gradient and the clip fraction.

    Vc = clip(V, V_old − c, V_old + c), or V_old + clip(V − V_old, −c, c): the larger gauge holds. term =
    max((V−R)², (Vc−R)²) (form max), (Vc−R)² (clipped_only), min((V−R)², c) (clamped_error), (V−R)² without a
    clip; loss = factor·agg(term). ∂term/∂V = 2(V−R) or, inside the band, 2(Vc−R); 0 where V is beyond V_old ±
    c and the clipped error is taken, or the squared error beyond c.

    Args:
        values, old_values, returns: floats [B, T].
        mask: bools [B, T].
        clip, horizon: parameters; clip may be none.
        sides: True adds grad_values_low and grad_values_high, the smallest and the largest of the one-sided
            derivatives at tokens on (or within rounding of) an edge; elsewhere both equal grad_values.

    Returns:
        {"loss", "clip_fraction": Number, "grad_values": Numbers [B, T]}. The fraction counts tokens whose
        clipped squared error is strictly larger, whatever the form; 0 without a clip.

    Source: openai/lm-human-preferences; Schulman et al. 2016 (arXiv:1506.02438) for the unclipped error.
    """
    c = None if clip is None else parameter(clip)
    half = Fraction(1, 2) if factor == "half" else Fraction(1)
    how: dict[str, Any] = {"aggregation": aggregation, "empty_rows": empty_rows, "horizon": horizon}
    inputs, counts = (values, old_values, returns), flags(mask, aggregation)
    tokens = _tokens(inputs, counts)
    weight = weights(counts, **how)
    slopes = [[_slopes(*token, c, form, 2 * half) for token in row] for row in tokens]
    measured = [token for row in _tokens(inputs, flags(mask)) for token in row]
    result = {
        "loss": half * reduced([[_term(*token, c, form) for token in row] for row in tokens], **how),
        "clip_fraction": reduced([[_clipped(*token, c) for token in measured]]),
        "grad_values": spread([[s[0] for s in row] for row in slopes], counts, weight),
    }
    if sides:
        result["grad_values_low"] = spread([[s[1] for s in row] for row in slopes], counts, weight)
        result["grad_values_high"] = spread([[s[2] for s in row] for row in slopes], counts, weight)
    return result


def _tokens(inputs: Sequence[Grid], mask: Mask) -> list[list[tuple[Number, Number, Number]]]:
    """Return per row the (V, V_old, R) of the tokens that count."""
    rows = zip(*inputs, mask, strict=True)
    return [[(lift(V), lift(old), lift(R)) for V, old, R, m in zip(*row, strict=True) if m] for row in rows]


def _clipped_value(V: Number, old: Number, c: Number) -> Number:
    return widest(_clip(V, old - c, old + c), old + _clip(V - old, -c, c))


def _inside(V: Number, old: Number, c: Number) -> bool:
    return old - c <= V <= old + c


def _squared_error(V: Number, R: Number) -> Number:
    return (V - R) * (V - R)


def _term(V: Number, old: Number, R: Number, c: Number | None, form: str) -> Number:
    plain = _squared_error(V, R)
    if c is None:
        return plain
    if form == "clamped_error":
        return min_(plain, c)
    clipped = _squared_error(_clipped_value(V, old, c), R)
    if form == "clipped_only":
        return clipped
    # inside the band both branches are one function: no edge there
    return widest(plain, clipped) if _inside(V, old, c) else max_(plain, clipped)


def _clipped(V: Number, old: Number, R: Number, c: Number | None) -> Number:
    """Return 1 for a token that clip_fraction counts, else 0."""
    if c is None or not (exceeds(V, old + c) or exceeds(old - c, V)):
        return ZERO
    larger = exceeds(_squared_error(_clipped_value(V, old, c), R), _squared_error(V, R))
    return ONE if larger else ZERO


def _slopes(V: Number, old: Number, R: Number, c: Number | None, form: str, scale: Fraction) -> tuple[Number, Number, Number]:
    """Return scale·(V − R) of one token, 0 where it is cut off, and the extremes of its one-sided values."""
    error = V - R
    if c is None:
        return candidates(scale * error, OPEN)
    if form == "clamped_error":
        return candidates(scale * error, beyond(error * error, c))
    low, high = old - c, old + c
    if form == "clipped_only":
        cut = any_of([beyond(V, high), beyond(low, V)])
    else:
        # the clipped error is the larger one if R lies on V's side of the middle between edge and V
        above = all_of(beyond(V, high), beyond(R, Fraction(1, 2) * (high + V)))
        below = all_of(beyond(low, V), beyond(Fraction(1, 2) * (low + V), R))
        cut = any_of([above, below])
    if _inside(V, old, c):
        error = widest(error, _clipped_value(V, old, c) - R)
    return candidates(scale * error, cut)
