"""Entropy of the token distribution."""

import torch

from goldenppo.reference.checks import wide


def entropy(logits, *, temperature):
    """Computes the entropy of the distribution at each position, in nats.

        H[b, t] = log Σ_v exp z_v − Σ_v softmax(z)_v · z_v,   z = logits[b, t] / temperature

    Args:
        logits: float [B, T, V].
        temperature: the sampling temperature, above 0.

    Returns:
        Entropies [B, T].

    Raises:
        ValueError: the temperature is not above 0.

    Source: Shannon 1948; the entropy bonus: Schulman et al. 2017 (arXiv:1707.06347) equation 9.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a number above 0")
    z = wide(logits) / temperature
    return torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1)  # ENT-1
