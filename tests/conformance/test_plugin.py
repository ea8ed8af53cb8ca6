"""The pytest plugin, run as a user runs it: another pytest, in another folder."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
import torch
def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    r = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * r, -advantages * r.clamp(1 - clip_low, 1 + clip_high))
    return (loss * mask).sum() / mask.sum().to(loss.dtype)
"""
WRONG = RIGHT.replace("torch.maximum", "torch.minimum")
ONE_LINE = """
from goldenppo.conformance.plugin import conformance_tests
test_policy_loss = conformance_tests("my_trainer.py", "policy_loss")
test_gae = conformance_tests("my_trainer.py", "gae")
"""


@pytest.fixture
def suite(tmp_path):
    """A trainer's repository; runs pytest in it and returns exit code and output."""
    import goldenppo

    installed = any(entry.name == "goldenppo" for entry in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "goldenppo.conformance.plugin"]
    root = str(Path(goldenppo.__file__).resolve().parent.parent)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"PYTHONPATH": root}
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*flags, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *flags],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr

    run.folder = tmp_path
    return run


def test_a_right_trainer_passes_and_each_case_is_a_test(suite):
    code, output = suite("--goldenppo", "my_trainer.py", "-v", my_trainer=RIGHT)

    assert code == 0, output
    assert "policy_loss/symmetric-ragged[float64] PASSED" in output
    assert "policy_loss/symmetric-ragged[bfloat16] PASSED" in output


def test_a_wrong_trainer_fails_with_the_case_the_numbers_and_the_bug(suite):
    code, output = suite("--goldenppo", "my_trainer.py", my_trainer=WRONG)

    assert code == 1, output
    assert "FAILED goldenppo/my_trainer.py::policy_loss/symmetric-ragged[float64]" in output
    assert "× the tolerance" in output and "matches pl-min-for-max" in output
    assert "goldenppo explain policy_loss/symmetric-ragged" in output
    assert "conformance/plugin.py" not in output and "INTERNALERROR" not in output


@pytest.mark.parametrize(("text", "code"), [(RIGHT, 0), (WRONG, 1)])
def test_it_works_under_xdist(suite, text, code):
    pytest.importorskip("xdist")

    got, output = suite("--goldenppo", "my_trainer.py", "-n", "2", my_trainer=text)

    assert got == code, output
    assert "Different tests were collected" not in output


def test_it_is_inert_until_asked(suite):
    code, output = suite("-v", my_trainer=WRONG, test_own="import sys\ndef test_own(): assert 'torch' not in sys.modules\n")

    assert code == 0, output
    assert "1 passed" in output and "policy_loss" not in output


def test_own_tests_named_on_the_command_line_run_too(suite):
    files = {"my_trainer": RIGHT, "test_own": "def test_own(): pass\n"}
    code, output = suite("test_own.py", "--goldenppo", "my_trainer.py", "-v", **files)

    assert code == 0, output
    assert "test_own.py::test_own PASSED" in output and "policy_loss/symmetric-ragged[float64] PASSED" in output


def test_cases_are_chosen_by_k(suite):
    code, output = suite("--goldenppo", "my_trainer.py", "-k", "symmetric-ragged and float32", "-v", my_trainer=RIGHT)

    assert code == 0, output
    assert "policy_loss/symmetric-ragged[float32] PASSED" in output and "[float64]" not in output


@pytest.mark.parametrize("flags", [(), ("-n", "2")])
@pytest.mark.parametrize(
    ("text", "says"), [("def policy_loss(:", "is not valid Python"), ("x = 1", "nothing was compared"), (None, "my_trainer.py")]
)
def test_no_verdict_is_a_sentence_and_no_traceback(suite, text, says, flags):
    code, output = suite("--goldenppo", "my_trainer.py", *flags, **({"my_trainer": text} if text else {}))

    assert code not in (0, 5), output
    assert says in output
    assert "INTERNALERROR" not in output and "Traceback" not in output


@pytest.mark.parametrize("flags", [(), ("-n", "2")])
def test_one_line_in_a_module_of_ones_own(suite, flags):
    code, output = suite("-v", "-rs", *flags, my_trainer=RIGHT, test_conformance=ONE_LINE)

    assert code == 0, output
    assert "test_conformance.py::test_policy_loss[policy_loss/symmetric-ragged[float64]]" in output
    assert "PASSED" in output and "is not offered" in output

    code, output = suite(*flags, my_trainer=WRONG, test_conformance=ONE_LINE)

    assert code == 1, output
    assert "matches pl-min-for-max" in output
