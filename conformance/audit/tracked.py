"""Tensors that carry their running error bound, so that the reference's own code yields a tolerance at any size.

The exact oracle (reference/exact) is for a few dozen positions. A dump has millions: here the reference runs in float64 on
`Tracked` tensors, which propagate the gauge by the rules of spec/tolerance.md. Where trainers write an operation in several
ways, the rule is that of the widest one.
"""

from __future__ import annotations

import math

import torch

NEAR = 2.0**-5  # two values closer than this many gauges may be told apart either way at bfloat16


class Tracked:
    """A float64 tensor and its gauge, of one shape.

    Attributes:
        value: float64 [...].
        gauge: float64 [...], the running error bound in units of the unit roundoff.
    """

    def __init__(self, value: torch.Tensor, gauge: torch.Tensor | None = None):
        self.value, self._gauge = value, gauge  # None stands for an exact tensor: logits are too wide for one of zeros

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        rule = _RULES.get(function)
        if rule is None:
            raise TypeError(f"no rule for {getattr(function, '__name__', function)} on tracked tensors")
        return rule(*arguments, **(keywords or {}))

    @property
    def gauge(self) -> torch.Tensor:
        """The bound, zeros for an exact tensor."""
        if self._gauge is None:
            self._gauge = torch.zeros_like(self.value)
        return self._gauge

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)

    def __len__(self) -> int:
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __getitem__(self, key) -> Tracked:
        return Tracked(self.value[key], None if self._gauge is None else self._gauge[key])

    def __setitem__(self, key, item) -> None:
        item = tracked(item)
        self.value[key], self.gauge[key] = item.value, item.gauge

    def detach(self) -> Tracked:
        """Itself: nothing here is differentiated."""
        return self

    def to(self, *_) -> Tracked:
        """Itself: it is float64 and stays where it is."""
        return self

    def __neg__(self) -> Tracked:
        return Tracked(-self.value, self._gauge)

    def __add__(self, other) -> Tracked:
        return _plus(self, other, 1)

    def __sub__(self, other) -> Tracked:
        return _plus(self, other, -1)

    def __radd__(self, other) -> Tracked:
        return _plus(self, other, 1)

    def __rsub__(self, other) -> Tracked:
        return _plus(-self, other, 1)

    def __mul__(self, other) -> Tracked:
        if isinstance(other, torch.Tensor):
            other = Tracked(other)
        if not isinstance(other, Tracked):
            value = self.value * other
            size = abs(other)
            return Tracked(value, self.gauge * size + value.abs() if size != 1 else self.gauge)
        value = self.value * other.value
        return Tracked(value, self.gauge * other.value.abs() + self.value.abs() * other.gauge + value.abs())

    __rmul__ = __mul__

    def __truediv__(self, other) -> Tracked:
        """A quotient, or the product with the reciprocal, which rounds once more."""
        other = tracked(other)
        if not other.shape and other.value == 1:
            return self
        value = self.value / other.value
        return Tracked(value, (self.gauge + value.abs() * other.gauge) / other.value.abs() + 2 * value.abs())

    def __rtruediv__(self, other) -> Tracked:
        return tracked(torch.as_tensor(float(other), dtype=torch.float64)) / self

    def __pow__(self, exponent) -> Tracked:
        return self * self if exponent == 2 else NotImplemented

    def __lt__(self, other):
        return self.value < _value(other)

    def __le__(self, other):
        return self.value <= _value(other)

    def __gt__(self, other):
        return self.value > _value(other)

    def __ge__(self, other):
        return self.value >= _value(other)

    def exp(self) -> Tracked:
        """exp x; its gauge is exp(x)·(g + 1)."""
        value = self.value.exp()
        return Tracked(value, value * (self.gauge + 1))

    def sqrt(self) -> Tracked:
        """√x; its gauge is g/(2√x) + √x, and 0 at 0."""
        value = self.value.sqrt()
        return Tracked(value, torch.where(value > 0, self.gauge / (2 * value), 0.0) + value)

    def abs(self) -> Tracked:
        """|x|, which rounds nothing."""
        return Tracked(self.value.abs(), self.gauge)

    def sum(self, *dim) -> Tracked:
        """Σ x; Σ|x| is added to the gauge once."""
        return Tracked(self.value.sum(*dim), self.gauge.sum(*dim) + self.value.abs().sum(*dim))

    def mean(self) -> Tracked:
        """Σ x over their number."""
        return self.sum() / self.value.numel()

    def clamp(self, min=-math.inf, max=math.inf) -> Tracked:
        """x within bounds, by the rules of max and min."""
        return _smaller(_larger(self, min), max)

    def gather(self, dim, index) -> Tracked:
        """Selected entries with their gauges."""
        return Tracked(self.value.gather(dim, index), None if self._gauge is None else self._gauge.gather(dim, index))


