"""The example harnesses, and the protocol's schema held against what is really said."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import jsonschema
import pytest

import goldenppo
from goldenppo.adapters import process
from goldenppo.adapters.process import Process
from goldenppo.conformance.cases import load, table
from goldenppo.conformance.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
SCHEMA = json.loads((Path(process.__file__).parent / "protocol.schema.json").read_text(encoding="utf-8"))
NODE = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH")
JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
COMMANDS = [
    pytest.param(f"node {EXAMPLES / 'harness.mjs'}", ["float64", "float32"], marks=NODE, id="node"),
    pytest.param(f"{sys.executable} {EXAMPLES / 'jax_harness.py'}", ["float64"], marks=JAX, id="jax"),
]


@pytest.mark.parametrize(("command", "dtypes"), COMMANDS)
def test_an_example_conforms_in_five_ops_with_gradients(command, dtypes, tmp_path, capsys):
    flags = [flag for dtype in dtypes for flag in ("--dtype", dtype)]

    code = main(["check", f"cmd: {command}", *flags, "--json", str(tmp_path / "r.json")])

    assert code == 0, capsys.readouterr().out
    ops = {row["op"]: row for row in json.loads((tmp_path / "r.json").read_text())["ops"] if row["verdict"] != "not-offered"}
    assert set(ops) == {"policy_loss", "value_loss", "kl_penalty", "gae", "reward_model_loss"}
    assert {row["verdict"] for row in ops.values()} == {"conforms"}
    assert all(ops[op]["gradients"] for op in ("policy_loss", "value_loss", "reward_model_loss"))


BUGS = [
    ("Math.max(plain, clipped), slope: plain >= clipped ? plain : 0",
     "Math.min(plain, clipped), slope: plain <= clipped ? plain : 0", "pl-min-for-max"),
    ("(l, r) => l - r", "(l, r) => r - l", "kl-sign"),
    ("gamma * next - values", "lam * next - values", "gae-gamma-lambda-swapped"),
]  # fmt: skip


@NODE
@pytest.mark.parametrize(("right", "wrong", "name"), BUGS)
def test_a_bug_planted_in_the_javascript_is_caught_and_named(right, wrong, name, tmp_path, capsys):
    text = (EXAMPLES / "harness.mjs").read_text(encoding="utf-8")
    assert text.count(right) == 1
    (tmp_path / "harness.mjs").write_text(text.replace(right, wrong), encoding="utf-8")

    assert main(["check", f"cmd: node {tmp_path / 'harness.mjs'}", "--dtype", "float64"]) == 1
    assert f"matches {name}" in capsys.readouterr().out


def conversation(command: list[str], monkeypatch) -> list[dict]:
    """Every message of a check of one op, requests and answers."""
    said = []
    ask = Process._ask

    def listening(self, message, limit):
        answer = ask(self, message, limit)
        said.extend([process.words({"seq": self.seq, **message}), process.words(answer)])
        return answer

    monkeypatch.setattr(Process, "_ask", listening)
    session = Process(command, table(), 60, "harness")
    session.hello()
    for case in load("policy_loss"):
        session.call(
            {"op": "policy_loss", "inputs": case.inputs, "params": case.params, "axes": {}, "dtype": "float64", "device": "cpu",
             "gradients": ["logprobs"], "constants": list(case.constants)}
        )  # fmt: skip
    session.close()
    return said


WORKER = [sys.executable, str(Path(process.__file__).parent / "worker.py")]


@pytest.mark.parametrize("kind", ["worker", pytest.param("node", marks=NODE)])
def test_what_is_said_follows_the_schema(kind, tmp_path, monkeypatch):
    adapter = tmp_path / "mine.py"
    adapter.write_text("def policy_loss(new, old, advantages, mask, *, clip_low, clip_high):\n    return new.sum() * 0\n")
    command = [*WORKER, str(adapter)] if kind == "worker" else ["node", str(EXAMPLES / "harness.mjs")]
    monkeypatch.setenv("PYTHONPATH", str(Path(goldenppo.__file__).resolve().parent.parent))

    said = conversation(command, monkeypatch)

    assert len(said) > 20
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for message in said:
        json.dumps(message, allow_nan=False)
        assert not list(validator.iter_errors(message)), message


@pytest.mark.parametrize(
    "message",
    [
        {"seq": 2, "result": {"outputs": {"loss": "high"}}},
        {"seq": 2, "result": {"outputs": {"loss": None}}},
        {"seq": 2, "result": {}, "unsupported": "both"},
        {"seq": 2},
        {"result": {"outputs": {"loss": 0.5}}},
        {"seq": 2, "cmd": "run", "op": "gae"},
    ],
)
def test_the_schema_refuses_what_is_no_message(message):
    assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(message))


def test_the_schema_itself_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
