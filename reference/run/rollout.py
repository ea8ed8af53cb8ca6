"""Stage `rollout`: the actor answers the prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from goldenppo.reference.run.model import Shape, Weights, token_logits
from goldenppo.reference.run.task import END, PAD

__all__ = ["rollout", "sample"]


@torch.no_grad()
def rollout(
    actor: Weights,
    shape: Shape,
    prompts: Tensor,
    prompt_mask: Tensor,
    noise: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype,
    forced: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sample a response to every prompt, token by token, each from a full forward pass over what is there.

    A response stops after the end symbol; what follows is padding and is not attended to.

    Args:
        prompts: int64 [B, P], padded on the left.
        prompt_mask: bool [B, P].
        noise: Gumbel noise, float64 [B, T, V]; T is the longest response.
        temperature: divides the logits.
        dtype: dtype that the model computes in.
        forced: tokens to append instead of those chosen, int64 [B, T]. The choices are still returned, so
            that a recorded response can be followed and each of its tokens judged by itself.

    Returns:
        sequences int64 and attention_mask bool [B, L]; mask bool [B, T]; chosen int64 and margins float64
        [B, T] as `sample` gives them; sampling_logits [B, T, V].
    """
    sequences, attention_mask = prompts, prompt_mask
    alive = torch.ones_like(prompt_mask[:, 0])
    steps = []
    for t in range(noise.shape[1]):
        logits = token_logits(actor, shape, sequences, attention_mask, dtype)[:, -1]  # [B, V]
        chosen, margin = sample(logits, noise[:, t], temperature)
        token = torch.where(alive, chosen if forced is None else forced[:, t], PAD)
        steps.append((alive, chosen, margin, logits))
        sequences = torch.cat([sequences, token[:, None]], 1)
        attention_mask = torch.cat([attention_mask, alive[:, None]], 1)
        alive = alive & (token != END)
    mask, chosen, margins, logits = (torch.stack(column, 1) for column in zip(*steps, strict=True))
    return {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "mask": mask,
        "chosen": chosen,
        "margins": margins,
        "sampling_logits": logits,
    }


def sample(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row as argmax(z/temperature + noise), and say by how much it won.

    Args:
        logits: [B, V] of any dtype; the sum is formed in float64 so that only the logits' own error matters.
        noise: Gumbel noise, float64 [B, V].

    Returns:
        (tokens int64 [B], margins float64 [B]: the largest perturbed logit less the second).
    """
    perturbed = logits.double() / temperature + noise
    best = perturbed.topk(2, dim=-1)
    return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]  # RUN-4
