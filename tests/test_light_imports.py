"""Commands that need no tensors do not wait for torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys
from goldenppo.conformance.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("imported torch" if "torch" in sys.modules else "light", file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "check --help",
        "explain GAE-1",
        "list ops",
        "list ops --json",
        "list cases",
        "list adapters",
        "list deviations",
        "list variants",
    ],
)
def test_command_does_not_import_torch(arguments: str) -> None:
    command = [sys.executable, "-c", SCRIPT, *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.splitlines()[-1] == "light"


def test_shell_does_not_import_torch() -> None:
    code = "import sys, goldenppo; assert goldenppo.__version__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
