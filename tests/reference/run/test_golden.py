"""The committed recording: float64 on a CPU, verified here, whatever this machine is."""

from pathlib import Path

import pytest

from goldenppo import fixtures
from goldenppo.conformance.cli import main
from goldenppo.reference.run.record import load

FOLDER = Path(fixtures.__file__).parent / "run"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_committed_run_verifies(dtype, capsys):
    assert main(["run", "--verify", "--dtype", dtype]) == 0
    assert "Every stage agrees." in capsys.readouterr().out


def test_a_recording_is_named_for_the_device_that_made_it():
    """Nothing labelled CUDA comes from a CPU, and the other way round."""
    for folder in (path for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"):
        manifest = load(folder)
        assert folder.name == f"{manifest['device']['type']}-{manifest['dtype']}"
        assert (manifest["device"]["driver"] is not None) == (manifest["device"]["type"] == "cuda")


def test_the_committed_run_is_small():
    assert sum(path.stat().st_size for path in (FOLDER / "cpu-float64").rglob("*") if path.is_file()) < 700_000
