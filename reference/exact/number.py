"""Exact numbers that carry their own error bound and range.

The oracle computes every answer in these numbers, so that an expected value, the tolerance that goes with it
and the dtypes at which it can be compared come out of one evaluation of one formula. A number holds

* its value: a `Fraction` as long as it is rational, else a 60-digit binary float of a context of our own;
* its gauge: the running error bound in units of the unit roundoff u. Code that evaluates the formula with
  every operation rounded to precision u lands within about u·gauge of the value (spec/tolerance.md has the
  law);
* its range: the smallest and the largest non-zero magnitude met on the way, which must be normal numbers of a
  dtype before an answer can be compared there.

Gauges are plain floats made with + * / sqrt alone and `math.fsum`, never with `sum` (compensated since Python
3.12) or a function of libm, so that fixtures come out byte for byte equal on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath

__all__ = [
    "NAN",
    "ONE",
    "ZERO",
    "Number",
    "clip",
    "exceeds",
    "exp",
    "kinks",
    "lift",
    "literal",
    "log",
    "log_softmax",
    "logsumexp",
    "max_",
    "min_",
    "near",
    "parameter",
    "sigmoid",
    "softplus",
    "span",
    "sqrt",
    "to_float",
    "total",
    "widest",
]

# what the functions of the oracle take and return
Real: TypeAlias = "float | Fraction | Number"
Operand: TypeAlias = "int | Fraction | Number"
Row: TypeAlias = "Sequence[Real | Any]"  # Any: a masked slot may hold whatever it likes, it is not read
Grid: TypeAlias = "Sequence[Row]"
Mask: TypeAlias = "Sequence[Sequence[bool]]"
Answer: TypeAlias = "dict[str, Any]"

mp = mpmath.mp.clone()
mp.dps = 60

NEAR = 2.0**-5  # two values closer than this many gauges may be told apart either way at bfloat16
NOISE = 2.0**-53  # what is smaller than this many gauges is below the rounding noise of every dtype
TINY = 5e-324  # stands for magnitudes that float64 would round to 0
_found: list[list[float]] = []  # the lists of the `kinks` blocks that are open


class Number:
    """Hold a value, its running error bound and the range of what it was made from.

    Every operation adds the magnitude of its result to the gauges of its operands, propagated with the exact
    derivatives (f = a·b: gauge = |b|·g_a + |a|·g_b + |f|). Negation and selection add nothing. `low` and
    `high` speak of the numbers that went into this one; its own value joins them when another operation uses
    it, because a result that nobody uses cannot lose anything by underflow. Zero is never recorded, nor is
    what lies below the noise.

    Attributes:
        value: Fraction, or mpf where irrational; None for the answer of 0/0.
        gauge: running error bound, a float >= 0.
        low: smallest non-zero magnitude used so far, inf if none.
        high: largest magnitude used so far, 0 if none.
        size: |value| as a float.
        exempt: True if made of parameters and literals alone, whose magnitudes are not recorded.

    Source: running error analysis, N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.3.
    """

    __slots__ = ("exempt", "gauge", "high", "low", "size", "value")

    def __init__(self, value: Any, gauge: float = 0.0, low: float = math.inf, high: float = 0.0, exempt: bool = False) -> None:
        self.value = value
        self.gauge = gauge
        self.low = low
        self.high = high
        self.size = _size(value)
        self.exempt = exempt

    def __repr__(self) -> str:
        return f"Number({to_float(self)!r}, gauge={self.gauge!r})"

    def __neg__(self) -> Number:
        if self.value is None:
            return self
        return Number(-self.value, self.gauge, self.low, self.high, self.exempt)

    def __abs__(self) -> Number:
        _watch(self, ZERO)
        return -self if self.value is not None and self.value < 0 else self

    def __add__(self, other: Operand) -> Number:
        other = _number(other)
        if self.value is None or other.value is None:
            return NAN
        if _is_zero(self):
            return other
        if _is_zero(other):
            return self
        a, b = _alike(self.value, other.value)
        result = Number(a + b, 0.0, *_sum_range((self, other)), self.exempt and other.exempt)
        result.gauge = self.gauge + other.gauge + result.size
        return result

    def __sub__(self, other: Operand) -> Number:
        return self + -_number(other)

    def __mul__(self, other: Operand) -> Number:
        other = _number(other)
        if self.value is None or other.value is None:
            return NAN
        if _is_one(other):
            return self
        if _is_one(self):
            return other
        a, b = _alike(self.value, other.value)
        result = Number(a * b, 0.0, *_range((self, other)), self.exempt and other.exempt)
        result.gauge = _times(self.size, other.gauge) + _times(other.size, self.gauge) + result.size
        return result

    def __truediv__(self, other: Operand) -> Number:
        other = _number(other)
        if self.value is None or other.value is None or (self.value == 0 and other.value == 0):
            return NAN
        if _is_one(other):
            return self
        if other.value == 0:
            raise ValueError(f"{self!r} is divided by 0, which has no finite answer; choose inputs that avoid it.")
        a, b = _alike(self.value, other.value)
        result = Number(a / b, 0.0, *_range((self, other)), self.exempt and other.exempt)
        result.gauge = self.gauge / other.size + _times(result.size, other.gauge / other.size) + result.size
        return result

    def __radd__(self, other: Operand) -> Number:
        return _number(other) + self

    def __rsub__(self, other: Operand) -> Number:
        return _number(other) - self

    def __rmul__(self, other: Operand) -> Number:
        return _number(other) * self

    def __rtruediv__(self, other: Operand) -> Number:
        return _number(other) / self

    def __lt__(self, other: Operand) -> bool:
        return _order(self, other) < 0

    def __le__(self, other: Operand) -> bool:
        return _order(self, other) <= 0

    def __gt__(self, other: Operand) -> bool:
        return _order(self, other) > 0

    def __ge__(self, other: Operand) -> bool:
        return _order(self, other) >= 0


# --- making numbers -----------------------------------------------------------------------------------------


def lift(x: Real) -> Number:
    """Make an input a number: exact, gauge 0, its magnitude counted in the range.

    Args:
        x: a finite float; a `Number` passes unchanged.

    Raises:
        ValueError: x is NaN or infinite; the oracle reads positions that count, where inputs are finite.
    """
    return x if isinstance(x, Number) else Number(_exact(x))


def parameter(x: Real) -> Number:
    """Make a parameter a number: gauge |x|, as a trainer may round it to its dtype; not in the range."""
    if isinstance(x, Number):
        return x
    result = Number(_exact(x), exempt=True)
    result.gauge = result.size
    return result


def literal(x: int | Fraction) -> Number:
    """Make a constant of the formula a number (1, ½, a count): exact, gauge 0, not counted in the range."""
    return Number(Fraction(x), exempt=True)


# --- reading numbers ----------------------------------------------------------------------------------------


def to_float(x: Number) -> float:
    """Round the value to float64, once and correctly; ±inf beyond its range, nan for the answer of 0/0."""
    if x.value is None:
        return math.nan
    value = x.value
    if not isinstance(value, Fraction):
        sign, mantissa, exponent, _ = value._mpf_  # exactly (-1)^sign · mantissa · 2^exponent
        value = Fraction(int(mantissa)) * (Fraction(2) ** int(exponent)) * (-1 if sign else 1)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def span(x: Number) -> tuple[float, float]:
    """Return the range to store with an answer: the smallest and the largest magnitude met.

    The final result counts in the largest, because an overflow spoils it, and not in the smallest, because an
    underflow of the result is covered by the subnormal term of the tolerance.

    Returns:
        (low, high): low is inf if nothing was recorded.
    """
    return x.low, max(x.high, x.size)


# --- sums and selections ------------------------------------------------------------------------------------


def total(items: Iterable[Number]) -> Number:
    """Add numbers up, in whatever order a trainer may choose: Σ|x| joins the gauge once.

    Args:
        items: numbers; none gives an exact 0, and one is returned as it is.
    """
    items = [item for item in items if not _is_zero(item)]
    if len(items) == 1:
        return items[0]
    if any(item.value is None for item in items):
        return NAN
    gauge = math.fsum(item.gauge for item in items) + math.fsum(item.size for item in items)
    return Number(_add_up([x.value for x in items]), gauge, *_sum_range(items), all(x.exempt for x in items))


def max_(a: Number, b: Number) -> Number:
    """Select the larger number with its gauge, or the larger gauge where the two are near each other."""
    if a.value is None or b.value is None:
        return NAN
    return _select(a, b, a if _order(a, b) >= 0 else b)


def min_(a: Number, b: Number) -> Number:
    """Select the smaller number with its gauge, or the larger gauge where the two are near each other."""
    if a.value is None or b.value is None:
        return NAN
    return _select(a, b, a if _order(a, b) <= 0 else b)


def clip(x: Number, low: Operand, high: Operand) -> Number:
    """Select x, or the edge it lies beyond."""
    return min_(max_(x, _number(low)), _number(high))


def exceeds(a: Number, b: Operand) -> bool:
    """Decide a > b where the decision itself shows in an answer, so that a `kinks` block hears of it."""
    _watch(a, _number(b))
    return _order(a, b) > 0


def near(a: Number, b: Operand) -> bool:
    """Tell whether rounding may order a and b either way: |a − b| <= 2^-5·(g_a + g_b)."""
    b = _number(b)
    return _distance(a, b) <= NEAR * (a.gauge + b.gauge)


def widest(first: Number, *others: Number) -> Number:
    """Return the first form of a value with the largest gauge over all forms that trainers write it in.

    Args:
        first: the formula as the clause has it; value and range are taken from here.
        others: the same value by other operations.

    Raises:
        ValueError: a form has another value, so it is no form of the same formula.
    """
    if first.value is None:
        return NAN
    gauge = max(form.gauge for form in (first, *others))
    for form in others:
        if _distance(first, form) > 1e-45 * gauge:
            raise ValueError(f"{first!r} and {form!r} are given as two forms of one value but differ.")
    return _widened(first, gauge)


@contextmanager
def kinks() -> Iterator[list[float]]:
    """Collect how close every max, min, clip, abs and deciding comparison of the block comes to its edge.

    The distance is |a − b|/(g_a + g_b), and |a − b|/(|a| + |b|) where both are exact; 0 at a tie. A `must`
    case needs at least 2^-5 everywhere.

    Yields:
        A list of floats that grows as the block runs.
    """
    found: list[float] = []
    _found.append(found)
    try:
        yield found
    finally:
        _found.pop()


# --- functions ----------------------------------------------------------------------------------------------


def exp(x: Number) -> Number:
    """Exponential: gauge = e^x·g + e^x."""
    if x.value is None:
        return NAN
    result = Number(Fraction(1) if x.value == 0 else mp.exp(_mpf(x.value)), 0.0, *_range((x,)), x.exempt)
    result.gauge = _times(result.size, x.gauge) + result.size
    return result


def log(x: Number) -> Number:
    """Natural logarithm: gauge = g/x + |log x|."""
    if x.value is None:
        return NAN
    if x.value <= 0:
        raise ValueError(f"The logarithm of {x!r} was asked for; it takes a positive number.")
    result = Number(Fraction(0) if x.value == 1 else mp.log(_mpf(x.value)), 0.0, *_range((x,)), x.exempt)
    result.gauge = x.gauge / x.size + result.size
    return result


def sqrt(x: Number) -> Number:
    """Square root: gauge = g/(2·√x) + √x; an exact 0 stays one."""
    if x.value is None:
        return NAN
    if x.value < 0 or (x.value == 0 and x.gauge > 0):
        raise ValueError(f"The square root of {x!r} has no error bound; it takes a positive number or an exact 0.")
    if x.value == 0:
        return x
    result = Number(mp.sqrt(_mpf(x.value)), 0.0, *_range((x,)), x.exempt)
    result.gauge = x.gauge / (2 * result.size) + result.size
    return result


def softplus(x: Number) -> Number:
    """log(1 + e^x), with the gauge of the widest form: σ(x)·(g + 1) + 1 + softplus(x).

    Trainers write −logsigmoid(−x), −log(sigmoid(−x)) and log(1 + exp(x)). The last one rounds 1 + e^x, an
    error of one unit however small the answer is, and so covers the other two.
    """
    if x.value is None:
        return NAN
    v = _mpf(x.value)
    value = mp.log1p(mp.exp(v)) if v < 0 else v + mp.log1p(mp.exp(-v))
    result = Number(value, 0.0, *_range((x,)), x.exempt)
    result.gauge = _size(_logistic(v)) * (x.gauge + 1) + 1 + result.size
    return result


def sigmoid(x: Number) -> Number:
    """1/(1 + e^−x), with the gauge of the widest form: σ(1 − σ)·g + max(1, σ(1 − σ) + 2σ).

    As the derivative of softplus it also appears as 1 − σ(−x) (from −log(sigmoid(−x))), which costs one unit
    however small the answer is; 1/(1 + exp(−x)) with each operation rounded gives the second entry of the
    maximum.
    """
    if x.value is None:
        return NAN
    v = _mpf(x.value)
    result = Number(_logistic(v), 0.0, *_range((x,)), x.exempt)
    slope = result.size * _size(_logistic(-v))
    result.gauge = _times(slope, x.gauge) + max(1.0, slope + 2 * result.size)
    return result


def logsumexp(items: Sequence[Number]) -> Number:
    """log Σ e^x_i, formed as m + log S with m = max x and S = Σ e^(x_i − m), as every library does.

    With p = softmax(x) the gauge is Σ p_i·(g_i + |x_i − m|) for the shifts, 1 for the exponentials, 1 for the
    sum, |log S| and |log S + m|. Without the shift the bound is smaller.
    """
    shift = _shifted(items)
    result = Number(shift.log_sum + shift.top, 0.0, *shift.range, shift.exempt)
    moved = math.fsum(p * item.gauge for p, item in zip(shift.shares, items, strict=True))
    result.gauge = moved + shift.gauge + result.size
    return result


def log_softmax(items: Sequence[Number], index: int) -> Number:
    """x_index − log Σ e^x_i, with the larger gauge of the forms x − lse(x) and (x − m) − log S.

    Inputs' errors go through the exact derivatives |[i = index] − p_i|; the rounding of the shifted sum is
    that of `logsumexp`, then either lse or x − m is rounded, then the result.
    """
    shift = _shifted(items)
    y = _mpf(items[index].value)
    rest = [mp.exp(_mpf(item.value) - y) for i, item in enumerate(items) if i != index]
    result = Number(-mp.log1p(mp.fsum(rest)), 0.0, *shift.range, shift.exempt)  # keeps its digits near 0
    moved = [abs((i == index) - p) * item.gauge for i, (p, item) in enumerate(zip(shift.shares, items, strict=True))]
    last = max(_size(shift.log_sum + shift.top), _size(y - shift.top))
    result.gauge = math.fsum(moved) + shift.gauge + last + result.size
    return result


class _Shift:
    """What `logsumexp` and `log_softmax` share: m, log S, the shares p, the gauge up to log S, the range."""

    __slots__ = ("exempt", "gauge", "log_sum", "range", "shares", "top")

    top: Any
    log_sum: Any
    shares: list[float]
    gauge: float
    range: tuple[float, float]
    exempt: bool


def _shifted(items: Sequence[Number]) -> _Shift:
    shift = _Shift()
    values = [_mpf(item.value) for item in items]
    shift.top = max(values)
    moved = [value - shift.top for value in values]
    parts = [mp.exp(value) for value in moved]
    whole = mp.fsum(parts)
    shift.log_sum = mp.log(whole)
    shift.shares = [_size(part / whole) for part in parts]
    shifts = [_size(value) for value in moved]
    shift.gauge = math.fsum(p * d for p, d in zip(shift.shares, shifts, strict=True)) + 2 + _size(shift.log_sum)
    low, high = _range(items)
    # a confident token's e^(x − m) beside 1 is below the noise, and so is log S beside the gauge of its 1
    seen = [d for d in shifts if d] + [_size(part) for part in parts if part > NOISE * whole] + [_size(whole)]
    shift.range = min(low, *seen), max(high, *seen)
    shift.exempt = all(item.exempt for item in items)
    return shift


# --- inside -------------------------------------------------------------------------------------------------


def _exact(x: float | Fraction) -> Fraction:
    if isinstance(x, float) and not math.isfinite(x):
        raise ValueError(f"The exact oracle was given {x}; it takes finite numbers only, so mask that position.")
    return Fraction(x)


def _number(x: Operand) -> Number:
    """Take int and Fraction in a formula as literals; a float must be made an input or a parameter first."""
    if isinstance(x, Number):
        return x
    if isinstance(x, (int, Fraction)):
        return literal(x)
    raise TypeError(f"{x!r} is neither a Number nor an exact literal; use lift(x) or parameter(x).")


def _is_zero(x: Number) -> bool:
    """Tell an exact 0: x + 0 is exact at every dtype, so it is no operation."""
    return x.value == 0 and x.gauge == 0


def _is_one(x: Number) -> bool:
    """Tell the literal 1: x·1 is exact at every dtype, so it is no operation."""
    return x.exempt and x.gauge == 0 and x.value == 1


def _mpf(value: Any) -> Any:
    """Bring a value into the 60-digit context."""
    return mp.mpf(value.numerator) / mp.mpf(value.denominator) if isinstance(value, Fraction) else value


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Bring two values to one type, rational where both are."""
    return (a, b) if type(a) is type(b) else (_mpf(a), _mpf(b))


