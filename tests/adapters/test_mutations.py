"""One-line mutations of a trainer's source, in a copy laid over its environment, are caught through the adapter.

A trainer that is not installed where the tests run is skipped; DeepSpeed-Chat's checkout is named by DEEPSPEED_EXAMPLES.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import goldenppo

ROOT = str(Path(goldenppo.__file__).resolve().parent.parent)
CHAT = "applications/DeepSpeed-Chat/dschat/rlhf/ppo_trainer.py"

# adapter → (package or checkout, the file in it, [(the op that has to fail, a line, the mutated line)])
MUTATIONS = {
    "trl-ppo": (
        "trl",
        "experimental/ppo/ppo_trainer.py",
        [
            ("experience", "non_score_reward = -args.kl_coef * kl", "non_score_reward = args.kl_coef * kl"),
            ("experience", "rewards[actual_start, actual_end] += scores", "rewards[actual_start, actual_end - 1] += scores"),
            ("experience", "delta = rewards[:, t] + args.gamma * nextvalues - values[:, t]",
             "delta = rewards[:, t] + nextvalues - values[:, t]"),
            ("experience", "lastgaelam = delta + args.gamma * args.lam * lastgaelam",
             "lastgaelam = delta + args.lam * lastgaelam"),
            ("experience", "advantages = masked_whiten(advantages, ~padding_mask)",
             "advantages = masked_whiten(advantages, torch.ones_like(padding_mask))"),
            ("value_loss", "vf_loss_max = torch.max(vf_losses1, vf_losses2)", "vf_loss_max = torch.min(vf_losses1, vf_losses2)"),
            ("value_loss", "vf_losses2 = torch.square(vpredclipped - mb_return)",
             "vf_losses2 = torch.square(vpredclipped - vpred)"),
            ("policy_loss", "ratio = torch.exp(logprobs_diff)", "ratio = torch.exp(-logprobs_diff)"),
            ("policy_loss", "pg_loss_max = torch.max(pg_losses, pg_losses2)", "pg_loss_max = torch.min(pg_losses, pg_losses2)"),
            ("policy_loss", "torch.clamp(ratio, 1.0 - args.cliprange, 1.0 + args.cliprange)",
             "torch.clamp(ratio, 1.0 - args.cliprange, 1.0 + args.cliprange_value)"),
        ],
    ),
    "verl": (
        "verl",
        "trainer/ppo/core_algos.py",
        [
            ("gae", "delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]",
             "delta = token_level_rewards[:, t] + nextvalues - values[:, t]"),
            ("gae", "nextvalues = values[:, t] * response_mask[:, t] + (1 - response_mask[:, t]) * nextvalues",
             "nextvalues = values[:, t]"),
            ("policy_loss", "pg_losses3 = -advantages * clip_ratio_c", "pg_losses3 = advantages * clip_ratio_c"),
            ("value_loss", "vpredclipped = verl_F.clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)",
             "vpredclipped = verl_F.clip_by_value(vpreds, vpreds - cliprange_value, vpreds + cliprange_value)"),
            ("kl_penalty", "kl = ref_logprob - logprob", "kl = logprob - ref_logprob"),
            ("policy_loss", "seq_losses = torch.sum(loss_mat * loss_mask, dim=-1) / (seq_mask + 1e-8)",
             "seq_losses = torch.sum(loss_mat * loss_mask, dim=-1) / loss_mask.shape[-1]"),
        ],
    ),
    "openrlhf": (
        "openrlhf",
        "models/loss.py",
        [
            ("policy_loss", "surr1 = ratio * advantages", "surr1 = ratio.detach() * advantages"),
            ("policy_loss", "surr2 = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high) * advantages",
             "surr2 = ratio.clamp(1 - self.clip_eps_high, 1 + self.clip_eps_low) * advantages"),
            ("policy_loss", "seq_loss = (loss * loss_mask).sum(dim=-1) / (token_counts + 1e-8)",
             "seq_loss = (loss * loss_mask).mean(dim=-1)"),
            ("value_loss", "loss = torch.max(surr1, surr2)", "loss = torch.min(surr1, surr2)"),
            ("value_loss", "return 0.5 * loss", "return 0.25 * loss"),
            ("reward_model_loss", "loss = -F.logsigmoid(chosen_reward - reject_reward - margin)",
             "loss = -F.logsigmoid(chosen_reward - reject_reward + margin)"),
        ],
    ),
    "deepspeed-chat": (
        "DEEPSPEED_EXAMPLES",
        CHAT,
        [
            ("shaped_rewards", "kl_divergence_estimate = -self.kl_ctl * (log_probs - ref_log_probs)",
             "kl_divergence_estimate = self.kl_ctl * (log_probs - ref_log_probs)"),
            ("gae", "delta = rewards[:, t] + self.gamma * nextvalues - values[:, t]",
             "delta = rewards[:, t] + self.gamma * nextvalues - nextvalues"),
            ("gae", "lastgaelam = delta + self.gamma * self.lam * lastgaelam", "lastgaelam = delta + self.gamma * lastgaelam"),
            ("policy_loss", "pg_loss = torch.sum(torch.max(pg_loss1, pg_loss2) * mask) / mask.sum()",
             "pg_loss = torch.sum(torch.max(pg_loss1, pg_loss2) * mask) / mask.numel()"),
            ("policy_loss", "log_ratio = (logprobs - old_logprobs) * mask", "log_ratio = (old_logprobs - logprobs) * mask"),
            ("value_loss", "vf_loss1 = (values - returns)**2", "vf_loss1 = (values_clipped - returns)**2"),
        ],
    ),
}  # fmt: skip

EVERY = [(name, number) for name, (_, _, mutations) in MUTATIONS.items() for number in range(len(mutations))]


def home(name: str) -> Path | None:
    """The trainer's package, or its checkout; None where there is none."""
    package = MUTATIONS[name][0]
    if package.isupper():
        return Path(os.environ[package]) if package in os.environ else None
    found = importlib.util.find_spec(package)
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def verdicts(name: str, folder: Path, op: str) -> dict[str, str]:
    """What a check of the copy says of an op: {op: verdict}, with the named deviations."""
    package = MUTATIONS[name][0]
    source = ["--source", str(folder / package)] if package.isupper() else []
    path = os.pathsep.join([ROOT] if source else [str(folder), ROOT])
    result = folder / "result.json"
    command = [sys.executable, "-m", "goldenppo", "check", name, "--op", op, "--dtype", "float32", "--json", str(result), *source]
    # without bytecode: a mutation of the same size within the same second would run the bytecode of the line before
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {row["op"]: row["verdict"] for row in json.loads(result.read_text())["ops"]}


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A copy of each trainer, made when it is first asked for."""
    made = {}

    def copy(name):
        where = home(name)
        if where is None:
            pytest.skip(f"{name}: {MUTATIONS[name][0]} is not here")
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            keep = shutil.ignore_patterns("__pycache__", ".git", "*.png", "*.gif")
            part = Path(CHAT).parts[0:2] if MUTATIONS[name][0].isupper() else ()
            shutil.copytree(where.joinpath(*part), folder / MUTATIONS[name][0] / Path(*part), ignore=keep)
            made[name] = folder
        return made[name]

    return copy


@pytest.mark.parametrize(("name", "number"), EVERY, ids=[f"{name}-{number}" for name, number in EVERY])
def test_a_mutated_line_is_caught(copies, name, number):
    folder = copies(name)
    package, file, mutations = MUTATIONS[name]
    op, right, wrong = mutations[number]
    path = folder / package / file
    text = path.read_text(encoding="utf-8")
    assert right in text, f"{file} has no line {right!r} in this version"
    before = known(folder, name, op)
    try:
        path.write_text(text.replace(right, wrong), encoding="utf-8")
        after = verdicts(name, folder, op)
    finally:
        path.write_text(text, encoding="utf-8")

    assert after[op] == "does-not-conform"
    if before[op] == "does-not-conform":  # a known departure: the failing cases have to be others
        assert failing(folder) != before["failing"]


def known(folder: Path, name: str, op: str, seen={}) -> dict:  # noqa: B006  (one dictionary for the module, on purpose)
    """What the copy says before it is mutated."""
    if (name, op) not in seen:
        seen[name, op] = verdicts(name, folder, op) | {"failing": failing(folder)}
    return seen[name, op]


def failing(folder: Path) -> list:
    """The failing cases of the last check, with what they give."""
    cases = json.loads((folder / "result.json").read_text())["cases"]
    return [(row["id"], row["dtype"], row.get("got")) for row in cases if row["verdict"] in ("fail", "error")]
