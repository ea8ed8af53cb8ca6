"""Built-in adapters drive the trainer's own code: break the function that SOURCES names, and the op breaks.

Runs for the adapters whose trainer is installed; tox runs it in each trainer's environment.
"""

import ast
import importlib

import pytest

from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.loader import FOLDER, built_in, load
from goldenppo.adapters.session import Session
from goldenppo.conformance.cases import load as load_cases
from goldenppo.conformance.cases import table
from goldenppo.conformance.run import attempts

NAMES = list(built_in())


@pytest.mark.parametrize("name", NAMES)
def test_every_op_says_what_really_runs(name):
    """Read from the source, so that no trainer is needed."""
    tree = ast.parse((FOLDER / f"{built_in()[name][0]}.py").read_text(encoding="utf-8"))
    ops = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in table()["ops"]}
    text = ast.unparse(tree)

    assert ops, "an adapter without ops"
    for op in ops:
        assert f"'{op}'" in text.split("SOURCES")[1], f"{op} has no entry in SOURCES"


class Broken(Exception):
    """Raised in place of the trainer's function."""


def opened(name):
    try:
        return Session(load(name), table(), name=name)
    except AdapterError as reason:
        pytest.skip(str(reason))


def answers(session, op):
    """The answers to the first cases that the adapter can be asked."""
    found = []
    for case in load_cases(op):
        found += list(attempts(session, op, session.hello()["ops"][op], [case], ("float64",), "cpu"))
        if sum("result" in attempt.answer for attempt in found) >= 8:
            break
    return [attempt.answer for attempt in found]


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_source_breaks_the_op(name, monkeypatch):
    session = opened(name)
    declared = session.module.SOURCES
    for op in session.ops:
        assert any("result" in answer for answer in answers(session, op)), op
        for source in [declared[op]] if isinstance(declared[op], str) else declared[op]:
            where, _, qualified = source.partition(":")
            *path, last = qualified.split(".")
            owner = importlib.import_module(where)
            for part in path:
                owner = getattr(owner, part)

            def broken(*args, **kwargs):
                raise Broken

            with monkeypatch.context() as patch:
                patch.setattr(owner, last, broken)
                got = answers(session, op)
            raised = [answer for answer in got if "error" in answer]
            assert raised, f"{op} does not run {source}"
