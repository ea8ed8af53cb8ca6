"""A recording on disk: every tensor of every stage, and a manifest that says where they come from.

    manifest.json                  device, versions, flags, seed, settings, command, table, sha256 of each
    file models/actor, critic, …        the four models when PPO starts, as Hugging Face GPT-2 checkpoints
    sft, reward_model.safetensors  initial weights, and the last update of each training
    step-000.safetensors           rollout, experience, shaping, advantages, controller of PPO step 0
    step-000-update-0.safetensors  gradient and optimizer of its first minibatch

A step's file, and an update's, hold tensors under the canonical names of a dump and their parameters as JSON
under the metadata key `params`, so `goldenppo audit` reads them as they are. Names with a slash are weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = [
    "SCHEMA",
    "DamagedRecording",
    "check_target",
    "environment",
    "load",
    "parameters",
    "read",
    "recording",
    "save",
    "seal",
]

SCHEMA = "goldenppo/run/1"
MANIFEST = "manifest.json"


class DamagedRecording(Exception):
    """The folder holds no whole recording."""


def check_target(target: Path) -> None:
    """Refuse a folder that cannot be made, before anything runs.

    Raises:
        ValueError: the path exists, or its parent is missing or may not be written to.
    """
    parent = target.absolute().parent
    if target.exists() or target.is_symlink():
        raise ValueError(f"cannot record to {str(target)!r}: it exists; name a folder that does not, or remove it")
    if not parent.is_dir():
        raise ValueError(f"cannot record to {str(target)!r}: there is no folder {str(target.parent)!r}; make it first")
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as problem:
        raise ValueError(f"cannot record to {str(target)!r}: {problem.strerror}; name another place") from None


@contextmanager
def recording(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside the target, and remove it unless `seal` has moved it into place.

    Whatever stops the run, the target is absent or whole: the manifest comes last and the folder is renamed
    with it in place.

    Raises:
        ValueError: see `check_target`.
    """
    check_target(target)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.unfinished-", dir=target.absolute().parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(folder: Path, name: str, tensors: dict[str, Tensor], params: dict[str, Any]) -> None:
    """Write one safetensors file; tensors come to the CPU, parameters go into its metadata.

    Args:
        name: file name without its ending.
    """
    on_cpu = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    save_file(on_cpu, folder / f"{name}.safetensors", metadata={"params": json.dumps(params)})


def seal(folder: Path, target: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with the digest of every file and move the folder to its place.

    Raises:
        ValueError: somebody made the target meanwhile.
    """
    files = {str(path.relative_to(folder).as_posix()): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    text = json.dumps({"schema": SCHEMA, **manifest, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    try:
        folder.rename(target)
    except OSError as problem:
        raise ValueError(f"cannot record to {str(target)!r}: {problem.strerror}; name another place") from None


def load(folder: Path) -> dict[str, Any]:
    """Read the manifest after checking that every file is there and unchanged.

    Raises:
        FileNotFoundError: no folder, or one without a manifest.
        DamagedRecording: a file is missing, extra or changed, or the manifest is not one of ours.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} is no recording: it has no {MANIFEST}; `goldenppo run --record DIR` makes one")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise DamagedRecording(f"{str(path)!r} is not JSON ({problem}); record again") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or not isinstance(manifest.get("files"), dict):
        raise DamagedRecording(f"{str(path)!r} does not say {SCHEMA!r}; record again with this version")
    there = {str(item.relative_to(folder).as_posix()) for item in folder.rglob("*") if item.is_file()} - {MANIFEST}
    for name in sorted(there ^ set(manifest["files"])):
        raise DamagedRecording(f"{name} is {'not in the manifest' if name in there else 'missing'}; record again")
    for name, wanted in manifest["files"].items():
        if digest(folder / name) != wanted:
            raise DamagedRecording(f"{name} has changed since it was recorded (sha256 differs); record again")
    return manifest


def read(folder: Path, name: str) -> dict[str, Tensor]:
    """Read the tensors of one file.

    Raises:
        DamagedRecording: the file cannot be read.
    """
    try:
        with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as problem:
        raise DamagedRecording(f"{name}.safetensors cannot be read ({problem}); record again") from None


def parameters(folder: Path, name: str) -> dict[str, Any]:
    """Read the parameters that a file's tensors were made with."""
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["params"])


def digest(path: Path) -> str:
    """Return a file's sha256 in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment(device: torch.device) -> dict[str, Any]:
    """Describe what computes: the real device by its name, driver, versions and determinism flags."""
    on_cuda = device.type == "cuda"
    return {
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if on_cuda else processor(),
            "capability": list(torch.cuda.get_device_capability(device)) if on_cuda else None,
            "driver": driver() if on_cuda else None,
        },
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if on_cuda else None,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "determinism": {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "threads": torch.get_num_threads(),
        },
    }


def processor() -> str:
    """Return the CPU's name as the system gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name not in ("", "unknown")), platform.processor() or platform.machine())


def driver() -> str | None:
    """Return the NVIDIA driver's version, or None where its tool is absent."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip()
