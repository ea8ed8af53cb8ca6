"""Stage `sft`: the policy learns to imitate demonstrations, good and bad alike."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference import aggregate, token_logprobs
from goldenppo.reference.run.experience import response_logits
from goldenppo.reference.run.model import Shape, Weights
from goldenppo.reference.run.random import uniform
from goldenppo.reference.run.task import answers, prompts
from goldenppo.reference.run.update import leaves

__all__ = ["demonstrations", "sft_gradient"]


def demonstrations(
    seed: int, step: int, count: int, prompt_length: int, length: int, skill: tuple[float, float]
) -> dict[str, Tensor]:
    """Draw prompts and answers of mixed skill.

    Args:
        skill: lowest and highest probability of a right step; each answer has its own in between.

    Returns:
        sequences int64 and attention_mask bool [count, L]; mask bool [count, T].
    """
    tokens, prompt_mask = prompts(seed, "demonstrations", 3 * step, count, prompt_length)
    low, high = skill
    chance = low + (high - low) * uniform(seed, "demonstrations", 3 * step + 1, (count,))
    response, mask = answers(seed, "demonstrations", 3 * step + 2, tokens[:, -1], length, chance)
    return {
        "sequences": torch.cat([tokens, response], 1),
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "mask": mask,
    }


def sft_gradient(
    weights: Weights, shape: Shape, batch: dict[str, Tensor], *, dtype: torch.dtype
) -> tuple[Weights, dict[str, Tensor]]:
    """Return the gradient of the mean negative log-prob of response tokens.

    Args:
        batch: as `demonstrations` returns it.

    Returns:
        (gradients, {"loss": scalar, "logprobs": [B, T]}).
    """
    weights = leaves(weights)
    length = batch["mask"].shape[1]
    logits = response_logits(weights, shape, batch["sequences"], batch["attention_mask"], length, dtype)
    logprobs = token_logprobs(logits, batch["sequences"][:, -length - 1 :], temperature=1.0)
    loss = aggregate(-logprobs, batch["mask"])
    found = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, found, strict=True)), {"loss": loss.detach(), "logprobs": logprobs.detach()}
