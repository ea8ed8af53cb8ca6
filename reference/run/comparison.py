"""What a verification compares with, and how one comparison is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goldenppo.reference import exact, token_logprobs
from goldenppo.reference.run import update
from goldenppo.reference.run.law import K_GRADIENT, K_OUTPUT, ROUNDOFF, normwise, roundoff, tolerance_use
from goldenppo.reference.run.model import Weights
from goldenppo.reference.run.settings import DTYPES, stored_dtype

__all__ = [
    "Check",
    "Setup",
    "Tensors",
    "check_logprobs",
    "check_optimizer",
    "listed",
    "moved_to",
    "near_by",
    "op_stage",
    "same",
    "setup_for",
    "stored",
    "under",
]

Tensors = dict[str, Tensor]


class Check(NamedTuple):
    """One comparison: the stage and tensor, whose numbers were judged, and the share of the tolerance used.

    Attributes:
        step: PPO step, -1 before PPO.
        stage: sft, reward_model, rollout, experience, shaping, advantages, gradient, optimizer or controller.
        tensor: name of the tensor; an update's begins with its index.
        law: exact (equality), op or normwise.
        whose: here (computed now) or recording.
        use: share of the tolerance; above 1 the stage departs.
        left_out: what was not compared and why, a sentence each.
    """

    step: int
    stage: str
    tensor: str
    law: str
    whose: str
    use: float
    left_out: tuple[str, ...] = ()


class Setup(NamedTuple):
    """What does not change during a verification."""

    folder: Path
    manifest: dict[str, Any]
    device: torch.device
    dtype: str  # what the models compute in here
    ops: str  # dtype of the op stages here: float32 under bfloat16
    recorded_ops: str
    outputs: float  # k_run·u of what the models say
    gradients: float  # k_run·u of weight gradients
    stored: float  # k_run·u of the optimizer, which computes in the dtype that weights are stored in


def setup_for(folder: Path, manifest: dict[str, Any], device: str, dtype: str | None, tf32: bool) -> Setup:
    """Settle dtypes and granted errors: those of the coarser of here and the recording."""
    chosen = dtype or manifest["dtype"]
    ops, recorded_ops = (name if name == "float64" else "float32" for name in (chosen, manifest["dtype"]))
    u = max(roundoff(chosen, tf32), roundoff(manifest["dtype"], manifest["determinism"]["tf32"]))
    stored_u = max(ROUNDOFF[ops], ROUNDOFF[recorded_ops])
    granted = (K_OUTPUT * u, K_GRADIENT * u, K_GRADIENT * stored_u)
    return Setup(folder, manifest, torch.device(device), chosen, ops, recorded_ops, *granted)


def near_by(
    granted: float, step: int, stage: str, got: Tensors, want: Tensors, names: Iterable[str], prefix: str = ""
) -> Iterator[Check]:
    """Compare tensors by the normwise law."""
    for name in names:
        use = normwise(got[name], want[name], granted)
        yield Check(step, stage, prefix + name, "normwise", "here", use)


def same(step: int, stage: str, tensor: str, got: Tensor, want: Tensor) -> Check:
    """Compare tensors for equality: tokens, masks, row numbers."""
    equal = got.shape == want.shape and bool((got.cpu() == want.cpu()).all())
    return Check(step, stage, tensor, "exact", "here", 0.0 if equal else math.inf)


def op_stage(
    setup: Setup,
    step: int,
    stage: str,
    recorded: Tensors,
    inputs: Iterable[str],
    compute: Callable[[Tensors], Tensors],
    oracle: Callable[[dict[str, Any]], dict[str, Any]],
    edges: Callable[[dict[str, Any], str], dict[str, dict[int, str]]] | None = None,
    prefix: str = "",
) -> Iterator[Check]:
    """Judge an op stage: what is computed here from the recorded inputs, and what was recorded.

    Args:
        recorded: tensors of the recording.
        inputs: names of those that the stage reads.
        compute: inputs on the device → outputs.
        oracle: inputs as lists → name → nested Numbers.
        edges: (inputs as lists, dtype) → name → flat index → why that element is left out.
    """
    given = {name: recorded[name] for name in inputs}
    here = moved_to(given, setup.device, DTYPES[setup.ops])
    got = compute(here)
    exact_there = oracle(listed(given))
    # inputs that are exact in the dtype used here need only one evaluation
    unchanged = all(bool((here[name].cpu() == given[name]).all()) for name in given)
    exact_here = exact_there if unchanged else oracle(listed(here))
    sides = (
        ("here", got, exact_here, here, setup.ops),
        ("recording", recorded, exact_there, given, setup.recorded_ops),
    )
    for whose, tensors, answers, source, dtype in sides:
        left = edges(listed(source), dtype) if edges else {}
        for name, want in answers.items():
            skipped = left.get(name, {})
            use = tolerance_use(tensors[name], want, dtype, frozenset(skipped))
            yield Check(step, stage, prefix + name, "op", whose, use, tuple(skipped.values()))


def stored(tensors: Tensors, setup: Setup) -> Weights:
    """Bring recorded weights to the device, in the dtype that weights are stored in here."""
    return moved_to(tensors, setup.device, stored_dtype(setup.dtype))


def moved_to(tensors: Tensors, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Bring tensors to a device, those of floats in the dtype."""
    return {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in tensors.items()}


def listed(tensors: Tensors) -> dict[str, Any]:
    """Turn tensors into nested lists for the oracle."""
    return {name: (t.double() if t.is_floating_point() else t).cpu().tolist() for name, t in tensors.items()}


def under(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names start with the prefix and a slash, without it."""
    return {name.removeprefix(f"{prefix}/"): t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


def check_logprobs(
    setup: Setup, step: int, stage: str, recorded: Tensors, logits: str, logprobs: str, prefix: str = ""
) -> Iterator[Check]:
    """Check log-probs as an op of recorded logits."""
    how = {"temperature": setup.manifest["settings"]["temperature"]}
    yield from op_stage(
        setup,
        step,
        stage,
        recorded,
        (logits, "tokens"),
        lambda x: {logprobs: token_logprobs(*x.values(), **how)},
        lambda x: {logprobs: exact.token_logprobs(*x.values(), **how)["logprobs"]},
        prefix=prefix,
    )


def check_optimizer(
    setup: Setup,
    step: int,
    stage: str,
    before: dict[str, Tensors],
    gradient: Tensors,
    after: Tensors,
    steps_taken: int,
    rates: dict[str, float],
    suffix: str,
    norm_name: str,
    prefix: str = "",
) -> Iterator[Check]:
    """Check one model's optimizer step, fed with the recorded gradient, weights and state."""
    state = update.Adam(steps_taken, stored(before["adam_m"], setup), stored(before["adam_v"], setup))
    weights, state, norm = update.optimizer(stored(before["weights"], setup), stored(gradient, setup), state, **rates)
    yield from near_by(setup.stored, step, stage, {norm_name: norm}, after, [norm_name], prefix)
    for kind, got in (("adam_m", state.m), ("adam_v", state.v), ("weights", weights)):
        want = under(after, kind + suffix)
        yield from near_by(setup.stored, step, stage, got, want, want, f"{prefix}{kind}{suffix}/")
