"""Harnesses that misbehave: a clear sentence and exit code 4, never a traceback and never a hang."""

import json
import sys
import textwrap
import time
from pathlib import Path

import jsonschema
import pytest

from goldenppo.adapters import process
from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.process import Process
from goldenppo.conformance.cases import table
from goldenppo.conformance.cli import main

SCHEMA = json.loads((Path(process.__file__).parent / "protocol.schema.json").read_text(encoding="utf-8"))
HARNESS = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["cmd"] == "stop":
        break
    if request["cmd"] == "hello":
        answer = {"hello": {"name": "toy", "ops": {"total_loss": {}}}}
    else:
        i, p = request["inputs"], request["params"]
        loss = i["policy_loss"] + p["vf_coef"] * i["value_loss"]
        loss += p["kl_loss_coef"] * i["kl_loss"] - p["entropy_coef"] * i["entropy"]
        answer = {"result": {"outputs": {"loss": loss}, "gradients": {
            "policy_loss": 1.0, "value_loss": p["vf_coef"], "entropy": -p["entropy_coef"], "kl_loss": p["kl_loss_coef"]}}}
    BEHAVIOUR
    print(json.dumps({"seq": request["seq"], **answer}), flush=True)
"""


@pytest.fixture
def check(tmp_path, capsys):
    def run(behaviour="", *flags):
        path = tmp_path / "harness.py"
        path.write_text(textwrap.dedent(HARNESS).replace("BEHAVIOUR", behaviour or "pass"))
        code = main(["check", f"cmd: {sys.executable} {path}", "--op", "total_loss", "--dtype", "float64", *flags])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_good_harness_conforms(check):
    code, output = check()

    assert code == 0, output
    assert "toy conforms" in output


def test_a_wrong_number_fails(check):
    code, _ = check("""answer = json.loads(json.dumps(answer).replace('"loss": ', '"loss": 1'))""")

    assert code == 1


@pytest.mark.parametrize(
    ("when", "behaviour", "says"),
    [
        ("run", "sys.exit(3)", "ended with exit status 3"),
        ("hello", "raise SystemExit('no licence')", "ended with exit status 1 before answering; its last words: no licence"),
        ("run", "os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("run", "time.sleep(60)", "gave no answer within 1 s"),
        ("run", "os.close(1); time.sleep(60)", "closed its stdout before answering"),
        ("run", "print('hello, world', flush=True)", "printed a line that is no answer: hello, world"),
        ("run", "print('[' * 10**5, flush=True)", "printed a line that is no answer: [["),
        ("run", "os.write(1, bytes(range(128, 256)) + b'\\n')", "printed a line that is no answer"),
        ("run", "os.write(1, b'1' * 10**6); sys.exit()", "printed a line that is no answer"),
        ("run", "request['seq'] = 99", "answered request 99"),
        ("run", "print(json.dumps({'seq': request['seq'], **answer}))", "answered request 2 when asked request 3"),
        ("run", "answer = {}", "neither result, unsupported nor error"),
        ("run", "answer['error'] = 'and an error'", "or with several"),
        ("run", "answer = {'result': 3}", "sent a result without"),
        ("run", "answer = {'result': {'outputs': {'loss': 'x'}}}", "sent loss in a form that cannot be read"),
        ("run", "answer = {'result': {'outputs': {'los': 0.5}}}", "sent 'los' among the outputs of total_loss; expected loss"),
        ("hello", "answer = {'hello': 1}", "answered the greeting without"),
        ("hello", "answer = {'hello': {'ops': {'nope': {}}}}", "which is no op"),
        ("hello", "answer = {'hello': {'ops': {'total_loss': {'axis': []}}}}", "offers total_loss with 'axis'"),
        ("hello", "answer = {'hello': {'ops': {'gae': {'axes': ['gap']}}}}", "offers gae with the axis 'gap'; its axes are gaps"),
        ("hello", "answer = {'hello': {'ops': {'gae': {'variants': {'gaps': 'jump'}}}}}", "it can be skip, zero, cut"),
        ("hello", "answer = {'refused': 'no GPU'}", "no GPU"),
        ("run", "sys.stderr.write('x' * 10**7 + ' the end'); sys.exit(1)", "ended with exit status 1"),
        ("run", "sys.stderr.write('x' * 10**7 + ' the end'); sys.exit(1)", "the end"),
    ],
)
def test_a_harness_that_misbehaves_ends_4_with_a_sentence(check, when, behaviour, says):
    code, output = check(f"if request['cmd'] == '{when}': {behaviour}", "--timeout", "1")

    assert code == 4
    assert says in output
    assert "Traceback" not in output


def test_a_harness_may_say_unsupported_or_error(check):
    code, output = check("if request['cmd'] == 'run': answer = {'unsupported': 'not today'}")
    assert code == 4 and "not today" in output

    code, output = check("if request['cmd'] == 'run': answer = {'error': 'out of memory'}")
    assert code == 1 and "out of memory" in output


def test_stderr_is_free(check):
    code, _ = check("sys.stderr.write('log line\\n' * 10000)")

    assert code == 0


def test_a_program_that_does_not_exist_is_a_usage_error(capsys):
    assert main(["check", "cmd: /no/such/program"]) == 2
    assert main(["check", "cmd:"]) == 2
    assert main(["check", "cmd: ./harness 'half"]) == 2


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e300"])
def test_a_time_limit_that_is_none_is_a_usage_error(check, capsys, seconds):
    code, output = check("", "--timeout", seconds)

    assert code == 2
    assert "--timeout is" in output


def test_a_harness_that_reads_nothing_cannot_stop_the_clock():
    """A request that is larger than the pipe would wait for ever where it is written by the one who watches the time."""
    session = Process([sys.executable, "-c", "import time; time.sleep(60)"], table(), 0.5, "sleeper")
    started = time.monotonic()

    with pytest.raises(AdapterError, match=r"sleeper gave no answer within 0.5 s"):
        session.call({"op": "aggregate", "inputs": {"x": [[0.0] * 10**6]}})
    assert time.monotonic() - started < 10


def test_what_a_harness_started_ends_with_it(tmp_path):
    child = "import pathlib, time; time.sleep(3); pathlib.Path('alive').touch()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); input(); input()"
    session = Process([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {parent}"], table(), 0.5, "parent")

    with pytest.raises(AdapterError):
        session.call({"op": "aggregate"})
    time.sleep(4)
    assert not (tmp_path / "alive").exists()


RIGHT = {"outputs": {"loss": 0.5}}
OFFERS = {"name": "toy", "ops": {"total_loss": {}}}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ({"result": RIGHT}, True),
        ({"result": {"outputs": {"loss": 1}}}, True),
        ({"result": {"outputs": {"loss": "nan"}}}, True),
        ({"result": {"outputs": {"loss": {"dtype": "float32", "shape": [], "data": [0.5]}}}}, True),
        ({"result": {**RIGHT, "gradients": {"entropy": -0.5}, "dead": False, "leaks": [], "changed": ["entropy"]}}, True),
        ({"result": {**RIGHT, "gradients": None}}, True),
        ({"unsupported": "why"}, True),
        ({"error": "what"}, True),
        ({"error": {"type": "ValueError", "message": "what", "traceback": ""}}, True),
        ({}, False),
        ({"result": RIGHT, "unsupported": "why"}, False),
        ({"result": RIGHT, "error": "what"}, False),
        ({"result": {}}, False),
        ({"result": {"outputs": {}}}, False),
        ({"result": {"outputs": {"loss": None}}}, False),
        ({"result": {"outputs": {"loss": "high"}}}, False),
        ({"result": {"outputs": {"loss": {"dtype": "float32", "data": [0.5]}}}}, False),
        ({"result": {**RIGHT, "gradients": [0.5]}}, False),
        ({"result": {**RIGHT, "gradient": {}}}, False),
        ({"result": {**RIGHT, "leaks": "entropy"}}, False),
        ({"result": {**RIGHT, "changed": [3]}}, False),
        ({"hello": OFFERS}, True),
        ({"hello": {"ops": {"total_loss": None, "gae": {"axes": ["gaps"], "gradients": False}}}}, True),
        ({"hello": {**OFFERS, "sources": {"total_loss": [{"name": "toy:loss", "sha256": None}]}}}, True),
        ({"hello": {"name": "toy"}}, False),
        ({"hello": {**OFFERS, "version": 2.1}}, False),
        ({"hello": {**OFFERS, "known_versions": "2.1"}}, False),
        ({"hello": {**OFFERS, "sources": {"total_loss": "toy:loss"}}}, False),
        ({"hello": {"ops": {"total_loss": {"axes": "none"}}}}, False),
        ({"hello": {"ops": {"total_loss": {"gradients": "no"}}}}, False),
        ({"hello": {"ops": {"total_loss": {"variant": {}}}}}, False),
        ({"hello": {"ops": {"gae": {"axes": ["gaps"], "withheld": {"gaps": "cut"}}}}}, False),
    ],
)
def test_the_schema_and_the_engine_take_the_same_answers(answer, right, monkeypatch):
    monkeypatch.setattr(Process, "_ask", lambda self, message, limit: answer)
    session = Process([sys.executable, "-c", "input()"], table(), 5, "toy")
    try:
        if "hello" in answer:
            session.hello()
        else:
            session.call({"op": "total_loss", "dtype": "float64"})
        taken = True
    except AdapterError:
        taken = False
    session.close()

    assert taken is right
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid({"seq": 1, **answer}) is right


def test_a_trainer_that_reads_stdin_reads_no_request(tmp_path, capsys):
    """In the worker's process the protocol has stdin for itself."""
    adapter = tmp_path / "asking.py"
    adapter.write_text(
        "import sys\ndef kl_penalty(new, ref):\n    assert sys.stdin.read() == ''\n    return new - ref\n", encoding="utf-8"
    )

    code = main(["check", str(adapter), "--python", sys.executable, "--op", "kl_penalty", "--dtype", "float64"])

    assert code == 0, capsys.readouterr().out
