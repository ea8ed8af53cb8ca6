"""One recording of the tiny run for all tests here, and the command line as a function."""

from pathlib import Path

import pytest

from goldenppo.conformance.cli import main


def record(target: Path, *options: str) -> Path:
    """Record a tiny run of seed 0 through the command line."""
    assert main(["run", "--size", "tiny", "--record", str(target), *options]) == 0
    return target


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    """A whole recording, float64, two steps."""
    return record(tmp_path_factory.mktemp("run") / "recording", "--steps", "2")
