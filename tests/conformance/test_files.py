"""Files are the old one or the new one, whatever happens while they are written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import goldenppo
from goldenppo.adapters.interface import UsageError
from goldenppo.conformance import files

ROOT = str(Path(goldenppo.__file__).resolve().parent.parent)
WRITER = """
import json, sys
from goldenppo.conformance import files
for number in range(int(sys.argv[3])):
    files.write(sys.argv[1], json.dumps({"who": sys.argv[2], "numbers": [number] * 200_000}))
"""


def writer(path, who: str, times: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), who, str(times)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ROOT})


def whole(path) -> str:
    """Who wrote the file; fails if it is half of one."""
    document = json.loads(path.read_text())
    assert len(document["numbers"]) == 200_000 and len(set(document["numbers"])) == 1
    return document["who"]


def test_two_runs_at_once_leave_one_of_both(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"who": "old", "numbers": [0] * 200_000}))
    both, seen = [writer(path, who, 8) for who in ("one", "other")], set()
    while any(process.poll() is None for process in both):
        seen.add(whole(path))

    assert [process.returncode for process in both] == [0, 0]
    assert whole(path) in ("one", "other") and {"one", "other"} & seen
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_kill_leaves_a_whole_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"who": "old", "numbers": [0] * 200_000}))
    for delay in (0.15, 0.2, 0.3):
        process = writer(path, "new", 1000)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert whole(path) in ("old", "new")


@pytest.mark.skipif(sys.platform == "win32", reason="needs rlimits")
def test_a_disk_that_takes_no_more_leaves_the_old_file(tmp_path):
    import resource

    path = tmp_path / "result.json"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot write .*result\.json"):
            files.write(path, "new" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
