"""The update of two processes with unequal token counts is the update of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import goldenppo
from goldenppo.reference.run.parallel import shares

ROOT = Path(goldenppo.__file__).resolve().parents[1]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torchrun_gives_the_one_process_gradient(recorded, dtype):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "goldenppo.reference.run.parallel", str(recorded), "--dtype", dtype]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    tokens = dict(re.findall(r"process (\d) of 2: (\d+) tokens", done.stdout))
    assert set(tokens) == {"0", "1"} and tokens["0"] != tokens["1"]


def test_shares_are_unequal_and_complete():
    assert shares(4, 2) == [3, 1] and shares(16, 3) == [8, 5, 3] and shares(1, 1) == [1]
    with pytest.raises(ValueError, match="start at most 3"):
        shares(3, 4)
