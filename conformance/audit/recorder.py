"""Writes the tensors of a training step into a dump that `goldenppo audit` reads."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch


class Recorder:
    """Collects tensors under the canonical names and saves them as safetensors.

        recorder = Recorder("step.safetensors", gamma=1.0, lam=0.95, kl_coef=0.05)
        recorder.record(old_logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)   # wherever they exist
        recorder.record(micro_policy_loss=loss, micro_tokens=mask.sum())               # once per micro-batch
        recorder.save()

    A name that is recorded again adds rows, narrower ones padded with zeros on the right; under a name that starts with
    `micro_`, numbers add up to one vector. Tensors are copied to the CPU as they are, in the dtype that they have.

    Attributes:
        params: parameters of the step; None stands for none (`score_clip=None`).
    """

    def __init__(self, path: str | os.PathLike, **params: float | None):
        self.path, self.params = Path(path), params
        self.parts: dict[str, list[torch.Tensor]] = {}

    def record(self, **tensors: torch.Tensor | float) -> None:
        """Takes a copy of each tensor.

        Raises:
            ValueError: a number without rows is recorded twice.
        """
        for name, value in tensors.items():
            tensor = torch.as_tensor(value).detach().cpu().clone()
            if name.startswith("micro_") and not tensor.dim():
                tensor = tensor[None]
            if name in self.parts and not tensor.dim():
                raise ValueError(f"{name} is recorded twice and is one number; record micro_{name} to keep one per micro-batch")
            self.parts.setdefault(name, []).append(tensor)

    def save(self) -> Path:
        """Writes the file, whole or not at all, and returns its path."""
        from safetensors.torch import save_file

        tensors = {name: _joined(parts) for name, parts in self.parts.items()}
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        os.close(descriptor)
        try:
            save_file(tensors, temporary, {"params": json.dumps(self.params)})
            os.replace(temporary, self.path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return self.path


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    if not parts[0].dim():
        return parts[0]
    width = max((part.shape[1] for part in parts if part.dim() > 1), default=0)
    return torch.cat([_widened(part, width) for part in parts]).contiguous()


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    if part.dim() < 2 or part.shape[1] == width:
        return part
    return torch.cat([part, part.new_zeros(part.shape[0], width - part.shape[1], *part.shape[2:])], 1)
