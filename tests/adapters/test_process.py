"""Harnesses that misbehave: a clear sentence and exit code 4, never a traceback and never a hang."""

import sys
import textwrap

import pytest

from goldenppo.conformance.cli import main

HARNESS = """
import json, sys, time
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
    ("behaviour", "says"),
    [
        ("if request['cmd'] == 'run': sys.exit(3)", "ended with exit status 3"),
        ("if request['cmd'] == 'run': time.sleep(60)", "gave no answer within 1 s"),
        ("if request['cmd'] == 'run': print('hello, world', flush=True)", "printed a line that is no answer"),
        ("if request['cmd'] == 'run': request['seq'] = 99", "answered request 99"),
        ("if request['cmd'] == 'run': answer = {}", "neither result, unsupported nor error"),
        ("if request['cmd'] == 'run': answer = {'result': 3}", "sent a result without"),
        ("if request['cmd'] == 'run': answer = {'result': {'outputs': {'loss': 'x'}}}", "cannot be read"),
        ("if request['cmd'] == 'hello': answer = {'hello': 1}", "answered the greeting without"),
        ("if request['cmd'] == 'hello': answer = {'hello': {'ops': {'nope': {}}}}", "which is no op"),
        ("if request['cmd'] == 'run': sys.stderr.write('x' * 10**6); sys.exit(1)", "ended with exit status 1"),
    ],
)
def test_a_harness_that_misbehaves_ends_4_with_a_sentence(check, behaviour, says):
    code, output = check(behaviour, "--timeout", "1")

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
