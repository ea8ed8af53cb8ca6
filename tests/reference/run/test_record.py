"""A recording is whole or absent, and damage is noticed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import goldenppo
from goldenppo.conformance.cli import main
from goldenppo.reference.run import record, update

ROOT = Path(goldenppo.__file__).resolve().parents[1]


def test_manifest_says_where_the_numbers_come_from(recorded):
    manifest = record.load(recorded)

    assert manifest["schema"] == "goldenppo/run/1" and manifest["device"]["type"] == "cpu"
    assert manifest["command"].startswith("goldenppo run --device cpu --dtype float64 --steps 2 --size tiny")
    assert manifest["determinism"]["deterministic_algorithms"] is True
    assert {"torch", "cuda", "numpy", "python"} <= set(manifest["versions"])
    assert {"sft.safetensors", "step-001-update-3.safetensors", "models/reward/config.json"} <= set(manifest["files"])


def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch):
    whole = update.gradient

    def interrupted(*args, **kwargs):
        if list(tmp_path.rglob("step-000.safetensors")):
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    monkeypatch.setattr(update, "gradient", interrupted)

    assert main(["run", "--size", "tiny", "--record", str(tmp_path / "rec")]) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_killed_leaves_nothing_that_looks_whole(tmp_path):
    """After SIGKILL in the middle of a recording there is no target, and what is left is refused."""
    command = [sys.executable, "-m", "goldenppo", "run", "--record", str(tmp_path / "rec")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("sft.safetensors")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()

    left = list(tmp_path.iterdir())
    assert not (tmp_path / "rec").exists() and len(left) == 1 and left[0].name.startswith(".rec.unfinished-")
    assert main(["run", "--verify", str(left[0])]) == 2


@pytest.mark.parametrize("damage", ["changed", "missing", "extra", "not-json", "other-schema"])
def test_a_damaged_recording_gives_no_verdict(recorded, tmp_path, damage, capsys):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(recorded, folder)
    file, manifest = folder / "step-000.safetensors", folder / "manifest.json"
    if damage == "changed":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    elif damage == "extra":
        (folder / "step-009.safetensors").write_bytes(b"")
    elif damage == "not-json":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps({"schema": "goldenppo/run/0", "files": {}}))

    assert main(["run", "--verify", str(folder)]) == 4
    assert "record again" in capsys.readouterr().err


def test_usage_is_refused_before_anything_runs(recorded, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    wrong = [
        ["--record", str(tmp_path / "there")],
        ["--record", str(tmp_path / "none" / "rec")],
        ["--record", str(tmp_path / "file" / "rec")],
        ["--record", str(tmp_path / "rec"), "--seed", "1", "2"],
        ["--plot", str(tmp_path / "none" / "curves.svg")],
        ["--verify", str(tmp_path / "none")],
        ["--verify", str(tmp_path / "there")],
        ["--verify", str(recorded), "--steps", "1"],
        ["--free-running"],
        ["--steps", "0"],
        ["--seed", "-1"],
    ]
    for options in wrong:
        assert main(["run", *options]) == 2, options
        assert capsys.readouterr().err.startswith("goldenppo: ")


def test_an_absent_device_is_refused():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert main(["run", "--device", "cuda"]) == 2