def tracked(item) -> Tracked:
    """A number or tensor that is exact."""
    return item if isinstance(item, Tracked) else Tracked(torch.as_tensor(item, dtype=torch.float64))


def parameter(number: float) -> Tracked:
    """A parameter: a trainer may round it to its dtype, so its gauge is its magnitude."""
    value = torch.tensor(float(number), dtype=torch.float64)
    return Tracked(value, value.abs())


def within(x: Tracked, mask: torch.Tensor) -> Tracked:
    """x where the mask is True, 0 elsewhere: `inside` of the reference."""
    return _where(mask, x, 0.0)


def _value(item):
    return item.value if isinstance(item, Tracked) else item


def _plus(a: Tracked, b, sign: int) -> Tracked:
    value = torch.add(a.value, b.value if isinstance(b, Tracked) else b, alpha=sign)
    gauge = a.gauge + b.gauge if isinstance(b, Tracked) else a.gauge
    return Tracked(value, gauge + value.abs())


def _chosen(a: Tracked, b: Tracked, first: torch.Tensor) -> Tracked:
    """One of two, with its gauge; the larger gauge where rounding may order them either way."""
    near = (a.value - b.value).abs() <= NEAR * (a.gauge + b.gauge)
    gauge = torch.where(near, torch.maximum(a.gauge, b.gauge), torch.where(first, a.gauge, b.gauge))
    return Tracked(torch.where(first, a.value, b.value), gauge)


def _larger(a, b) -> Tracked:
    a, b = tracked(a), tracked(b)
    return _chosen(a, b, a.value >= b.value)


def _smaller(a, b) -> Tracked:
    a, b = tracked(a), tracked(b)
    return _chosen(a, b, a.value <= b.value)


def _where(condition, a, b) -> Tracked:
    a, b = tracked(a), tracked(b)
    return Tracked(torch.where(condition, a.value, b.value), torch.where(condition, a.gauge, b.gauge))


