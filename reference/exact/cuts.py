"""Where a clip or a maximum cuts a gradient off, and both answers where rounding may decide it either way.

A cut is a triple of bools (certain, actual, possible): whether it holds however the operands are rounded,
whether it holds in exact arithmetic, whether some rounding makes it hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from goldenppo.reference.exact.number import ZERO, Number, Operand, near

__all__ = ["OPEN", "Cut", "all_of", "any_of", "beyond", "candidates"]

Cut: TypeAlias = tuple[bool, bool, bool]

OPEN: Cut = (False, False, False)  # cuts nothing off


def beyond(a: Number, b: Operand) -> Cut:
    """Return the cut a > b: open where a and b are `near`, a tie included."""
    actual = a > b
    return (False, actual, True) if near(a, b) else (actual, actual, actual)


def all_of(*cuts: Cut) -> Cut:
    """Return the cut that holds where every one of the cuts holds."""
    certain, actual, possible = zip(*cuts, strict=True)
    return all(certain), all(actual), all(possible)


def any_of(cuts: Sequence[Cut]) -> Cut:
    """Return the cut that holds where one of the cuts holds."""
    certain, actual, possible = zip(*cuts, strict=True)
    return any(certain), any(actual), any(possible)


def candidates(slope: Number, cut: Cut) -> tuple[Number, Number, Number]:
    """Return the derivative under a cut, and the smallest and the largest one that rounding may lead to.

    Args:
        slope: the derivative where nothing is cut off; an exact 0 stands in its place where the cut holds.
    """
    certain, actual, possible = cut
    # Autograd multiplies the slope by 0, so a slope that overflows makes the 0 a NaN: its size stays in the range.
    zero = Number(ZERO.value, high=max(slope.high, slope.size))
    chosen = zero if actual else slope
    if certain == possible:
        return chosen, chosen, chosen
    return (chosen, slope, zero) if slope < ZERO else (chosen, zero, slope)
