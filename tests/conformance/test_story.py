"""The life of a trainer under the CI gate, from green to red and back."""

import xml.etree.ElementTree as ElementTree

import pytest
import yaml

from goldenppo.conformance.cli import main

LOSSES = """
import torch

def actor_loss(new, old, advantages, mask, low, high):
    ratio = torch.exp(new - old)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return (loss * mask).sum() / mask.sum()

def critic_loss(values, old, returns, mask, clip):
    error = (values - returns) ** 2
    if clip is not None:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    return 0.5 * (error * mask).sum() / mask.sum()
"""

ADAPTER = """
import losses

MASK = "float"

def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    return losses.actor_loss(logprobs, old_logprobs, advantages, mask.to(logprobs.dtype), clip_low, clip_high)

def value_loss(values, old_values, returns, mask, *, clip=None):
    return losses.critic_loss(values, old_values, returns, mask.to(values.dtype), clip)
"""


@pytest.fixture
def gate(tmp_path, capsys, monkeypatch):
    """A small trainer repository and its CI command."""
    import sys

    (tmp_path / "my_trainer.py").write_text(ADAPTER)
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*flags, edit=None, adapter=None):
        if edit is not None:
            (tmp_path / "losses.py").write_text(edit)
        if adapter is not None:
            (tmp_path / "my_trainer.py").write_text(adapter)
        for name in ("losses", "my_trainer"):
            sys.modules.pop(name, None)
        sys.dont_write_bytecode = True
        code = main(["check", str(tmp_path / "my_trainer.py"), *flags])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    run.folder = tmp_path
    return run


def test_the_story(gate):
    baseline = str(gate.folder / "baseline.yaml")
    junit = str(gate.folder / "out.xml")
    record = ("--baseline", baseline, "--update-baseline", "--allow-new")
    hold = ("--baseline", baseline, "--junit", junit)

    code, _ = gate(*record)
    assert code == 0
    code, output = gate(*hold)
    assert code == 0, output

    planted = LOSSES.replace("new - old)", "old - new)")
    code, output = gate(*hold, edit=planted)
    assert code == 1
    assert "matches pl-ratio-inverted" in output
    failures = ElementTree.parse(junit).findall(".//failure")
    assert failures and "pl-ratio-inverted" in failures[0].get("message")

    assert gate(*record)[0] == 0
    code, output = gate(*hold)
    assert code == 0, output
    assert "only known departures" in output

    other = planted.replace("torch.maximum(-adv", "torch.minimum(-adv")
    assert gate(*hold, edit=other)[0] == 1, "a known failure that now has other numbers"

    code, output = gate(*hold, edit=LOSSES)
    assert code == 3
    assert "out of date" in output

    assert gate("--baseline", baseline, "--update-baseline")[0] == 0
    assert gate(*hold)[0] == 0

    by_rows = LOSSES.replace("(loss * mask).sum() / mask.sum()", "((loss * mask).sum(1) / mask.sum(1)).mean()")
    code, output = gate(*hold, edit=by_rows)
    assert code == 1
    assert "policy_loss.aggregation: token_mean → seq_mean_token_mean" in " ".join(output.split())

    removed = ADAPTER.split("def value_loss")[0]
    code, output = gate(*hold, edit=LOSSES, adapter=removed)
    assert code == 1
    assert "value_loss: offered → not offered" in output


def test_updating_without_allow_new_adds_nothing(gate):
    baseline = gate.folder / "baseline.yaml"
    gate("--baseline", str(baseline), "--update-baseline", "--allow-new")
    before = yaml.safe_load(baseline.read_text())

    code, _ = gate("--baseline", str(baseline), "--update-baseline", edit=LOSSES.replace("new - old)", "old - new)"))

    assert code == 1
    assert yaml.safe_load(baseline.read_text())["expected"] == before["expected"] == []


def test_a_pattern_that_matches_nothing_is_out_of_date(gate):
    baseline = gate.folder / "baseline.yaml"
    gate("--baseline", str(baseline), "--update-baseline", "--allow-new")
    document = yaml.safe_load(baseline.read_text())
    document["expected"] = [{"case": "policy_loss/no-such-case", "matches": [], "reason": "stale"}]
    baseline.write_text(yaml.safe_dump(document))

    code, output = gate("--baseline", str(baseline))

    assert code == 3
    assert "the pattern matches nothing" in output


@pytest.mark.parametrize(
    "text", ["[", "a: 1", "schema: goldenppo/baseline/1\nexpected: 3", "schema: goldenppo/baseline/1\nexpected: [{}]"]
)
def test_a_broken_baseline_is_a_usage_error(gate, text):
    (gate.folder / "baseline.yaml").write_text(text)

    code, output = gate("--baseline", str(gate.folder / "baseline.yaml"))

    assert code == 2
    assert "goldenppo: " in output and "Traceback" not in output
