"""Hyperparameters of the run, and what follows from them alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from goldenppo.reference.run import task
from goldenppo.reference.run.model import Shape

__all__ = [
    "DEFAULT",
    "DTYPES",
    "MODELS",
    "SETTINGS",
    "deterministic",
    "gradient_settings",
    "model_shape",
    "step_params",
    "stored_dtype",
    "update_params",
]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = ("actor", "critic", "reference", "reward")

DEFAULT: dict[str, Any] = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 32,
    "prompt_length": 4,
    "response_length": 8,
    "sft_steps": 150,
    "sft_batch": 64,
    "sft_skill": [0.3, 0.7],
    "reward_steps": 600,
    "reward_batch": 64,
    "train_learning_rate": 3e-3,
    "steps": 50,
    "batch": 64,
    "epochs": 2,
    "minibatches": 2,
    "microbatches": 2,
    "learning_rate": 2e-3,
    "max_norm": 1.0,
    "temperature": 0.9,
    "kl_coef": 0.02,
    "kl_target": 6.0,
    "kl_horizon": 1000,
    "score_clip": 8.0,
    "gamma": 0.99,
    "lam": 0.95,
    "clip_low": 0.2,
    "clip_high": 0.25,
    "value_clip": 0.3,
    "vf_coef": 0.5,
    "entropy_coef": 0.005,
    "evaluated": 256,
}

# `tiny` is for a recording that lies in a repository: the same stages, one layer, and only a start of
# training.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "tiny": DEFAULT
    | {
        "n_embd": 4,
        "n_layer": 1,
        "n_inner": 8,
        "response_length": 6,
        "sft_steps": 40,
        "sft_batch": 16,
        "reward_steps": 60,
        "reward_batch": 16,
        "steps": 3,
        "batch": 8,
        "learning_rate": 1e-2,
        "kl_horizon": 100,
        "evaluated": 64,
    },
}


def model_shape(settings: dict[str, Any]) -> Shape:
    """Return the shape that all four models share."""
    shape = {name: settings[name] for name in ("n_embd", "n_layer", "n_head", "n_inner")}
    positions = settings["prompt_length"] + settings["response_length"]
    return {"vocab_size": task.VOCABULARY, "n_positions": positions, **shape}


def stored_dtype(dtype: str) -> torch.dtype:
    """Return the dtype that weights and Adam's state are kept in: float32 under bfloat16, else the same."""
    return torch.promote_types(DTYPES[dtype], torch.float32)


def gradient_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that `update.gradient` takes."""
    names = ("microbatches", "clip_low", "clip_high", "value_clip", "vf_coef", "entropy_coef")
    return {name: settings[name] for name in names}


def step_params(settings: dict[str, Any], kl_coef: float) -> dict[str, Any]:
    """Return the parameters of a step's tensors under the op table's names."""
    return {
        "kl_coef": kl_coef,
        **{name: settings[name] for name in ("temperature", "score_clip", "gamma", "lam")},
    }


def update_params(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of an update's tensors under the op table's names."""
    names = ("temperature", "clip_low", "clip_high", "value_clip", "vf_coef", "entropy_coef")
    return {name: settings[name] for name in names}


@contextmanager
def deterministic(device: torch.device, *, tf32: bool = False) -> Iterator[None]:
    """Let torch use deterministic algorithms only, TF32 only if asked; the flags are put back afterwards."""
    was, was_tf32 = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        torch.backends.cuda.matmul.allow_tf32 = was_tf32
