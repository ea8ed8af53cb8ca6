"""Stages `sft` and `reward_model`: the loop that trains one model from its initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from goldenppo.reference.run import reward_model, sft, update
from goldenppo.reference.run.model import Weights, init_weights
from goldenppo.reference.run.settings import DTYPES, model_shape, stored_dtype

__all__ = ["Write", "initial_weights", "prefixed", "reward_draw", "sft_draw", "train"]

Write = Callable[[str, dict[str, Tensor], dict[str, Any]], None]


def train(
    stage: str,
    device: torch.device,
    dtype: str,
    seed: int,
    settings: dict[str, Any],
    write: Write | None,
) -> Weights:
    """Train one model from its initial weights; the last update is written.

    Args:
        stage: sft or reward_model.

    Returns:
        the trained weights.
    """
    shape, rates = (
        model_shape(settings),
        {"learning_rate": settings["train_learning_rate"], "max_norm": settings["max_norm"]},
    )
    draw = sft_draw if stage == "sft" else reward_draw
    find = sft.sft_gradient if stage == "sft" else reward_model.reward_model_gradient
    steps = settings["sft_steps" if stage == "sft" else "reward_steps"]
    weights = first = initial_weights(stage, seed, settings, dtype, device)
    state = update.new_adam(weights)
    for step in range(steps):
        batch = {name: tensor.to(device) for name, tensor in draw(seed, step, settings).items()}
        before, old_state = weights, state
        found, entry = find(weights, shape, batch, dtype=DTYPES[dtype])
        weights, state, norm = update.optimizer(weights, found, state, **rates)
    if write:
        tensors = {
            **batch,
            **entry,
            "grad_norm": norm,
            **prefixed("initial", first),
            **prefixed("gradient", found),
        }
        tensors |= prefixed("before/weights", before) | prefixed("before/adam_m", old_state.m)
        tensors |= prefixed("before/adam_v", old_state.v)
        tensors |= prefixed("weights", weights) | prefixed("adam_m", state.m) | prefixed("adam_v", state.v)
        write(stage, tensors, {"step": steps - 1, **rates})
    return weights


def initial_weights(stage: str, seed: int, settings: dict[str, Any], dtype: str, device: torch.device) -> Weights:
    """Draw the weights that sft or reward_model starts from."""
    stream = "policy_weights" if stage == "sft" else "reward_weights"
    shape, head = model_shape(settings), stage != "sft"
    weights = init_weights(shape, seed, stream, head=head, dtype=stored_dtype(dtype))
    return {name: weight.to(device) for name, weight in weights.items()}


def sft_draw(seed: int, step: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Draw the demonstrations of one step."""
    lengths = (settings["prompt_length"], settings["response_length"])
    return sft.demonstrations(seed, step, settings["sft_batch"], *lengths, tuple(settings["sft_skill"]))


def reward_draw(seed: int, step: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Draw the comparisons of one step."""
    lengths = (settings["prompt_length"], settings["response_length"])
    return reward_model.comparisons(seed, step, settings["reward_batch"], *lengths)


def prefixed(prefix: str, weights: Weights) -> Weights:
    """Return the weights under names that start with the prefix and a slash."""
    return {f"{prefix}/{name}": weight for name, weight in weights.items()}
