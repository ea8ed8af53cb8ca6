"""Repeat a recorded run from its seed, every stage fed with its own results, and follow the distance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from goldenppo.reference.run import run as pipeline
from goldenppo.reference.run.law import K_GRADIENT, normwise, roundoff
from goldenppo.reference.run.record import DamagedRecording, load, read

__all__ = ["Divergence", "free_run"]


class Divergence(NamedTuple):
    """How far a run that is left to itself is from the recording, at one recorded file.

    Attributes:
        file: step-000-update-0 and so on.
        tokens: number of sampled tokens that differ.
        tensor: the float tensor that is furthest off, and by how much of its largest element.
        error: max|got − want|/max|want| of that tensor.
        weights: the same over the weights of actor and critic alone; nan where the file has none.
        diverged: whether tokens differ or the error is beyond the normwise law.
    """

    file: str
    tokens: int
    tensor: str
    error: float
    weights: float
    diverged: bool


def free_run(folder: Path, device: str = "cpu", dtype: str | None = None, *, tf32: bool = False) -> list[Divergence]:
    """Repeat the run from its seed, feeding every stage its own results, and follow the distance.

    Returns:
        One entry per recorded file in the order of the run; once tokens differ, later distances say only
        that.
    """
    manifest, found = load(folder), []
    chosen = dtype or manifest["dtype"]
    granted = K_GRADIENT * max(roundoff(chosen, tf32), roundoff(manifest["dtype"], manifest["determinism"]["tf32"]))

    def compare(name: str, got: dict[str, Tensor], params: dict[str, Any]) -> None:
        want = read(folder, name)
        if sorted(want) != sorted(got):
            raise DamagedRecording(f"{name}.safetensors has other tensors than this version writes; record again")
        off = {key: normwise(got[key], want[key], 1.0) for key in want if want[key].is_floating_point()}
        tokens = sum(int((got[key].cpu() != want[key]).sum()) for key in want if key == "sequences" and "noise" in want)
        tensor = max(off, key=lambda key: off[key])
        weights = max((off[key] for key in off if key.startswith("weights/")), default=math.nan)
        found.append(Divergence(name, tokens, tensor, off[tensor], weights, tokens > 0 or off[tensor] > granted))

    pipeline.run(
        device,
        chosen,
        manifest["steps"],
        manifest["seed"],
        settings=manifest["settings"],
        write=compare,
        tf32=tf32,
    )
    # a step's own file is written after its updates but made before them
    return sorted(found, key=lambda entry: entry.file if entry.file.startswith("step") else "")
