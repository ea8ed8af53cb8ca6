"""Measure how much of the normwise law correct code uses: `python tests/reference/run/evidence.py [SEEDS]`.

Records float64 runs of both sizes, verifies each in float64, float32 and bfloat16, and prints the largest
error per size, dtype and kind of tensor in units of u·max|want|, beside the k_run that it has to stay below.
"""

import sys
import tempfile
from pathlib import Path

from goldenppo.conformance.cli import main
from goldenppo.reference.run.comparison import Check
from goldenppo.reference.run.law import K_GRADIENT, K_OUTPUT, ROUNDOFF
from goldenppo.reference.run.verify import verify


def kind(check: Check) -> str | None:
    """Sort a check by what it compares; None for what goes by another law."""
    if check.law != "normwise" or check.whose == "recording" or check.tensor == "noise":
        return None
    if check.stage == "optimizer" or "adam_" in check.tensor or "weights/" in check.tensor:
        return "optimizer"
    return "gradient" if "gradient/" in check.tensor or "accumulated/" in check.tensor else "output"


def measure(folder: Path, dtype: str) -> dict[str, float]:
    """Return the largest k_run that a verification needs, by kind."""
    worst: dict[str, float] = {}
    for check in verify(folder, dtype=dtype):
        name = kind(check)
        if name is not None:
            k = check.use * (K_OUTPUT if name == "output" else K_GRADIENT)
            worst[name] = max(worst.get(name, 0.0), k)
    return worst


def collect(seeds: int) -> dict[tuple[str, str, str], float]:
    """Measure `seeds` tiny runs and a fifth as many of default size."""
    found: dict[tuple[str, str, str], float] = {}
    runs = [("tiny", seed, 3) for seed in range(seeds)] + [("default", seed, 2) for seed in range(seeds // 5)]
    for size, seed, steps in runs:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "recording"
            options = ["--size", size, "--seed", str(seed), "--steps", str(steps), "--record", str(folder)]
            if main(["run", *options]) != 0:
                raise SystemExit(f"the {size} run of seed {seed} failed")
            for dtype in ("float64", "float32", "bfloat16"):
                for name, k in measure(folder, dtype).items():
                    found[size, dtype, name] = max(found.get((size, dtype, name), 0.0), k)
    return found


if __name__ == "__main__":
    print(f"k_run: outputs {K_OUTPUT:g}, gradients and optimizer {K_GRADIENT:g}; u {ROUNDOFF}")
    for (size, dtype, name), k in sorted(collect(int((sys.argv[1:] or ["20"])[0])).items()):
        print(f"{size:8} {dtype:9} {name:9} {k:8.1f}")
