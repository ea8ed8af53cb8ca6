"""Reads dumps: safetensors files of one training step, one file or one per rank, block by block.

Tensors with a row per response are joined in the order of the files; numbers without rows must be equal in all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from goldenppo.adapters.interface import UsageError

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WHOLE = {"BOOL", "U8", "I8", "I16", "I32", "I64"}


class Dump:
    """The tensors of one step, read a block of rows at a time.

    Attributes:
        params: parameters as the files' metadata give them.
        shapes: name → shape, the files joined.
        dtypes: name → "float32" …, "int" or "bool".
        split: names without rows that differ from file to file, with the values: what each rank computed by itself.
    """

    def __init__(self, paths: list[str]):
        """Opens the files and reads their headers.

        Raises:
            UsageError: a file is missing, truncated or no safetensors file, or the files do not belong together.
        """
        self.paths = paths
        files = [_open(path) for path in paths]
        self.params = self._params(files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.counts: dict[str, list[int]] = {}
        self.split: dict[str, list[float]] = {}
        for name in sorted({name for file in files for name in file.keys() if "/" not in name}):  # noqa: SIM118
            self._add(name, files)
        if not self.shapes:
            raise UsageError(f"{', '.join(paths)}: no tensor under a name of its own; `goldenppo audit --help` lists the names")

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def _params(self, files: list) -> dict:
        merged: dict = {}
        for path, file in zip(self.paths, files, strict=True):
            text = (file.metadata() or {}).get("params", "{}")
            try:
                given = json.loads(text)
                if not isinstance(given, dict):
                    raise ValueError("it is no object")
            except ValueError as problem:
                raise UsageError(f"{path}: the metadata's `params` is no JSON object: {problem}") from None
            for name, value in given.items():
                if merged.setdefault(name, value) != value:
                    raise UsageError(f"{path}: {name} is {value} here and {merged[name]} in an earlier file; expected one step")
        return merged

    def _add(self, name: str, files: list) -> None:
        slices = []
        for path, file in zip(self.paths, files, strict=True):
            if name not in file.keys():  # noqa: SIM118
                raise UsageError(f"{path}: {name!r} is missing, which another file of the step has")
            slices.append(file.get_slice(name))
        kinds = {part.get_dtype() for part in slices}
        shapes = [tuple(part.get_shape()) for part in slices]
        if len(kinds) > 1:
            raise UsageError(f"{name} has the dtypes {', '.join(sorted(kinds))} in different files; expected one")
        kind = kinds.pop()
        if kind not in DTYPES and kind not in WHOLE:
            raise UsageError(f"{name} has dtype {kind}; expected F64, F32, F16, BF16, an integer or BOOL")
        self.dtypes[name] = DTYPES.get(kind) or ("bool" if kind == "BOOL" else "int")
        if not shapes[0]:
            values = [float(file.get_tensor(name)) for file in files]
            if len(set(map(repr, values))) > 1:
                self.split[name] = values
            self.shapes[name] = ()
            return
        if len({shape[1:] for shape in shapes}) > 1:
            given = ", ".join(map(str, shapes))
            raise UsageError(f"{name} has the shapes {given} in different files; expected them to differ in the rows only")
        self.counts[name] = [shape[0] for shape in shapes]
        self.shapes[name] = (sum(self.counts[name]), *shapes[0][1:])

    def read(self, name: str, start: int = 0, stop: int | None = None, columns: slice = slice(None)) -> torch.Tensor:
        """Rows start … stop−1 of a tensor, some columns of them.

        Returns:
            float64, int64 or bool [stop − start, …]; a 0-d tensor for a number without rows.
        """
        if not self.shapes[name]:
            return _wide(_open(self.paths[0]).get_tensor(name))
        stop = self.shapes[name][0] if stop is None else stop
        parts, first = [], 0
        for path, count in zip(self.paths, self.counts[name], strict=True):
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                part = _open(path).get_slice(name)  # opened anew: what an open file has mapped stays in memory
                parts.append(part[low:high, columns] if len(self.shapes[name]) > 1 else part[low:high])
            first += count
        return _wide(parts[0] if len(parts) == 1 else torch.cat(parts))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.double()
    return tensor if tensor.dtype is torch.bool else tensor.long()


def _open(path: str):
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise UsageError(f"there is no file {path!r}; a dump is a safetensors file (`goldenppo audit --help`)")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as problem:
        raise UsageError(
            f"{path} is no whole safetensors file ({str(problem)[:120]}); it may be truncated, or written with torch.save"
        ) from None
