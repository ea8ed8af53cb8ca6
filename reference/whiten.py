"""Masked whitening."""

import torch

from goldenppo.reference.checks import inside, is_mask, one_of, same_shape

EPSILONS = ("var+1e-8", "std+1e-8", "std+1e-5", "std+1e-4", "max(var,1e-8)")


def whiten(x, mask, *, variance="unbiased", epsilon="var+1e-8", mean="removed"):
    """Scales numbers to unit variance over the positions that count, and removes their mean.

        μ = Σ x·m / N,   σ² = Σ (x − μ)²·m / (N − 1),   y = (x − μ) / √(σ² + 10⁻⁸)

    Args:
        x: float [B, T].
        mask: bool [B, T], True = counts; the statistics run over the whole batch.
        variance: "unbiased" divides by N − 1, "biased" by N.
        epsilon: "var+1e-8" inside the root; "std+1e-8", "std+1e-5", "std+1e-4" outside it; "max(var,1e-8)" under the root.
        mean: "removed", or "kept": μ is added back after scaling.

    Returns:
        Whitened numbers [B, T], 0 where the mask is False. Unbiased whitening of one number is 0/0, NaN.

    Raises:
        ValueError: shapes differ, the mask is not boolean, or an axis has no such value.

    Source: openai/lm-human-preferences, utils/core.py, whiten; Huang et al. 2024 (arXiv:2403.17031) detail 17.
    """
    same_shape(x=x, mask=mask)
    is_mask(mask)
    one_of("mean", mean, ("removed", "kept"))
    mu, var = moments(x, mask, variance=variance)
    scaled = torch.where(mask, inside(x, mask) - mu, 0.0) / deviation(var, epsilon)  # WH-1
    return torch.where(mask, scaled + mu if mean == "kept" else scaled, 0.0)


def moments(x, mask, *, variance="unbiased"):
    """Mean μ and variance σ² of x over the tokens, two 0-d tensors. Arguments as for `whiten`."""
    one_of("variance", variance, ("unbiased", "biased"))
    counted = inside(x, mask)
    n = mask.sum().to(counted.dtype)
    mu = counted.sum() / n
    centred = torch.where(mask, counted - mu, 0.0)
    return mu, (centred**2).sum() / (n - 1 if variance == "unbiased" else n)


def deviation(var, epsilon):
    """What `whiten` divides by: the root of the variance, kept from 0 as `epsilon` says."""
    """The standard deviation, kept away from 0 in one of the ways that trainers have."""
    one_of("epsilon", epsilon, EPSILONS)
    if epsilon == "max(var,1e-8)":
        return var.clamp(min=1e-8).sqrt()
    where, _, size = epsilon.partition("+")
    return (var + float(size)).sqrt() if where == "var" else var.sqrt() + float(size)
