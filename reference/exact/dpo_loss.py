"""Exact direct preference optimisation loss, with its gradients."""

from __future__ import annotations

from goldenppo.reference.exact.number import (
    Answer,
    Number,
    Real,
    Row,
    lift,
    literal,
    parameter,
    sigmoid,
    softplus,
    total,
    widest,
)

__all__ = ["dpo_loss"]


def dpo_loss(
    policy_chosen: Row,
    policy_rejected: Row,
    ref_chosen: Row,
    ref_rejected: Row,
    *,
    beta: Real,
    label_smoothing: Real | None = None,
) -> Answer:
    """Return the mean over pairs of (1−ε)·softplus(−βΔ) + ε·softplus(βΔ), and its gradients.

    Δ = (π_c − π_r) − (ref_c − ref_r), or (π_c − ref_c) − (π_r − ref_r): the larger gauge holds. The gradient
    with respect to π_c is β·(ε·σ(βΔ) − (1−ε)·σ(−βΔ))/B, with respect to π_r its negative.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: floats [B].
        beta, label_smoothing: parameters; label_smoothing ε may be none, which is 0.

    Returns:
        {"loss": Number, "grad_policy_chosen", "grad_policy_rejected": Numbers [B]}.

    Source: Rafailov et al. 2023 (arXiv:2305.18290) equation 7; ε: E. Mitchell, A note on DPO with noisy
    preferences.
    """
    beta = parameter(beta)
    smooth = None if label_smoothing is None else parameter(label_smoothing)
    pairs = zip(policy_chosen, policy_rejected, ref_chosen, ref_rejected, strict=True)
    x = [beta * _margin(*(lift(v) for v in pair)) for pair in pairs]
    count = literal(len(x))
    slopes = [_slope(value, smooth) * beta * (1 / count) for value in x]
    return {
        "loss": total([_term(value, smooth) for value in x]) / count,
        "grad_policy_chosen": slopes,
        "grad_policy_rejected": [-slope for slope in slopes],
    }


def _margin(policy_c: Number, policy_r: Number, ref_c: Number, ref_r: Number) -> Number:
    return widest((policy_c - policy_r) - (ref_c - ref_r), (policy_c - ref_c) - (policy_r - ref_r))


def _term(x: Number, smooth: Number | None) -> Number:
    if smooth is None:
        return softplus(-x)
    return (1 - smooth) * softplus(-x) + smooth * softplus(x)


def _slope(x: Number, smooth: Number | None) -> Number:
    if smooth is None:
        return -sigmoid(-x)
    return smooth * sigmoid(x) - (1 - smooth) * sigmoid(-x)
