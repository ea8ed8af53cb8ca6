"""How long an audit of 512 × 8192 positions takes beside one float64 pass of the reference ops over the same tensors.

    python benchmarks/audit_large.py [ROWS] [WIDTH] [DTYPE]

Imports are excluded; processor time, one thread. Prints the ratio (goal: at most 3.0) and the peak memory of the audit (goal:
below twice the largest tensor plus 500 MB).
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from goldenppo.reference import gae, kl_penalty, policy_loss, shaped_rewards, value_loss

PARAMS = {"kl_coef": 0.05, "gamma": 0.99, "lam": 0.95, "clip": 0.2, "value_clip": 0.2, "score_clip": None}
CONSTANT = ("loss", "clip_fraction", "approx_kl")


def reference_pass(x: dict) -> dict:
    """One step by the reference, from log-probs and values to losses."""
    kl = kl_penalty(x["old_logprobs"], x["ref_logprobs"])
    rewards = shaped_rewards(x["old_logprobs"], x["ref_logprobs"], x["scores"], x["mask"], kl_coef=PARAMS["kl_coef"])
    chain = gae(rewards, x["old_values"], x["mask"], gamma=PARAMS["gamma"], lam=PARAMS["lam"], whitening="inside")
    policy = policy_loss(x["logprobs"], x["old_logprobs"], chain.advantages, x["mask"], clip_low=0.2, clip_high=0.2)
    value = value_loss(x["values"], x["old_values"], chain.returns, x["mask"], clip=PARAMS["value_clip"])
    return {
        "kl": kl,
        "rewards": rewards,
        "advantages": chain.advantages,
        "returns": chain.returns,
        **{{"loss": "policy_loss"}.get(name, name): getattr(policy, name) for name in CONSTANT},
        "value_loss": value.loss,
        "value_clip_fraction": value.clip_fraction,
    }


def made(rows: int, width: int, dtype: torch.dtype, path: Path) -> int:
    """Writes a dump computed in a trainer's dtype; returns the bytes of its largest tensor."""
    torch.manual_seed(0)
    lengths = torch.randint(width // 4, width + 1, (rows, 1))
    old = -torch.rand(rows, width) * 3 - 0.05
    x = {
        "mask": torch.arange(width) < lengths,
        "old_logprobs": old,
        "logprobs": old + 0.1 * torch.randn(rows, width),
        "ref_logprobs": old + 0.2 * torch.randn(rows, width),
        "old_values": torch.randn(rows, width),
        "scores": torch.randn(rows),
    }
    x["values"] = x["old_values"] + 0.1 * torch.randn(rows, width)
    x = {name: tensor if tensor.dtype is torch.bool else tensor.to(dtype) for name, tensor in x.items()}
    if dtype is torch.bfloat16:  # a trainer stores 16 bits and works wider: what it stores is what the next op reads
        for name in ("kl", "rewards", "advantages", "returns"):
            x[name] = reference_pass(x | {n: x[n] for n in x})[name].to(dtype)
    else:
        x |= reference_pass(x)
    save_file({name: tensor.contiguous() for name, tensor in x.items()}, path, {"params": json.dumps(PARAMS)})
    return max(tensor.numel() * tensor.element_size() for tensor in x.values())


def audited(path: str) -> None:
    """Child process: audits, prints seconds, peak memory and the verdicts."""
    from goldenppo.conformance.audit.dump import Dump
    from goldenppo.conformance.audit.engine import audit
    from goldenppo.conformance.audit.step import Step

    start = time.process_time()
    findings = audit(Step(Dump([path])))
    taken = time.process_time() - start
    status = Path("/proc/self/status").read_text()  # unlike getrusage, not handed down by the parent
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    verdicts = {f.edge.name: [f.verdict, f.reason or f.first, round(f.worst, 3), f.variant] for f in findings}
    print(json.dumps({"seconds": taken, "peak": peak, "edges": verdicts}))


def main() -> None:
    rows, width = (int(word) for word in sys.argv[1:3] or ("512", "8192"))
    dtype = getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "float32")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.safetensors"
        largest = made(rows, width, dtype, path) / 2**20
        wide = {n: t.double() if t.is_floating_point() else t for n, t in load_file(path).items()}
        start = time.process_time()
        reference_pass(wide)
        plain = time.process_time() - start
        del wide
        done = subprocess.run([sys.executable, __file__, "--audit", str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for edge, (verdict, why, worst, variant) in found["edges"].items():
        print(f"{edge:<12} {verdict:<9} {why} worst {worst} {variant}")
    ratio = found["seconds"] / plain
    print(f"audit {found['seconds']:.2f} s, one float64 pass {plain:.2f} s: ratio {ratio:.2f} (goal: at most 3.0)")
    print(f"peak {found['peak']:.0f} MB, largest tensor {largest:.0f} MB (goal: below {2 * largest + 500:.0f} MB)")


if __name__ == "__main__":
    audited(sys.argv[2]) if sys.argv[1:2] == ["--audit"] else main()
