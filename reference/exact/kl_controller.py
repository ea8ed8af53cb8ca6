"""Exact KL coefficient from step to step."""

from __future__ import annotations

from goldenppo.reference.exact.number import Answer, Real, Row, clip, lift, parameter

__all__ = ["kl_controller"]


def kl_controller(
    kl: Row, *, init_coef: Real, target: Real, horizon: Real, batch_size: Real, controller: str = "fixed"
) -> Answer:
    """Return the coefficient after each step.

    proportional: c ← c·(1 + clip(kl_s/target − 1, −0.2, 0.2)·batch_size/horizon), s in [0, S−1]; fixed: c
    stays.

    Args:
        kl: floats [S], one observation per step.
        init_coef, target, horizon, batch_size: parameters.
        controller: fixed keeps init_coef.

    Returns:
        {"coef": Numbers [S]}.

    Source: Ziegler et al. 2019 (arXiv:1909.08593) section 2.2.
    """
    coef, edge = parameter(init_coef), parameter(0.2)
    if controller == "fixed":
        return {"coef": [coef for _ in kl]}
    coefs = []
    for observed in kl:
        error = clip(lift(observed) / parameter(target) - 1, -edge, edge)
        coef = coef * (1 + error * parameter(batch_size) / parameter(horizon))
        coefs.append(coef)
    return {"coef": coefs}
