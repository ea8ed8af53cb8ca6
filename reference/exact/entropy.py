"""Exact entropy of the token distribution."""

from __future__ import annotations

from collections.abc import Sequence

from goldenppo.reference.exact.number import (
    Answer,
    Grid,
    Number,
    Real,
    exp,
    lift,
    log_softmax,
    logsumexp,
    parameter,
    total,
    widest,
)

__all__ = ["entropy"]


def entropy(logits: Sequence[Grid], *, temperature: Real) -> Answer:
    """Return H = log Σ e^z − Σ softmax(z)·z with z = logits/temperature, at every position.

    Also written −Σ p·log p, whose terms have one sign: the value comes from there, the larger gauge holds.

    Args:
        logits: floats [B, T, V].
        temperature: parameter.

    Returns:
        {"entropy": Numbers [B, T]}.
    """
    temperature = parameter(temperature)
    return {"entropy": [[_entropy([lift(v) / temperature for v in logit]) for logit in row] for row in logits]}


def _entropy(z: Sequence[Number]) -> Number:
    log_p = [log_softmax(z, i) for i in range(len(z))]
    p = [exp(value) for value in log_p]
    by_z = logsumexp(z) - total([share * value for share, value in zip(p, z, strict=True)])
    return widest(-total([share * value for share, value in zip(p, log_p, strict=True)]), by_z)
