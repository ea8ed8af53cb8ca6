"""The two laws by which a run is verified."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from goldenppo.reference import exact

__all__ = ["K_GRADIENT", "K_OUTPUT", "ROUNDOFF", "K", "normwise", "roundoff", "tolerance_use"]

K = 4.0  # of the tolerance law, one number for the whole suite
# k_run of the normwise law, from 24 float64 recordings (20 tiny, 4 of default size) verified in float64,
# float32 and bfloat16: outputs used up to 54, weight gradients, whose sums over tokens cancel, up to 623,
# Adam's state up to 211. tests/reference/run/evidence.py repeats the measurement. At bfloat16 K_GRADIENT·u is
# 4: there the law finds gross faults only, and the derivatives at each token, which go by the tolerance law
# of float32, find the others.
K_OUTPUT = 128.0  # logits, values, scores, log-probs
K_GRADIENT = 1024.0  # weight gradients and what the optimizer makes of them
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8}
SUBNORMAL = {"float64": 2.0**-1074, "float32": 2.0**-149}


def roundoff(dtype: str, tf32: bool = False) -> float:
    """Return u of a dtype; TF32 rounds the operands of float32 products."""
    return ROUNDOFF["tf32" if tf32 and dtype == "float32" else dtype]


def normwise(got: Tensor, want: Tensor, granted: float) -> float:
    """Return max|got − want|/(granted·max|want|): at most 1 under the normwise law, granted = k_run·u.

    Equal tensors use nothing; a wrong shape, NaN or infinity uses more than anything.
    """
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    distance = float((got - want).abs().max()) if got.numel() else 0.0  # RUN-2
    if distance == 0:
        return 0.0
    scale = float(want.abs().max())
    return distance / (granted * scale) if scale > 0 and math.isfinite(distance) else math.inf


def tolerance_use(got: Tensor, want: Any, dtype: str, skip: frozenset[int] = frozenset()) -> float:
    """Return the largest share of the op tolerance over the elements: at most 1 under the tolerance law.

    Args:
        got: tensor of any shape.
        want: Numbers nested in that shape; None is not compared.
        dtype: dtype that was computed in.
        skip: flat indices left out.
    """
    numbers = list(flat(want))
    values = got.detach().double().cpu().flatten().tolist()
    if len(values) != len(numbers):
        return math.inf
    u, s = ROUNDOFF[dtype], SUBNORMAL[dtype]
    uses = [0.0]
    for index, (value, number) in enumerate(zip(values, numbers, strict=True)):
        if number is None or index in skip:
            continue
        expected = exact.to_float(number)
        off = abs(value - expected)
        allowed = K * (u * number.gauge + s) + u * abs(expected)  # RUN-1
        uses.append(off / allowed if math.isfinite(off) else math.inf)
    return max(uses)


def flat(nested: Any) -> Iterator[Any]:
    """Walk through nested lists."""
    if isinstance(nested, list):
        for item in nested:
            yield from flat(item)
    else:
        yield nested
