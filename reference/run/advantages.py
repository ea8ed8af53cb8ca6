"""Stage `advantages`: what each token was worth, from rewards and values."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference import gae

__all__ = ["advantages"]


@torch.no_grad()
def advantages(rewards: Tensor, old_values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> dict[str, Tensor]:
    """Return advantages, whitened over the whole batch, and returns.

    Args:
        rewards, old_values: [B, T].
        mask: bool [B, T].

    Returns:
        {"advantages", "returns": [B, T]}; the returns come from the advantages before whitening.
    """
    estimate = gae(rewards, old_values, mask, gamma=gamma, lam=lam, whitening="inside")
    return {"advantages": estimate.advantages, "returns": estimate.returns}
