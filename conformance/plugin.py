"""pytest plugin: `pytest --goldenppo my_trainer.py` makes every case a test. Does nothing until asked.

One line in a test module does the same from inside a suite:

    from goldenppo.conformance.plugin import conformance_tests
    test_policy_loss = conformance_tests("my_trainer.py", "policy_loss")
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest


def pytest_addoption(parser) -> None:
    """Adds `--goldenppo ADAPTER` and what goes with it."""
    group = parser.getgroup("goldenppo", "conformance of a PPO trainer")
    group.addoption("--goldenppo", metavar="ADAPTER", help="check this adapter; every case becomes a test")
    group.addoption(
        "--goldenppo-level", choices=("must", "should", "robust"), default="must", help="cases up to this level may fail"
    )


def pytest_collection(session) -> None:
    """Adds the adapter's cases to what pytest collects from its other arguments."""
    if session.config.getoption("goldenppo"):
        session.config.pluginmanager.register(_Collected(session.config.getoption("goldenppo")), "goldenppo-cases")


class _Collected:
    """Appends the case items; with nothing but --goldenppo on the command line, they are all there is."""

    def __init__(self, word: str):
        self.word = word

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session, config, items) -> None:
        folder = _Adapter.from_parent(session, name=self.word, nodeid=f"goldenppo/{Path(self.word).name}")
        if not config.args or config.args == [str(config.invocation_params.dir)] or config.args == config.getini("testpaths"):
            items.clear()
        items.extend(folder.collect())


@functools.lru_cache(maxsize=4)
def checked(word: str, level: str):
    """The check of an adapter, run once per process; or None and the sentence that says why there is no verdict."""
    from goldenppo.adapters.interface import AdapterError, UsageError
    from goldenppo.conformance.result import run_check
    from goldenppo.conformance.run import DTYPES
    from goldenppo.conformance.targets import open_adapter

    try:
        session = open_adapter(word)
        try:
            check = run_check(session, [], level, DTYPES, "cpu")
        finally:
            session.close()
    except (AdapterError, UsageError) as problem:
        return None, str(problem)
    return check, f"{word}: nothing was compared" if check.exit_code == 4 else ""


class _Adapter(pytest.Collector):
    """All cases of one adapter that were offered, by id and dtype."""

    def collect(self):
        check, problem = checked(self.name, self.config.getoption("goldenppo_level"))
        if problem:
            return [_CaseItem.from_parent(self, name="no verdict", settled=functools.partial(_fail, problem))]
        return [
            _CaseItem.from_parent(
                self, name=f"{verdict.case.id}[{verdict.dtype}]", settled=functools.partial(settle, report, verdict)
            )
            for report in check.ops
            for verdict in report.cases
        ]


class _CaseItem(pytest.Item):
    """One case at one dtype; or the sentence that says why there is no verdict."""

    def __init__(self, *, settled, **kwargs):
        super().__init__(**kwargs)
        self.settled = settled

    def runtest(self) -> None:
        self.settled()

    def reportinfo(self):
        return self.path, None, f"goldenppo {self.name}"


def settle(report, verdict) -> None:
    """Passes, skips, xfails or fails the running test as the verdict says."""
    from goldenppo.conformance.render.junit import message

    if verdict in report.failed:
        _fail(f"{verdict.case.purpose}\n{message(report, verdict)}\ngoldenppo explain {verdict.case.id}")
    if verdict.verdict in ("fail", "error"):  # above the level that decides
        pytest.xfail(f"{verdict.case.level}: {verdict.reason or message(report, verdict)}")
    if verdict.verdict not in ("pass", "coarse"):
        pytest.skip(verdict.reason or verdict.verdict)


def _fail(sentence: str) -> None:
    """Fails the running test with a sentence and no traceback."""
    pytest.fail(sentence, pytrace=False)


def conformance_tests(word: str, op: str, level: str = "must"):
    """A test function over all cases of an op, to be bound to a name that starts with test_.

    Args:
        word: the adapter, as for `goldenppo check`.
        op: name of the op.
        level: up to which level cases may fail.
    """
    from goldenppo.conformance.cases import load
    from goldenppo.conformance.run import DTYPES

    ids = [(case.id, dtype) for case in load(op) for dtype in DTYPES if not (case.edge and dtype == "bfloat16")]

    @pytest.mark.parametrize(("case", "dtype"), ids, ids=[f"{case}[{dtype}]" for case, dtype in ids])
    def test_case(case, dtype):
        check, problem = checked(word, level)
        if problem:
            _fail(problem)
        report = next(report for report in check.ops if report.op == op)
        verdict = next((v for v in report.cases if v.case.id == case and v.dtype == dtype), None)
        if verdict is None:
            pytest.skip("; ".join(report.notes) or f"{op} is not offered")
        settle(report, verdict)

    return test_case