def _add_up(values: Sequence[Any]) -> Any:
    """Add values, with one normalisation for all the rational ones, whose denominators are alike."""
    exact = [value for value in values if isinstance(value, Fraction)]
    common = math.lcm(*(value.denominator for value in exact))
    whole = Fraction(sum(value.numerator * (common // value.denominator) for value in exact), common)
    if len(exact) == len(values):
        return whole
    return mp.fsum([_mpf(whole), *(value for value in values if not isinstance(value, Fraction))])


def _logistic(v: Any) -> Any:
    return 1 / (1 + mp.exp(-v))


def _size(value: Any) -> float:
    """Return |value| as a float: never 0 for a value that is not, inf beyond the range."""
    if value is None:
        return 0.0
    try:
        size = abs(value.numerator) / value.denominator if isinstance(value, Fraction) else abs(float(value))
    except OverflowError:
        return math.inf
    return size if size or not value else TINY


def _times(a: float, b: float) -> float:
    """Multiply magnitudes with 0·inf = 0: an exact factor carries no error however large the other is."""
    return a * b if a and b else 0.0


def _distance(a: Number, b: Number) -> float:
    x, y = _alike(a.value, b.value)
    return _size(x - y)


def _order(a: Number, b: Operand) -> int:
    b = _number(b)
    if a.value is None or b.value is None:
        raise ValueError("The answer of 0/0 was compared with a number; it has no place in an order.")
    x, y = _alike(a.value, b.value)
    return (x > y) - (x < y)


def _watch(a: Number, b: Number) -> None:
    if not _found or a.value is None:
        return
    scale = a.gauge + b.gauge or a.size + b.size
    distance = _distance(a, b) / scale if 0 < scale < math.inf else 0.0
    for found in _found:
        found.append(distance)


def _select(a: Number, b: Number, winner: Number) -> Number:
    _watch(a, b)
    loser = b if winner is a else a
    return _widened(winner, loser.gauge) if loser.gauge > winner.gauge and near(a, b) else winner


def _widened(x: Number, gauge: float) -> Number:
    return x if gauge == x.gauge else Number(x.value, gauge, x.low, x.high, x.exempt)


def _used(x: Number) -> tuple[float, float]:
    """Range of a number once an operation uses it: its own magnitude joins what it was made from."""
    if x.exempt or not x.size:
        return x.low, x.high
    return (min(x.low, x.size) if x.size >= NOISE * x.gauge else x.low), max(x.high, x.size)


def _range(items: Sequence[Number]) -> tuple[float, float]:
    ranges = [_used(item) for item in items]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _sum_range(items: Sequence[Number]) -> tuple[float, float]:
    """Range of a sum: an addend below 2^-53·Σ|x| harms at no dtype, so its small magnitudes do not count."""
    floor = NOISE * math.fsum(item.size for item in items)
    ranges = [(_used(item), item.size) for item in items]
    low = min((low for (low, _), size in ranges if size >= floor), default=math.inf)
    return low, max((high for (_, high), _ in ranges), default=0.0)


ZERO = literal(0)
ONE = literal(1)
NAN = Number(None, exempt=True)
