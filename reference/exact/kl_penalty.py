"""Exact per-token estimate of the KL divergence from the reference model."""

from __future__ import annotations

from fractions import Fraction

from goldenppo.reference.exact.number import Answer, Grid, Number, Real, clip, exp, lift, widest

__all__ = ["estimate", "kl_penalty"]


def kl_penalty(logprobs: Grid, ref_logprobs: Grid, *, estimator: str = "k1", clamp: str | int = "none") -> Answer:
    """Return the estimate at every position, clamped to ±clamp unless none.

    Args:
        logprobs, ref_logprobs: floats [B, T].
        estimator: k1, abs, k2 or k3, see `estimate`.

    Returns:
        {"kl": Numbers [B, T]}.

    Source: J. Schulman, Approximating KL Divergence, 2020.
    """
    rows = zip(logprobs, ref_logprobs, strict=True)
    kl = [[estimate(new, ref, estimator) for new, ref in zip(*row, strict=True)] for row in rows]
    if clamp != "none":
        kl = [[clip(value, -int(clamp), int(clamp)) for value in row] for row in kl]
    return {"kl": kl}


def estimate(new: Real, ref: Real, estimator: str = "k1") -> Number:
    """Return one token's estimate, x = ℓ − ℓ_ref: k1 = x, abs = |x|, k2 = ½x², k3 = e^−x − 1 + x.

    k3 is summed as (e^−x − 1) + x or (e^−x + x) − 1; with expm1 the bound is smaller.
    """
    x = lift(new) - lift(ref)
    if estimator in ("k1", "abs"):
        return x if estimator == "k1" else abs(x)
    if estimator == "k2":
        return Fraction(1, 2) * (x * x)
    if estimator == "k3":
        return widest((exp(-x) - 1) + x, (exp(-x) + x) - 1)
    raise ValueError(f"estimator is {estimator!r}; expected k1, abs, k2 or k3.")