def _shifted(x: Tracked, dim) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m = max x, log Σ exp(x − m), and the gauge of the latter: the shifts, the exponentials and their sum round."""
    top = x.value.amax(dim, keepdim=True)
    below = x.value - top
    weights = below.exp()
    total = weights.sum(dim)
    moved = -torch.linalg.vecdot(weights, below, dim=dim)  # Σ exp(x − m)·|x − m|
    if x._gauge is not None:
        moved = moved + torch.linalg.vecdot(weights, x._gauge, dim=dim)
    log_sum = total.log()
    return top.squeeze(dim), log_sum, moved / total + 2 + log_sum.abs()


def _logsumexp(x: Tracked, dim) -> Tracked:
    top, log_sum, gauge = _shifted(x, dim)
    value = top + log_sum
    return Tracked(value, gauge + value.abs())


class _LogSoftmax(Tracked):
    """x − log Σ exp x or (x − m) − log Σ exp(x − m), worked out only where it is gathered: few entries are ever read."""

    def __init__(self, x: Tracked, dim):
        self.x, self.parts = x, [part.unsqueeze(dim) for part in _shifted(x, dim)]

    def gather(self, dim, index) -> Tracked:
        top, log_sum, gauge = self.parts
        x = self.x.gather(dim, index)
        value = (x.value - top) - log_sum
        last = torch.maximum((top + log_sum).abs(), (x.value - top).abs())
        return Tracked(value, x.gauge + gauge + last + value.abs())


def _softmax(x: Tracked, dim) -> Tracked:
    """exp(log-softmax), the widest form."""
    top, log_sum, gauge = (part.unsqueeze(dim) for part in _shifted(x, dim))
    below = x.value - top
    logs = below - log_sum
    last = torch.maximum((top + log_sum).abs(), below.abs())
    value = logs.exp()
    return Tracked(value, value * (x.gauge + gauge + last + logs.abs() + 1))


def _logsigmoid(x: Tracked) -> Tracked:
    """−log(1 + exp(−x)); written out, 1 + exp(−x) rounds by one unit however small the result is."""
    value = torch.nn.functional.logsigmoid(x.value)
    return Tracked(value, torch.sigmoid(-x.value) * (x.gauge + 1) + 1 + value.abs())


def _zeros_like(x: Tracked) -> Tracked:
    return Tracked(torch.zeros_like(x.value))


def _full_like(x: Tracked | torch.Tensor, fill) -> Tracked:
    fill = tracked(fill)
    shape = x.shape
    return Tracked(fill.value.expand(shape), fill.gauge.expand(shape))


_RULES = {
    torch.where: _where,
    torch.maximum: _larger,
    torch.minimum: _smaller,
    torch.logsumexp: _logsumexp,
    torch.log_softmax: _LogSoftmax,
    torch.softmax: _softmax,
    torch.nn.functional.logsigmoid: _logsigmoid,
    torch.zeros_like: _zeros_like,
    torch.full_like: _full_like,
}


def tracked_gae(rewards, values, mask, *, gamma: float, lam: float, gaps: str = "skip") -> tuple[Tracked, Tracked]:
    """`gae` and its gauge in two plain recursions instead of one over tracked tensors, whose every step costs tenfold.

    The gauge of A_t = r_t + γ·V' − V_t + γλ·A' obeys a recursion of the same shape,

        g_t = c_t + γλ·g',   c_t = 2|γV'| + |r_t + γV'| + |δ_t| + 3|γλA'| + |A_t|

    (each product rounds once, and once more per parameter in it; each sum rounds once), so it is the advantage that `gae`
    gives to rewards c and values 0 under γ = 1, λ = γλ. V' and A' are those of the next token.

    Args:
        rewards, values: float64 [B, T].
        mask: bool [B, T].
        gamma, lam, gaps: see `gae`.

    Returns:
        Advantages before whitening, and returns.
    """
    from goldenppo.reference import gae

    chain = gae(rewards, values, mask, gamma=gamma, lam=lam, gaps=gaps)
    V = torch.where(mask, values, 0.0)
    width = mask.shape[1]
    following = torch.where(mask, torch.arange(width, device=mask.device), width).flip(1).cummin(1).values.flip(1)[:, 1:]
    following = torch.nn.functional.pad(following, (0, 1), value=width)  # [B, T], the next token from t + 1 on
    if gaps == "cut":  # nothing is carried over a gap
        following = torch.where(following == torch.arange(1, width + 1), following, width)
    local = _at(V, following).abs_().mul_(4 * gamma)  # 2|γV'|, and once more in each of |r + γV'| and |δ| at their largest
    local += _at(chain.advantages, following).abs_().mul_(3 * gamma * lam)
    del following
    local += chain.advantages.abs()
    local += V.abs_()
    local += torch.where(mask, rewards, 0.0).abs_().mul_(2)
    gauge = gae(local, V.zero_(), mask, gamma=1.0, lam=gamma * lam, gaps=gaps).advantages
    return Tracked(chain.advantages, gauge), Tracked(chain.returns, gauge + chain.returns.abs())


def _at(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x at the columns, 0 past its end."""
    return torch.nn.functional.pad(x, (0, 1)).gather(1, columns)
