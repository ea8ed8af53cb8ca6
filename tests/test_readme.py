"""Every snippet and every command of the README that needs no trainer's environment."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from goldenppo.conformance import cases
from goldenppo.conformance.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

MYTRAINER = {
    "__init__.py": "",
    "losses.py": """
import torch
def ppo_actor_loss(new, old, advantages, mask, eps):
    ratio = torch.exp(new - old)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return torch.where(mask, loss, 0.0).sum() / mask.sum()
""",
    "plain.py": """
import torch
def compute_actor_loss(log_probs_new, log_probs_old, advantages, clip_range=0.2):
    ratio = torch.exp(log_probs_new - log_probs_old)
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages).mean()
""",
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small trainer package, as the README's reader has one."""
    (tmp_path / "mytrainer").mkdir()
    for name, text in MYTRAINER.items():
        (tmp_path / "mytrainer" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("mytrainer", "my_trainer", "plain")]:
        del sys.modules[name]


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_python_adapter_of_the_readme_conforms(folder, number, capsys):
    text = blocks("python")[number]
    name = text.split("\n")[0].removeprefix("# ")
    (folder / name).write_text(text)

    assert main(["check", name]) == 0, capsys.readouterr().out


def commands():
    lines = [line.split("   #")[0].strip() for block in blocks("sh") for line in block.split("\n") if line.strip()]
    inline = re.findall(r"`(goldenppo [^`]+)`", README)
    return [line for line in dict.fromkeys([*lines, *inline]) if line.startswith("goldenppo ")]


# these have tests of their own
ELSEWHERE = ("ENV/bin/python", "--source DIR", "--device cuda", "verl openrlhf", "goldenppo run", "goldenppo doctor")


@pytest.mark.parametrize("command", [command for command in commands() if not any(part in command for part in ELSEWHERE)])
def test_a_command_of_the_readme_runs(folder, command, capsys):
    (folder / "my_trainer.py").write_text(blocks("python")[0])
    if "init" in command:
        (folder / "my_trainer.py").unlink()
    if "--baseline" in command and "--update-baseline" not in command:
        assert main(["check", "my_trainer.py", "--baseline", "baseline.yaml", "--update-baseline", "--allow-new"]) == 0

    if "audit" in command:
        shutil.copy(cases.folder("fixtures") / "run" / "cpu-float64" / "step-002.safetensors", "step.safetensors")
    if "report" in command:
        assert main(["check", "my_trainer.py", "--json", "result.json"]) == 0

    assert main(shlex.split(command.replace("--seconds 60", "--seconds 3"))[1:]) == 0, capsys.readouterr().out


def test_commands_were_found():
    assert len(commands()) >= 8


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
