"""Exact pairwise reward-model loss with its gradients."""

from __future__ import annotations

from goldenppo.reference.exact.number import (
    ZERO,
    Answer,
    Row,
    lift,
    literal,
    parameter,
    sigmoid,
    softplus,
    total,
    widest,
)

__all__ = ["reward_model_loss"]


def reward_model_loss(chosen: Row, rejected: Row, *, margin: Row | None = None) -> Answer:
    """Return mean over pairs of softplus(x), x = rejected + margin − chosen, and its gradients ∓σ(x)/B.

    Trainers form −x as chosen − rejected − margin: the larger gauge holds.

    Args:
        chosen, rejected: floats [B].
        margin: floats [B], or none.

    Returns:
        {"loss": Number, "grad_chosen", "grad_rejected": Numbers [B]}.

    Source: Stiennon et al. 2020 (arXiv:2009.01325) section 3.4; margin: Touvron et al. 2023
    (arXiv:2307.09288) equation 2.
    """
    margins = [ZERO] * len(chosen) if margin is None else [parameter(m) for m in margin]
    pairs = [(lift(c), lift(r), m) for c, r, m in zip(chosen, rejected, margins, strict=True)]
    x = [widest(r + m - c, r - c + m) for c, r, m in pairs]
    count = literal(len(x))
    slopes = [sigmoid(value) * (1 / count) for value in x]
    return {
        "loss": total([softplus(value) for value in x]) / count,
        "grad_chosen": [-slope for slope in slopes],
        "grad_rejected": slopes,
    }
