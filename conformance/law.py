"""The tolerance law (spec/tolerance.md): when a computed number is as right as its dtype allows.

    |got − want| ≤ k·(u·gauge + s) + u(out)·|want|

u is the unit roundoff of the dtype under test, s its smallest positive subnormal, u(out) the unit roundoff of the result's
own dtype, gauge the running error bound of the clause's formula. k is one number for the whole suite.
"""

import math
from dataclasses import dataclass

from goldenppo.conformance.cases import Block

K = 4.0


@dataclass(frozen=True)
class Dtype:
    """What the law needs to know of a floating-point format."""

    unit: float  # unit roundoff
    tiny: float  # smallest positive subnormal
    normal: float  # smallest positive normal
    largest: float


DTYPES = {
    "float64": Dtype(2.0**-53, 2.0**-1074, 2.0**-1022, 1.7976931348623157e308),
    "float32": Dtype(2.0**-24, 2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
    "float16": Dtype(2.0**-11, 2.0**-24, 2.0**-14, 65504.0),
    "bfloat16": Dtype(2.0**-8, 2.0**-133, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
}


def tolerance(want: float, gauge: float, dtype: Dtype, out: Dtype, k: float = K) -> float:
    """The largest error that the law allows for one element."""
    return k * (dtype.unit * gauge + dtype.tiny) + out.unit * abs(want)


def in_range(block: Block, dtype: Dtype) -> bool:
    """Whether every intermediate of the clause's formula is a normal number of the dtype."""
    return block.low >= dtype.normal and block.high <= dtype.largest


def telling(block: Block, dtype: Dtype) -> bool:
    """Whether the dtype can tell these numbers from zero; where it cannot, a pass would say nothing."""
    wanted = [(want, gauge) for want, gauge in zip(block.want, block.gauge, strict=True) if want]
    return not wanted or any(not abs(want) <= tolerance(want, gauge, dtype, dtype) for want, gauge in wanted)


def use(got: float, want: float | None, gauge: float, dtype: Dtype, out: Dtype, upto: float | None = None) -> float:
    """The error of one element as a share of the tolerance: at most 1 is right.

    Not-a-number is right only where it is wanted, an infinity only where the same one is wanted.
    """
    if want is None:
        return 0.0
    if math.isnan(want) or math.isinf(want):
        return 0.0 if got == want or (math.isnan(want) and math.isnan(got)) else math.inf
    if not math.isfinite(got):
        return math.inf
    if upto is not None and min(want, upto) <= got <= max(want, upto):
        return 0.0
    error = abs(got - want) if upto is None else min(abs(got - want), abs(got - upto))
    return error / tolerance(want, gauge, dtype, out)


def worst(got: list[float], block: Block, dtype: str, out: str) -> tuple[float, int]:
    """The largest use over a block and the index of the first element that is wrong (of the largest, if none is)."""
    law, result = DTYPES[dtype], DTYPES.get(out, DTYPES[dtype])
    upto = block.upto or (None,) * len(block.want)
    uses = [
        use(number, want, gauge, law, result, other)
        for number, want, gauge, other in zip(got, block.want, block.gauge, upto, strict=True)
    ]
    largest = max(uses, default=0.0)
    index = next((i for i, item in enumerate(uses) if item > 1), uses.index(largest) if uses else 0)
    return largest, index
