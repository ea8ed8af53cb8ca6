"""Exact importance ratio."""

from __future__ import annotations

from goldenppo.reference.exact.number import Answer, Grid, Mask, Number, Real, clip, exp, lift

__all__ = ["log_ratio", "ratio"]


def ratio(logprobs: Grid, old_logprobs: Grid, mask: Mask, *, log_ratio_clamp: str | int = "none") -> Answer:
    """Return r = exp(ℓ − ℓ_old) at tokens; the difference clamped to ±log_ratio_clamp before exp unless none.

    Args:
        logprobs, old_logprobs: floats [B, T].
        mask: bools [B, T].

    Returns:
        {"ratio": Numbers [B, T]}, None where the mask is False.
    """
    rows = zip(logprobs, old_logprobs, mask, strict=True)
    return {
        "ratio": [
            [exp(log_ratio(new, old, log_ratio_clamp)) if m else None for new, old, m in zip(*row, strict=True)] for row in rows
        ]
    }


def log_ratio(new: Real, old: Real, log_ratio_clamp: str | int = "none") -> Number:
    """Return d = ℓ − ℓ_old of one token, clamped to ±log_ratio_clamp unless none."""
    difference = lift(new) - lift(old)
    return difference if log_ratio_clamp == "none" else clip(difference, -int(log_ratio_clamp), int(log_ratio_clamp))
