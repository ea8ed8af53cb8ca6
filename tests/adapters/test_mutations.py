"""One-line mutations of a trainer's source, in a copy laid over its environment, are caught through the adapter.

A trainer that is not installed where the tests run is skipped, and so is another version of it than the lines come from.
DeepSpeed-Chat's checkout is named by the environment variable DEEPSPEED_EXAMPLES.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import goldenppo
from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.loader import load

HERE = Path(goldenppo.__file__).resolve().parent.parent
BASELINES = Path(__file__).resolve().parents[2] / "adapters" / "baselines"


@dataclass(frozen=True)
class Copy:
    """What is copied and mutated."""

    package: str  # an importable package; for a checkout the folder in it
    version: str | None  # the release that the lines stand in; None for a checkout
    file: str
    lines: tuple[tuple[str, str, str], ...]  # the op that has to fail, a piece of one line, what stands there instead
    checkout: str | None = None  # environment variable that names it
    baseline: str | None = None  # known departures of this release


COPIES = {
    "trl-ppo": Copy(
        package="trl",
        version="1.12.0",
        file="experimental/ppo/ppo_trainer.py",
        baseline="trl-ppo.yaml",
        lines=(
            ("experience", "= -args.kl_coef * kl", "= args.kl_coef * kl"),
            ("experience", "rewards[actual_start, actual_end] +=", "rewards[actual_start, actual_end - 1] +="),
            ("experience", "args.gamma * nextvalues - values", "nextvalues - values"),
            ("experience", "delta + args.gamma * args.lam * lastgaelam", "delta + args.gamma * lastgaelam"),
            ("experience", "masked_whiten(advantages, ~padding_mask)", "masked_whiten(advantages, ~padding_mask_p1)"),
            ("experience", "returns = advantages + values", "returns = advantages"),
            ("shaped_rewards", "] -= self.args.missing_eos_penalty", "] = -self.args.missing_eos_penalty"),
            ("whiten", "variance = masked_mean(centered_values**2, mask)", "variance = (centered_values**2).mean()"),
            ("value_loss", "torch.max(vf_losses1, vf_losses2)", "torch.min(vf_losses1, vf_losses2)"),
            ("value_loss", "vf_loss = 0.5 *", "vf_loss = 0.25 *"),
            ("policy_loss", "torch.max(pg_losses, pg_losses2)", "torch.min(pg_losses, pg_losses2)"),
            (
                "policy_loss",
                "pg_loss = masked_mean(pg_loss_max, ~padding_mask[micro_batch_inds])",
                "pg_loss = pg_loss_max.mean()",
            ),
            ("policy_loss", "(ratio, 1.0 - args.cliprange, 1.0 + args.cliprange)", "(ratio, None, 1.0 + args.cliprange)"),
            (
                "token_logprobs",
                "new_logprobs = selective_log_softmax(logits, mb_responses)",
                "new_logprobs = selective_log_softmax(logits, mb_responses.roll(1, 1))",
            ),
        ),
    ),
    "verl": Copy(
        package="verl",
        version="0.9.1",
        file="trainer/ppo/core_algos.py",
        lines=(
            ("gae", "+ gamma * nextvalues - values[:, t]", "+ nextvalues - values[:, t]"),
            ("gae", "+ (1 - response_mask[:, t]) * nextvalues", ""),
            ("policy_loss", "batch_num_tokens = loss_mask.sum()", "batch_num_tokens = loss_mask.numel()"),
            ("policy_loss", "/ (seq_mask + 1e-8)", "/ loss_mask.shape[-1]"),
            ("value_loss", "vf_losses2 = (vpredclipped - returns) ** 2", "vf_losses2 = (vpredclipped - values) ** 2"),
            ("kl_penalty", "kld = (ratio - kl - 1)", "kld = (ratio + kl - 1)"),
            ("kl_controller", "* n_steps / self.horizon", "/ self.horizon"),
        ),
    ),
    "openrlhf": Copy(
        package="openrlhf",
        version="0.11.2",
        file="models/loss.py",
        lines=(
            ("policy_loss", "surr1 = ratio * advantages", "surr1 = ratio.detach() * advantages"),
            ("policy_loss", "(1 - self.clip_eps_low, 1 + self.clip_eps_high)", "(1 - self.clip_eps_high, 1 + self.clip_eps_low)"),
            ("policy_loss", "clip2 = torch.max(clip1, self.dual_clip * advantages)", "clip2 = clip1"),
            ("aggregate", ".sum(dim=-1) / (token_counts + 1e-8)", ".mean(dim=-1)"),
            ("value_loss", "loss = torch.max(surr1, surr2)", "loss = torch.min(surr1, surr2)"),
            ("reward_model_loss", "chosen_reward - reject_reward - margin", "chosen_reward - reject_reward + margin"),
            ("dpo_loss", "logits = pi_logratios - ref_logratios", "logits = pi_logratios"),
        ),
    ),
    "deepspeed-chat": Copy(
        package="applications/DeepSpeed-Chat",
        version=None,
        checkout="DEEPSPEED_EXAMPLES",
        file="dschat/rlhf/ppo_trainer.py",
        lines=(
            ("shaped_rewards", "-self.kl_ctl * (log_probs - ref_log_probs)", "self.kl_ctl * (log_probs - ref_log_probs)"),
            ("experience", "rewards[j, start:ends[j]][-1] +=", "rewards[j, start:][-1] +="),
            ("gae", "self.gamma * nextvalues - values", "nextvalues - values"),
            ("gae", "delta + self.gamma * self.lam * lastgaelam", "delta + self.gamma * lastgaelam"),
            (
                "policy_loss",
                "torch.sum(torch.max(pg_loss1, pg_loss2) * mask) / mask.sum()",
                "torch.max(pg_loss1, pg_loss2).mean()",
            ),
            ("value_loss", "vf_loss2 = (values_clipped - returns)**2", "vf_loss2 = vf_loss1"),
            ("token_logprobs", "F.log_softmax(logits, dim=-1)", "F.log_softmax(logits, dim=1)"),
        ),
    ),
}
EVERY = [(name, number) for name, copy in COPIES.items() for number in range(len(copy.lines))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function that gives an adapter's copy, made when it is first asked for; it skips where there is no trainer."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            original = _original(name, COPIES[name])
            made[name] = tmp_path_factory.mktemp(name)
            shutil.copytree(original, made[name] / COPIES[name].package, ignore=shutil.ignore_patterns("__pycache__"))
        return made[name]

    return folder


def _original(name: str, copy: Copy) -> Path:
    if copy.checkout:
        if not os.environ.get(copy.checkout):
            pytest.skip(f"{copy.checkout} names no checkout for {name}")
        return Path(os.environ[copy.checkout]) / copy.package
    try:
        adapter = load(name)
    except AdapterError as reason:
        pytest.skip(str(reason))
    installed = adapter.VERSION
    if installed != copy.version:
        pytest.skip(f"the lines are those of {name} {copy.version}; {installed} is installed")
    return Path(importlib.import_module(copy.package).__path__[0])


def _check(name: str, folder: Path, ops: list[str]) -> tuple[int, dict[str, str]]:
    """The exit code of a check of the copy, and the verdict on each op."""
    copy, result = COPIES[name], folder / "result.json"
    flags = [word for op in ops for word in ("--op", op)]
    flags += ["--source", str(folder / copy.package)] if copy.checkout else []
    flags += ["--baseline", str(BASELINES / copy.baseline)] if copy.baseline else []
    # No bytecode: a mutation of the same length within the same second would run that of the line before it.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "goldenppo", "check", name, "--json", str(result), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.exists(), done.stdout + done.stderr
    verdicts = {row["op"]: row["verdict"] for row in json.loads(result.read_text(encoding="utf-8"))["ops"]}
    result.unlink()
    return done.returncode, verdicts


@pytest.mark.parametrize("name", COPIES)
def test_the_copy_has_the_trainers_verdict(name, folders):
    """Unmutated, every op conforms, but for the departures that the baseline records."""
    ops = list(dict.fromkeys(op for op, _, _ in COPIES[name].lines))
    code, verdicts = _check(name, folders(name), ops)

    assert code == 0, verdicts
    assert COPIES[name].baseline or set(verdicts.values()) == {"conforms"}


@pytest.mark.parametrize(("name", "number"), EVERY, ids=[f"{name}-{number}" for name, number in EVERY])
def test_a_mutated_line_is_caught(name, number, folders):
    """With one line changed the op of that line does not conform, beyond what a baseline records."""
    op, right, wrong = COPIES[name].lines[number]
    folder = folders(name)
    path = folder / COPIES[name].package / COPIES[name].file
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in {path.name}"
    try:
        path.write_text(text.replace(right, wrong), encoding="utf-8")
        code, verdicts = _check(name, folder, [op])
    finally:
        path.write_text(text, encoding="utf-8")

    assert code == 1
    assert verdicts[op] == "does-not-conform"
