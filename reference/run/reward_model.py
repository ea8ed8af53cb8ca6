"""Stage `reward_model`: a scalar model learns which of two responses is better."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference import end_score, reward_model_loss
from goldenppo.reference.run.model import Shape, Weights, token_scores
from goldenppo.reference.run.task import preferences
from goldenppo.reference.run.update import leaves

__all__ = ["comparisons", "reward_model_gradient"]


def comparisons(seed: int, step: int, count: int, prompt_length: int, length: int) -> dict[str, Tensor]:
    """Draw pairs of whole sequences, the better one (by the true rule) first.

    Returns:
        chosen, rejected int64 and chosen_mask, rejected_mask bool [count, L].
    """
    pair = preferences(seed, "preferences", step, count, prompt_length, length)
    result = {}
    for side in ("chosen", "rejected"):
        result[side] = torch.cat([pair["prompts"], pair[side]], 1)
        result[f"{side}_mask"] = torch.cat([pair["prompt_mask"], pair[f"{side}_mask"]], 1)
    return result


def reward_model_gradient(
    weights: Weights, shape: Shape, batch: dict[str, Tensor], *, dtype: torch.dtype
) -> tuple[Weights, dict[str, Tensor]]:
    """Return the gradient of the pairwise loss; a response's score is read at its last token.

    Args:
        batch: as `comparisons` returns it.

    Returns:
        (gradients, {"loss", "accuracy": scalars; "chosen_scores", "rejected_scores": [B]}).
    """
    weights = leaves(weights)
    chosen, rejected = (
        end_score(token_scores(weights, shape, batch[side], batch[f"{side}_mask"], dtype), batch[f"{side}_mask"])
        for side in ("chosen", "rejected")
    )
    loss = reward_model_loss(chosen, rejected)
    found = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, found, strict=True)), {
        "loss": loss.detach(),
        "accuracy": (chosen > rejected).to(loss.dtype).mean(),
        "chosen_scores": chosen.detach(),
        "rejected_scores": rejected.detach(),
    }
