"""The update under data parallelism: `torchrun --nproc-per-node 2 -m goldenppo.reference.run.parallel`.

Every process holds some rows of a recorded minibatch, the first ones more of them, so token counts differ.
The gradient that they agree on is compared with that of one process by the normwise law; exit code 1 if it
departs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldenppo.reference.run import update
from goldenppo.reference.run.comparison import moved_to
from goldenppo.reference.run.law import K_GRADIENT, ROUNDOFF, normwise
from goldenppo.reference.run.model import Weights, load_checkpoint
from goldenppo.reference.run.record import load, read
from goldenppo.reference.run.settings import (
    DTYPES,
    deterministic,
    gradient_settings,
    model_shape,
    stored_dtype,
)

__all__ = ["compare", "main", "shares"]


def shares(rows: int, processes: int) -> list[int]:
    """Return how many rows each process gets: process i as many times as (processes − i), so never equal.

    Returns:
        `processes` counts, at least 1 each, that add up to rows.

    Raises:
        ValueError: there are fewer rows than processes.
    """
    if rows < processes:
        raise ValueError(f"{rows} rows cannot be spread over {processes} processes; start at most {rows}")
    weights = torch.arange(processes, 0, -1, dtype=torch.float64)  # RUN-5
    extra = (weights / weights.sum() * (rows - processes)).floor().to(torch.int64)
    extra[0] += rows - processes - extra.sum()
    return (extra + 1).tolist()


def compare(
    folder: Path, dtype: str, device: torch.device, group: Any, rank: int, processes: int
) -> list[tuple[str, int, float]]:
    """Compute the first recorded minibatch's gradient over all processes and by this one alone.

    Args:
        folder: a recording.
        group: torch.distributed process group.

    Returns:
        (tensor, tokens held here, share of the normwise tolerance used) of every weight gradient and loss.
    """
    settings, batch = load(folder)["settings"], read(folder, "step-000-update-0")
    stored = stored_dtype(dtype)
    models: dict[str, Weights] = {
        name: moved_to(load_checkpoint(folder / "models" / name)[0], device, stored) for name in ("actor", "critic")
    }
    batch = moved_to({name: t for name, t in batch.items() if "/" not in name and t.dim()}, device, stored)
    how = {
        "temperature": settings["temperature"],
        "dtype": DTYPES[dtype],
        **gradient_settings(settings),
    }
    shape = model_shape(settings)
    mine = {name: t.split(shares(len(t), processes))[rank] for name, t in batch.items()}
    together, figures = update.gradient(models, shape, mine, group=group, **how)
    alone, expected = update.gradient(models, shape, batch, **how)
    pairs: dict[str, tuple[Tensor, Tensor]] = {name: (figures[name], expected[name]) for name in ("value_loss", "mean_entropy")}
    for name in alone:
        pairs |= {f"{name}/{key}": (together[name][key], want) for key, want in alone[name].items()}
    tokens = int(mine["mask"].sum())
    return [(name, tokens, normwise(got, want, K_GRADIENT * ROUNDOFF[dtype])) for name, (got, want) in pairs.items()]


def main(argv: list[str] | None = None) -> int:
    """Run as one process of a torchrun launch and say whether the gradient agrees."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node 2 -m goldenppo.reference.run.parallel", description=__doc__)
    parser.add_argument("recording", type=Path, help="folder that `goldenppo run --record` made")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu uses gloo, cuda uses nccl")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float64")
    args = parser.parse_args(argv)
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    with deterministic(device):
        found = compare(args.recording, args.dtype, device, torch.distributed.group.WORLD, rank, processes)
    torch.distributed.destroy_process_group()
    name, tokens, use = max(found, key=lambda entry: entry[2])
    held = f"process {rank} of {processes}: {tokens} tokens, {len(found)} tensors"
    print(f"{held}, worst use {use:.3g} of the tolerance ({name})")
    return 0 if use <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
