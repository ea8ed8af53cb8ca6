"""The memory flow of a PPO step: what each stage needs, in bytes.

Parameters, gradients and optimizer state follow from the models that a stage uses. Activations are the peak
of
what the stage makes and has not yet dropped: on the CPU the live storages are followed operation by
operation, on CUDA the allocator's own peak is reported beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from goldenppo.reference.run.model import Weights

__all__ = ["STAGES", "LiveBytes", "flow", "watcher"]

# models a stage reads, and whether it holds gradients and optimizer state
STAGES = {
    "rollout": (("actor",), False, False),
    "experience": (("actor", "critic", "reference", "reward"), False, False),
    "shaping": ((), False, False),
    "advantages": ((), False, False),
    "gradient": (("actor", "critic"), True, False),
    "optimizer": (("actor", "critic"), True, True),
    "controller": ((), False, False),
}


class LiveBytes(TorchDispatchMode):
    """Follow the storages made inside a block; `peak` is the largest sum of those alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # a view shares the storage of what was given
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in given:
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def dropped(_: Any) -> None:
            self.now -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, dropped)
        self.now += size
        self.peak = max(self.peak, self.now)


def watcher(peaks: dict[str, dict[str, int]], device: torch.device) -> Any:
    """Return a context manager `watch(stage)` that keeps the highest peak of each stage in `peaks`."""

    @contextmanager
    def watch(stage: str) -> Iterator[None]:
        measured = {}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        with LiveBytes() as live:
            yield
        measured["live"] = live.peak
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            measured["allocator"] = torch.cuda.max_memory_allocated(device) - before
        old = peaks.get(stage, {})
        peaks[stage] = {kind: max(size, old.get(kind, 0)) for kind, size in measured.items()}

    return watch


def flow(models: dict[str, Weights], peaks: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Return one row per stage: models, bytes of parameters, gradients, optimizer state and activations.

    A stage's gradients are made inside it, so `gradient` shows its peak without them; `optimizer` keeps its
    peak whole, which is the new weights and state beside the old ones.

    Args:
        models: the four models.
        peaks: stage → {"live": bytes, and on CUDA "allocator": bytes} as a `watcher` leaves them.
    """
    size = {name: sum(w.nbytes for w in weights.values()) for name, weights in models.items()}
    rows = []
    for stage, (names, with_gradients, with_state) in STAGES.items():
        parameters = sum(size[name] for name in names)
        peak = peaks.get(stage, {})
        made = parameters if stage == "gradient" else 0
        rows.append(
            {
                "stage": stage,
                "models": " ".join(names),
                "parameters": parameters,
                "gradients": parameters if with_gradients else 0,
                "optimizer": 2 * parameters if with_state else 0,
                "activations": max(peak.get("live", 0) - made, 0),
                **({"cuda peak": peak["allocator"]} if "allocator" in peak else {}),
            }
        )
    return rows
