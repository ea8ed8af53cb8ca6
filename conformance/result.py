"""One whole check: run, judge, name, and the document that records it (schema: conformance/result.schema.json)."""

import platform
import sys
from dataclasses import dataclass, field

from goldenppo import __version__
from goldenppo.conformance import judge as judging
from goldenppo.conformance.cases import Case, digest, load, table
from goldenppo.conformance.judge import OpReport
from goldenppo.conformance.run import Attempt, attempts

SCHEMA = "goldenppo/result/1"


@dataclass
class Check:
    """Everything that one check found."""

    hello: dict
    level: str
    dtypes: tuple[str, ...]
    device: str
    ops: list[OpReport] = field(default_factory=list)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    exit_code: int = 0
    cases_digest: str = ""
    invariances: list | None = None  # findings (conformance/invariances.py) where they were asked for


def run_check(session, ops: list[str], level: str, dtypes: tuple[str, ...], device: str, directory=None, progress=None) -> Check:
    """Checks an adapter.

    Args:
        session: an opened adapter.
        ops: the ops asked for; all if empty.
        level: up to which level cases decide.
        dtypes: dtypes to run in.
        device: where the tensors live.
        directory: a folder of fixture files; the suite's own if None.
        progress: called with (op, cases done, cases in all) as the check goes on.
    """
    hello = session.hello()
    check = Check(hello, level, dtypes, device, cases_digest=digest())
    wanted = [op for op in table()["ops"] if not ops or op in ops]
    loaded: dict[str, list[Case]] = {op: load(op, directory) for op in wanted}
    total, done = sum(len(loaded[op]) for op in wanted if op in hello["ops"]), 0
    for op in wanted:
        if op not in hello["ops"] or not loaded[op]:
            reason = hello["skipped"].get(op, "" if op in hello["ops"] or not ops else "the adapter has no function of this name")
            check.ops.append(OpReport(op, "not-offered", notes=[reason] if reason else []))
            continue
        found: list[Attempt] = []
        for case in loaded[op]:
            found += attempts(session, op, hello["ops"][op], [case], dtypes, device)
            done += 1
            if progress:
                progress(op, done, total)
        report = judging.judge(op, found, level)
        if report.failed:
            from goldenppo.conformance.naming import name

            report.matches = name(report, found)
            if report.matches and report.matches[0].exact:
                judging.retell(report, report.matches[0].variant)
                report.precision = ""  # a bug that gives these very numbers is the better explanation
        check.ops.append(report)
        check.attempts[op] = found
    check.exit_code = exit_code(check)
    return check


def exit_code(check: Check) -> int:
    """0 conforms, 1 a deciding case fails, 4 nothing was compared."""
    compared = any(verdict.verdict in ("pass", "coarse", "fail", "error") for report in check.ops for verdict in report.cases)
    if not compared:
        return 4
    return 1 if any(report.failed for report in check.ops) else 0


def document(check: Check) -> dict:
    """The result as a JSON document."""
    found = {
        "schema": SCHEMA,
        "suite": {"version": __version__, "fixtures": check.cases_digest, "k": judging_k()},
        "adapter": {
            "name": check.hello["name"],
            "version": check.hello["version"],
            "sources": check.hello["sources"],
        },
        "environment": environment(check),
        "level": check.level,
        "ops": [_op(report) for report in check.ops],
        "cases": [_case(verdict, report) for report in check.ops for verdict in report.cases],
        "exit_code": check.exit_code,
    }
    if check.invariances is not None:
        from goldenppo.conformance import invariances

        found["invariances"] = [invariances.document(finding) for finding in check.invariances]
    return found


def judging_k() -> float:
    """The tolerance law's k, which every report prints."""
    from goldenppo.conformance.law import K

    return K


def environment(check: Check) -> dict:
    """Where the check ran; library versions only of what is loaded already."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": check.device,
        "dtypes": list(check.dtypes),
    }
    for library in ("torch", "numpy", "jax"):
        if library in sys.modules:
            found[library] = str(getattr(sys.modules[library], "__version__", ""))
    return found


def _op(report: OpReport) -> dict:
    counts: dict[str, int] = {}
    worst: dict[str, float] = {}
    for verdict in report.cases:
        counts[verdict.verdict] = counts.get(verdict.verdict, 0) + 1
        if verdict.verdict in ("pass", "coarse", "fail"):
            worst[verdict.dtype] = max(worst.get(verdict.dtype, 0.0), verdict.use)
    return {
        "op": report.op,
        "verdict": report.verdict,
        "variant": {axis: values[0] if len(values) == 1 else values for axis, values in report.variant.items()},
        "matches": [named.id for named in report.matches if named.exact]
        + ([report.precision] if report.precision.startswith("computes") else []),
        "gradients": report.gradients,
        "precision": report.precision or None,
        "counts": counts,
        "worst": {dtype: _json(use) for dtype, use in worst.items()},
        "notes": report.notes,
    }


def _case(verdict, report: OpReport) -> dict:
    failed = verdict.verdict in ("fail", "error")
    row = {
        "id": verdict.case.id,
        "op": report.op,
        "clauses": list(verdict.case.clauses),
        "dtype": verdict.dtype,
        "level": verdict.case.level,
        "verdict": verdict.verdict,
        "use": _json(verdict.use),
        "matches": [named.id for named in report.matches if named.exact] if failed else [],
    }
    if verdict.reason:
        row["reason"] = verdict.reason
    if failed:
        row["purpose"] = verdict.case.purpose
        row |= wrong_element(verdict) or {}
    return row


def wrong_element(verdict) -> dict | None:
    """The first wrong element of a failure: where it is, what came, what is right."""
    match = verdict.match
    if match is None or match.problem:
        return None
    result = verdict.attempt.answer["result"]
    part = match.part
    if part.startswith("grad_"):
        got, block = result["gradients"][part[5:]], match.entry.gradients[part[5:]]
    else:
        got, block = result["outputs"][part], match.entry.block
    return {
        "output": part,
        "index": position(match.index, block.shape),
        "got": _json(got["data"][match.index]),
        "want": _json(block.want[match.index]),
    }


def position(index: int, shape: tuple[int, ...]) -> list[int]:
    """A flat index as one index per axis."""
    where = []
    for size in reversed(shape):
        where.append(index % size)
        index //= size
    return where[::-1]


def _json(number):
    """JSON has no infinities: they are strings, as in fixtures."""
    if number is None or (number == number and abs(number) != float("inf")):
        return number
    return "nan" if number != number else "inf" if number > 0 else "-inf"
