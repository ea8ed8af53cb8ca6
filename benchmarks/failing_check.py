"""How much longer a check takes on a trainer with five bugs, each of which is named, than on the same without.

    python benchmarks/failing_check.py

Medians of five runs, alternating.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = 5

RIGHT = """
import torch

def mean(terms, mask):
    return torch.where(mask, terms, torch.zeros_like(terms)).sum() / mask.sum()

def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).exp()
    advantages = torch.where(mask, advantages, torch.zeros_like(advantages))
    return mean(torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)), mask)

def value_loss(values, old_values, returns, mask, *, clip=None):
    values, old_values, returns = (torch.where(mask, x, torch.zeros_like(x)) for x in (values, old_values, returns))
    error = (values - returns) ** 2
    if clip is not None:
        error = torch.maximum(error, (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2)
    return 0.5 * mean(error, mask)

def kl_penalty(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

def ratio(logprobs, old_logprobs, mask):
    return torch.where(mask, (logprobs - old_logprobs).exp(), torch.zeros_like(logprobs))

def token_logprobs(logits, tokens, *, temperature):
    return torch.log_softmax(logits / temperature, -1)[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
"""

BUGS = (
    ("torch.maximum(-advantages", "torch.minimum(-advantages"),
    ("torch.maximum(error", "torch.minimum(error"),
    ("return logprobs - ref_logprobs", "return ref_logprobs - logprobs"),
    ("(logprobs - old_logprobs).exp(), ", "(old_logprobs - logprobs).exp(), "),
    ("logits / temperature", "logits"),
)


def seconds(path: Path, code: int) -> float:
    """How long one check takes, from start to end.

    Raises:
        SystemExit: it ended otherwise than with that exit code.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "goldenppo", "check", str(path)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - start
    if done.returncode != code:
        raise SystemExit(f"{path.name} ended {done.returncode}, expected {code}:\n{done.stdout}{done.stderr}")
    return taken


def main() -> None:
    wrong = RIGHT
    for right, bug in BUGS:
        if wrong.count(right) != 1:
            raise SystemExit(f"the bug {bug!r} has no one place")
        wrong = wrong.replace(right, bug)
    with tempfile.TemporaryDirectory() as folder:
        files = {Path(folder) / "right.py": 0, Path(folder) / "wrong.py": 1}
        for path, text in zip(files, (RIGHT, wrong), strict=True):
            path.write_text(text)
            seconds(path, files[path])
        turns = [[seconds(path, code) for path, code in files.items()] for _ in range(RUNS)]
    good, bad = (statistics.median(times) for times in zip(*turns, strict=True))
    print(f"five bugs {bad:.2f} s, without {good:.2f} s: ratio {bad / good:.2f}")


if __name__ == "__main__":
    main()
