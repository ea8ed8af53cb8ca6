"""Exact log-probability of each token given those before it."""

from __future__ import annotations

from collections.abc import Sequence

from goldenppo.reference.exact.number import Answer, Grid, Real, lift, log_softmax, parameter

__all__ = ["token_logprobs"]


def token_logprobs(logits: Sequence[Grid], tokens: Sequence[Sequence[int]], *, temperature: Real) -> Answer:
    """Return log softmax(z)_y with z = logits_t/temperature and y = tokens_{t+1}, for t in [0, L−2].

    Args:
        logits: floats [B, L, V].
        tokens: ints [B, L].
        temperature: parameter.

    Returns:
        {"logprobs": Numbers [B, L−1]}.
    """
    temperature = parameter(temperature)
    return {
        "logprobs": [
            [log_softmax([lift(v) / temperature for v in row[t]], ids[t + 1]) for t in range(len(ids) - 1)]
            for row, ids in zip(logits, tokens, strict=True)
        ]
    }
