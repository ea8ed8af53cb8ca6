"""How long `goldenppo check reference` takes beside `import torch`, and the light commands beside `import yaml, tabulate`.

    python benchmarks/check_reference.py

Medians of seven runs, alternating. Goals: at most 2.0 for the check, at most 3.0 for `--help` and `list ops`.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = 7


def seconds(arguments: list[str]) -> float:
    """How long one interpreter takes, from start to end.

    Raises:
        SystemExit: it failed, so its time says nothing.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"python {' '.join(arguments)} ended {done.returncode}: {done.stderr.strip()[-500:]}")
    return taken


def medians(commands: list[list[str]], runs: int = RUNS) -> list[float]:
    """The median time of each command; the commands take turns, after one turn that is not counted."""
    for command in commands:
        seconds(command)
    turns = [[seconds(command) for command in commands] for _ in range(runs)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def main() -> None:
    torch, check = medians([["-c", "import torch"], ["-m", "goldenppo", "check", "reference"]])
    print(f"check reference  {check:.2f} s, import torch {torch:.2f} s: ratio {check / torch:.2f} (goal: at most 2.0)")
    light, *times = medians([["-c", "import yaml, tabulate"], ["-m", "goldenppo", "--help"], ["-m", "goldenppo", "list", "ops"]])
    for name, taken in zip(("--help", "list ops"), times, strict=True):
        print(f"{name:<16} {taken:.3f} s, import yaml, tabulate {light:.3f} s: ratio {taken / light:.2f} (goal: at most 3.0)")


if __name__ == "__main__":
    main()
