"""KL coefficient from step to step."""

import torch

from goldenppo.reference.checks import one_of, wide


def kl_controller(kl, *, init_coef, target, horizon, batch_size, controller="fixed"):
    """Adapts the KL coefficient to the KL that was observed.

        c_s = c_{s−1} · (1 + clip(kl_s / target − 1, ±0.2) · batch_size / horizon),   c_{−1} = init_coef

    Args:
        kl: one observation per step, float [S].
        init_coef: coefficient before the first step.
        target: KL to be held.
        horizon: number of samples over which a correction acts.
        batch_size: samples per step.
        controller: "fixed" keeps init_coef, "proportional" as above.

    Returns:
        The coefficient after each step [S].

    Raises:
        ValueError: the axis has no such value.

    Source: Ziegler et al. 2019 (arXiv:1909.08593) section 2.2.
    """
    one_of("controller", controller, ("fixed", "proportional"))
    observed = wide(kl)
    if controller == "fixed":
        return torch.full_like(observed, init_coef)
    error = (observed / target - 1).clamp(-0.2, 0.2)
    return init_coef * (1 + error * batch_size / horizon).cumprod(0)  # KC-1
