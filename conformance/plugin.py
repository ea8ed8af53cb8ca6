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
    """The check of an adapter, run once per process."""
    from goldenppo.conformance.result import run_check
    from goldenppo.conformance.run import DTYPES
    from goldenppo.conformance.targets import open_adapter

    session = open_adapter(word)
    try:
        return run_check(session, [], level, DTYPES, "cpu")
    finally:
        session.close()


class _Adapter(pytest.Collector):
    """All cases of one adapter that were offered, by id and dtype."""

    def collect(self):
        level = self.config.getoption("goldenppo_level")
        check = checked(self.name, level)
        rows = [(report, verdict) for report in check.ops for verdict in report.cases]
        if check.exit_code == 4:
            raise self.CollectError(f"{self.name}: nothing was compared")
        return [_CaseItem.from_parent(self, name=f"{v.case.id}[{v.dtype}]", report=report, verdict=v) for report, v in rows]


class _CaseItem(pytest.Item):
    """One case at one dtype."""

    def __init__(self, *, report, verdict, **kwargs):
        super().__init__(**kwargs)
        self.report, self.verdict = report, verdict

    def runtest(self) -> None:
        settle(self.report, self.verdict)

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, f"goldenppo {self.name}"


def settle(report, verdict) -> None:
    """Passes, skips or fails the running test as the verdict says."""
    from goldenppo.conformance.render.junit import message

    __tracebackhide__ = True
    if verdict in report.failed:
        raise AssertionError(f"{verdict.case.purpose}\n{message(report, verdict)}\ngoldenppo explain {verdict.case.id}")
    if verdict.verdict not in ("pass", "coarse"):
        pytest.skip(verdict.reason or verdict.verdict)


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
        __tracebackhide__ = True
        report = next(report for report in checked(word, level).ops if report.op == op)
        verdict = next((v for v in report.cases if v.case.id == case and v.dtype == dtype), None)
        if verdict is None:
            pytest.skip("; ".join(report.notes) or f"{op} is not offered")
        settle(report, verdict)

    return test_case
