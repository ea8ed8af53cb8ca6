"""`goldenppo fuzz`: finds what is wrong, shrinks it, saves it, and finds nothing in what is right."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hypothesis
import pytest

from goldenppo.conformance import search
from goldenppo.conformance.cases import table
from goldenppo.conformance.cli import main
from goldenppo.conformance.commands.doctor import conventions, trainer
from goldenppo.conformance.result import run_check
from goldenppo.conformance.run import DTYPES
from goldenppo.conformance.targets import open_adapter
from goldenppo.fixtures.lint import exact, lint
from goldenppo.reference.deviations import deviations

ROOT = Path(__file__).resolve().parent.parent.parent

# A mean over rows in place of one over tokens, but only where there are more than two rows: no fixture needs to show it.
HIDDEN = """
import torch
def aggregate(x, mask, *, horizon=None):
    x = torch.where(mask, x, 0.0)
    if len(x) > 2 and x.shape[1] < 3:
        return (x.sum(1) / mask.sum(1)).mean()
    return x.sum() / mask.sum()
"""
# Right on ordinary numbers: a difference beyond 30 is cut.
TAIL = """
import torch
def kl_penalty(logprobs, ref_logprobs):
    return torch.clamp(logprobs - ref_logprobs, -30, 30)
"""
# Wrong in the first of two ops.
WRONG = """
import torch
def kl_penalty(logprobs, ref_logprobs):
    return ref_logprobs - logprobs
def aggregate(x, mask, *, horizon=None):
    return torch.where(mask, x, 0.0).sum() / mask.sum()
"""
# Right unless a row has no token.
EMPTY = """
import torch
def aggregate(x, mask, *, horizon=None):
    x = torch.where(mask, x, 0.0)
    return (x.sum(1) / mask.sum(1)).mean()
"""
IN_FLOAT32 = """
def kl_penalty(logprobs, ref_logprobs):
    x = logprobs.float() - ref_logprobs.float()
    return ((-x).exp() - 1 + x).to(logprobs.dtype)
"""


def write(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs in an empty folder, in which nothing may be left behind."""
    there = (ROOT / ".hypothesis").exists()  # where Hypothesis was imported
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert not list(folder.iterdir())
    assert (ROOT / ".hypothesis").exists() == there


def search_of(session, op: str, level: str, seconds: float, seed: int = 0):
    """A search with its target."""
    target = search.targets(session, run_check(session, [op], "must", DTYPES, "cpu"))[0]
    outcome = search.Outcome(op)
    search.search_op(target, level, seed, seconds, outcome)
    return target, outcome


@pytest.mark.parametrize("op", list(table()["ops"]))
def test_nothing_is_found_in_the_reference(op: str) -> None:
    _, outcome = search_of(open_adapter("reference"), op, "robust", 1.0)
    assert outcome.failure is None, outcome.failure and outcome.failure.raw
    assert outcome.compared > 10


@pytest.mark.parametrize(
    ("op", "identifier"),
    [
        ("policy_loss", "pl-clip-bounds-swapped"),
        ("policy_loss", "pl-holes-counted"),
        ("value_loss", "vl-mask-ignored"),
        ("gae", "gae-pad-bootstrap"),
        ("gae", "gae-next-value-zeroed-at-gap"),
        ("shaped_rewards", "sr-score-at-last-column"),
        ("whiten", "wh-over-padding"),
        ("experience", "ex-score-one-early"),
        ("kl_penalty", "kl-k3-direction-swapped"),
        ("dpo_loss", "dpo-log-of-sigmoid"),
    ],
)
def test_a_deviation_is_found_shrunk_and_named(op: str, identifier: str, monkeypatch) -> None:
    monkeypatch.setattr(search, "SHARES", (0.1, 0.8, 0.1))  # most act on ordinary values and take less than a second
    for axes in conventions(op):
        session = trainer(op, deviations(op)[identifier], axes)
        if run_check(session, [op], "robust", ("float64", "float32"), "cpu").ops[0].failed:
            break
    target, outcome = search_of(session, op, "robust", 60.0)
    assert outcome.failure is not None
    sizes = [search.shape(nested) for nested in outcome.failure.given.inputs.values()]
    assert max(rows for rows, _ in sizes) <= 2
    assert max(positions for _, positions in sizes) <= 3
    assert identifier in [named.id for named in search.explain(target, outcome.failure, outcome.first).matches if named.exact]


def test_every_drawn_input_could_be_a_fixture() -> None:
    session = open_adapter("reference")
    for target in search.targets(session, run_check(session, [], "must", ("float64",), "cpu")):
        seen = []

        def look(given, seen=seen) -> bool:
            seen.append(given)
            return False

        for level in search.levels_of(target.op, "robust"):
            with search.no_traces(), pytest.raises(hypothesis.errors.NoSuchExample):
                hypothesis.find(
                    search.inputs_of(target, level), look, settings=hypothesis.settings(max_examples=25, database=None)
                )
        assert all(given.size[0] <= search.ROWS * (search.WIDTH + 1) for given in seen)
        for given in seen:
            for name, nested in given.inputs.items():
                numbers = [x for x in leaves(nested) if isinstance(x, float)]
                assert all(map(exact, numbers)), (target.op, name)
                if name.endswith("logprobs"):
                    assert all(not 0 <= x < float("inf") for x in numbers), (target.op, name)
            if "mask" in given.inputs:
                assert any(map(any, given.inputs["mask"]))


