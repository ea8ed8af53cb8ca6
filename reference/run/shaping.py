"""Stage `shaping`: token rewards from the KL penalty and the learned score."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference import shaped_rewards

__all__ = ["shaping"]


@torch.no_grad()
def shaping(
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    score_clip: float,
) -> dict[str, Tensor]:
    """Return −kl_coef·(ℓ_old − ℓ_ref) at each token, the clipped score added at the last one.

    Args:
        old_logprobs, ref_logprobs: [B, T], the actor's before the update and the reference model's.
        scores: [B].
        mask: bool [B, T].

    Returns:
        {"rewards": [B, T]}.
    """
    rewards = shaped_rewards(old_logprobs, ref_logprobs, scores, mask, kl_coef=kl_coef, score_clip=score_clip)
    return {"rewards": rewards}