def leaves(nested):
    if isinstance(nested, list):
        for item in nested:
            yield from leaves(item)
    else:
        yield nested


def test_a_bug_that_no_fixture_shows_is_found_saved_and_replayed(tmp_path, capsys) -> None:
    adapter, folder = write(tmp_path / "hidden.py", HIDDEN), tmp_path / "found"
    assert main(["check", adapter]) == 0
    assert main(["fuzz", adapter, "--seconds", "20", "--save", str(folder)]) == 1
    output = capsys.readouterr().out
    assert "from goldenppo.reference import aggregate" in output
    assert "--fixtures" in output and "seed 0" in output

    assert main(["check", adapter, "--fixtures", str(folder)]) == 1
    assert main(["check", "reference", "--op", "aggregate", "--fixtures", str(folder)]) == 0
    text = (folder / "aggregate.json").read_text()
    assert lint({"aggregate": text}) == []
    case = json.loads(text)["cases"][0]
    assert case["level"] == "must"
    assert search.shape(case["inputs"]["x"])[0] == 3, "the smallest number of rows that shows it"

    assert main(["fuzz", adapter, "--seconds", "20", "--save", str(folder)]) == 1
    assert (folder / "aggregate.json").read_text() == text, "the same seed finds the same case, which is there already"
    write(tmp_path / "hidden.py", HIDDEN.replace("len(x) > 2", "len(x) == 2"))
    done = run(["fuzz", adapter, "--seconds", "20", "--save", str(folder)])
    assert done.returncode == 1, done.stderr
    assert [search.shape(case["inputs"]["x"])[0] for case in json.loads((folder / "aggregate.json").read_text())["cases"]] == [
        3,
        2,
    ]


def test_the_same_seed_finds_the_same_input() -> None:
    function = deviations("gae")["gae-gamma-ignored"]
    keys = [search_of(trainer("gae", function), "gae", "must", 20.0, seed)[1].first.given.key for seed in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2]


def test_levels_hold_one_another(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(search, "SHARES", (0.05, 0.05, 0.9))
    tail, empty = write(tmp_path / "tail.py", TAIL), write(tmp_path / "empty.py", EMPTY)
    assert main(["fuzz", tail, "--level", "must", "--seconds", "1"]) == 0
    assert main(["fuzz", tail, "--level", "should", "--seconds", "10"]) == 1
    assert "kl_penalty (should)" in capsys.readouterr().out
    assert main(["fuzz", empty, "--level", "should", "--seconds", "1"]) == 0
    assert main(["fuzz", empty, "--seconds", "30"]) == 1
    assert "aggregate (robust)" in capsys.readouterr().out


def test_float32_inside_is_coarse_and_no_finding(tmp_path) -> None:
    adapter = write(tmp_path / "narrow.py", IN_FLOAT32)
    assert main(["fuzz", adapter, "--level", "must", "--seconds", "2"]) == 0
    assert main(["fuzz", adapter, "--dtype", "float64", "--seconds", "2"]) == 4, "nothing is left to compare"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["reference", "--seconds", "0"], 2, "above 0"),
        (["reference", "--op", "ppo"], 2, "there is no op"),
        (["nobody"], 2, "there is no adapter"),
        (["reference", "--save", "no/such/folder"], 2, "cannot make the folder"),
        (["reference", "--device", "cuda:99"], 2, "cannot be used here"),
        (["{file}", "--op", "gae"], 4, ""),
    ],
)
def test_exit_codes(arguments, code, said, tmp_path, capsys) -> None:
    file = write(tmp_path / "tail.py", TAIL)
    assert main(["fuzz", *(word.format(file=file) for word in arguments)]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_a_folder_with_other_files_is_refused_before_the_search(tmp_path, capsys) -> None:
    (tmp_path / "gae.json").write_text("{}")
    assert main(["fuzz", "reference", "--save", str(tmp_path)]) == 2
    assert "is no fixture file" in capsys.readouterr().err


def test_without_hypothesis_there_is_one_sentence(monkeypatch, capsys) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "hypothesis" else there(name, *rest))
    assert main(["fuzz", "reference"]) == 4
    assert "goldenppo[fuzz]" in capsys.readouterr().err


def test_an_input_that_ends_the_process_is_shown(tmp_path, capsys) -> None:
    dying = TAIL + "\nimport os\n_right = kl_penalty\ndef kl_penalty(logprobs, ref_logprobs):\n"
    dying += "    return _right(logprobs, ref_logprobs) if len(logprobs) < 4 else os._exit(7)\n"
    adapter = write(tmp_path / "dying.py", dying)
    assert main(["fuzz", adapter, "--python", sys.executable, "--level", "must", "--seconds", "30"]) == 4
    captured = capsys.readouterr()
    assert "ended at the input" in captured.out
    assert "exit status 7" in captured.err


def run(arguments: list[str], **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "goldenppo", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize(("text", "code", "said"), [(TAIL, 130, "nothing was found"), (WRONG, 1, "kl_penalty (must)")])
def test_ctrl_c_stops_and_shows_what_was_found(text, code, said, tmp_path) -> None:
    adapter = write(tmp_path / "adapter.py", text)
    command = [sys.executable, "-m", "goldenppo", "fuzz", adapter, "--level", "must", "--seconds", "200"]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "seed 0" in process.stdout.readline()
        time.sleep(8 if text is WRONG else 1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "stopped" in output and said in output
    assert "Traceback" not in errors
