"""The baseline file: what a trainer's repository says of its own known departures and of what must not change.

    schema: goldenppo/baseline/1
    expected:                       # known departures
      - case: policy_loss/*         # pattern over case ids
        matches: [pl-ratio-inverted]
        reason: waiting for the next release
        link: https://…
        since: 2026-12-01
        dtype: float32              # optional conditions: dtype, device, version
    pinned:                         # per op: what is identified today
      gae:
        offered: true
        variant: {gaps: skip}
        gradients: true
        precision: null
        compared: 24
        worst: {float32: 0.2}

Strict in both directions: an unexpected failure is a failure, and so is a change of convention; an expected failure that no
longer happens, or happens in another way, makes the baseline out of date.
"""

import datetime
import fnmatch
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from goldenppo.adapters.interface import UsageError
from goldenppo.conformance import files
from goldenppo.conformance.judge import OpReport
from goldenppo.conformance.result import Check

SCHEMA = "goldenppo/baseline/1"
RATCHET = 4.0  # a pass whose error has grown by more than this factor, and above a tenth of the tolerance, is shown
_EXPECTED = {"case", "matches", "reason", "link", "since", "dtype", "device", "version"}


@dataclass
class Comparison:
    """How a check compares with a baseline."""

    failures: list[str] = field(default_factory=list)  # exit 1
    outdated: list[str] = field(default_factory=list)  # exit 3
    shown: list[str] = field(default_factory=list)  # no effect on the exit code
    known: set[str] = field(default_factory=set)  # ids of cases whose failure is expected

    @property
    def exit_code(self) -> int:
        """1 where something is worse than the baseline says, 3 where it is only better, else 0."""
        return 1 if self.failures else 3 if self.outdated else 0


def read(path: str) -> dict:
    """A baseline file.

    Raises:
        UsageError: it does not exist or is no baseline.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no baseline {path!r}; make one with --update-baseline --allow-new") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path!r} cannot be read as YAML: {' '.join(str(problem).split())[:160]}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path!r} is no baseline; expected a mapping with schema: {SCHEMA}")
    document = {"expected": [], "pinned": {}, **{key: value for key, value in document.items() if value is not None}}
    if not isinstance(document["expected"], list) or not isinstance(document["pinned"], dict):
        raise UsageError(f"{path!r}: expected must be a list and pinned a mapping of ops")
    for number, row in enumerate(document["expected"], 1):
        if not isinstance(row, dict) or not isinstance(row.get("case"), str):
            raise UsageError(f"{path!r}: entry {number} of expected needs `case`, a pattern over case ids")
        unknown = row.keys() - _EXPECTED
        if unknown:
            names, allowed = ", ".join(sorted(unknown)), ", ".join(sorted(_EXPECTED))
            raise UsageError(f"{path!r}: entry {number} of expected has {names}; it can have {allowed}")
    for op, pin in document["pinned"].items():
        if not isinstance(pin, dict):
            raise UsageError(f"{path!r}: pinned.{op} must be a mapping")
    return document


def compare(check: Check, baseline: dict, ops: list[str]) -> Comparison:
    """Holds a check against a baseline.

    Args:
        check: what was found.
        baseline: a document from `read`.
        ops: the ops asked for; all if empty. Entries on other ops are left alone.
    """
    found = Comparison()
    _departures(check, baseline, ops, found)
    reports = {report.op: report for report in check.ops}
    for op, pin in baseline["pinned"].items():
        if op in reports:
            _pinned(reports[op], pin, found)
        elif not ops:
            found.failures.append(f"{op}: pinned, but there is no such op in this suite")
    for op, report in reports.items():
        if baseline["pinned"] and op not in baseline["pinned"] and report.verdict != "not-offered":
            found.outdated.append(f"{op}: offered now, not in the baseline")
    return found


def _departures(check: Check, baseline: dict, ops: list[str], found: Comparison) -> None:
    """Expected and unexpected failures."""
    unused = {id(row): row for row in baseline["expected"] if _applies(row, check) and _selected(row, check, ops)}
    passing: dict[int, set[str]] = {}
    for report in check.ops:
        named = _names(report)
        for verdict in report.cases:
            if verdict.verdict not in ("pass", "coarse", "fail", "error"):
                continue
            rows = [row for row in baseline["expected"] if _applies(row, check) and _covers(row, verdict)]
            failed = verdict in report.failed
            for row in rows:
                unused.pop(id(row), None)
                if not failed and verdict.verdict in ("pass", "coarse"):
                    passing.setdefault(id(row), set()).add(verdict.case.id)
            if failed and not rows:
                found.failures.append(f"{verdict.case.id} ({verdict.dtype}) fails unexpectedly")
            elif failed:
                found.known.add(verdict.case.id)
                expected = {name for row in rows for name in row.get("matches") or []}
                if expected != set(named):
                    was, now = ", ".join(sorted(expected)) or "no deviation", ", ".join(named) or "no deviation"
                    _once(found.failures, f"{report.op}: a known failure now matches {now}; the baseline says {was}")
    for row in baseline["expected"]:
        if id(row) in passing:
            cases = sorted(passing[id(row)])
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            found.outdated.append(f"{row['case']}: expected to fail, {cases[0]}{more} passes")
    found.outdated += [f"{row['case']}: the pattern matches nothing" for row in unused.values()]


def _once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


def _names(report: OpReport) -> list[str]:
    precision = [report.precision] if report.precision.startswith("computes") else []
    return [named.id for named in report.matches if named.exact] + precision


def _applies(row: dict, check: Check) -> bool:
    """Whether an entry's conditions hold in this check."""
    version = row.get("version")
    return row.get("device", check.device) == check.device and (version is None or str(version) == check.hello["version"])


def _selected(row: dict, check: Check, ops: list[str]) -> bool:
    """Whether an entry speaks of something that was run; one that a flag left out is not out of date."""
    op = row["case"].split("/")[0]
    return (not ops or any(fnmatch.fnmatch(name, op) for name in ops)) and row.get("dtype", check.dtypes[0]) in check.dtypes


def _covers(row: dict, verdict) -> bool:
    return fnmatch.fnmatch(verdict.case.id, row["case"]) and row.get("dtype", verdict.dtype) == verdict.dtype


def _pinned(report: OpReport, pin: dict, found: Comparison) -> None:
    """What may not change, op by op; an improvement makes the baseline out of date, anything else is a failure."""
    now = pinned(report)
    if pin.get("offered") and not now["offered"]:
        found.failures.append(f"{report.op}: offered → not offered")
        return
    if not pin.get("offered", True):
        if now["offered"]:
            found.outdated.append(f"{report.op}: not offered → offered")
        return
    was, is_now = pin.get("variant"), now["variant"]
    if was is None and is_now is not None:
        found.outdated.append(f"{report.op}: conforms now")
    elif was is not None and is_now is not None:  # a failing op has no variant, and its failures speak for themselves
        _variants(report.op, was, is_now, found)
    if pin.get("gradients") != now["gradients"]:
        (found.outdated if now["gradients"] else found.failures).append(
            f"{report.op}: gradients {'are' if now['gradients'] else 'are no longer'} checked"
        )
    if pin.get("precision") != now["precision"]:
        (found.failures if now["precision"] else found.outdated).append(
            f"{report.op}: precision {_say(pin.get('precision') or 'full')} → {_say(now['precision'] or 'full')}"
        )
    if pin.get("compared", 0) != now["compared"]:
        fewer = now["compared"] < pin.get("compared", 0)
        (found.failures if fewer else found.outdated).append(
            f"{report.op}: {pin.get('compared', 0)} → {now['compared']} comparisons"
        )
    for dtype, use in now["worst"].items():
        before = (pin.get("worst") or {}).get(dtype)
        if before is not None and use > 0.1 and use > RATCHET * max(before, 1e-3):
            found.shown.append(f"{report.op} ({dtype}): the worst error grew from {before} to {use} of the tolerance")


def _variants(op: str, was: dict, is_now: dict, found: Comparison) -> None:
    """Axis by axis; values that are told apart now and were not before are an improvement."""
    for axis in {**was, **is_now}:
        before, after = was.get(axis), is_now.get(axis)
        if before != after:
            narrower = isinstance(before, list) and after is not None and set(_listed(after)) < set(before)
            (found.outdated if narrower else found.failures).append(f"{op}.{axis}: {_say(before)} → {_say(after)}")


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _say(value) -> str:
    return " | ".join(map(str, value)) if isinstance(value, list) else "nothing" if value is None else str(value)


def pinned(report: OpReport) -> dict:
    """What a baseline pins of an op."""
    compared = [verdict for verdict in report.cases if verdict.verdict in ("pass", "coarse", "fail", "error")]
    worst: dict[str, float] = {}
    for verdict in compared:
        if verdict.verdict == "pass":
            worst[verdict.dtype] = max(worst.get(verdict.dtype, 0.0), verdict.use)
    variant = {axis: values[0] if len(values) == 1 else list(values) for axis, values in report.variant.items()}
    return {
        "offered": report.verdict != "not-offered",
        "variant": None if report.failed else variant,
        "gradients": report.gradients,
        "precision": report.precision or None,
        "compared": len(compared),
        "worst": {dtype: float(f"{use:.2g}") for dtype, use in worst.items()},
    }


def update(path: str, check: Check, ops: list[str], allow_new: bool) -> list[str]:
    """Writes the baseline anew: departures that are gone are dropped; new ones are added only where that is allowed.

    Returns:
        What is still wrong because it may not be added; the file keeps it out.
    """
    exists = Path(path).exists()
    old = read(path) if exists else {"expected": [], "pinned": {}}
    comparison = compare(check, old, ops)
    kept = [row for row in old["expected"] if not _applies(row, check) or not _selected(row, check, ops) or _still(row, check)]
    pins = dict(old["pinned"])
    if allow_new or not exists:
        for report in check.ops:
            pins[report.op] = pinned(report)
    else:
        for report in check.ops:
            probe = Comparison()
            _pinned(report, pins.get(report.op, {"offered": False}), probe)
            if not probe.failures:
                pins[report.op] = pinned(report)
    kept = [{**row, "matches": _names_of(row, check)} if allow_new and _still(row, check) else row for row in kept]
    if allow_new:
        kept += _new_rows(check, kept)
    document = {"schema": SCHEMA, "adapter": check.hello["name"], "expected": kept, "pinned": pins}
    files.write(path, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))
    return [] if allow_new else comparison.failures


def _still(row: dict, check: Check) -> bool:
    return any(_covers(row, verdict) for report in check.ops for verdict in report.failed)


def _names_of(row: dict, check: Check) -> list[str]:
    return sorted({name for report in check.ops for v in report.failed if _covers(row, v) for name in _names(report)})


def _new_rows(check: Check, kept: list[dict]) -> list[dict]:
    """One entry per failing case that no entry covers; its reason is for a person to write."""
    rows: dict[tuple, set[str]] = {}
    for report in check.ops:
        for verdict in report.failed:
            if any(_applies(row, check) and _covers(row, verdict) for row in kept):
                continue
            rows.setdefault((verdict.case.id, tuple(_names(report))), set()).add(verdict.dtype)
    today = datetime.date.today().isoformat()
    new = []
    for (case, names), dtypes in rows.items():
        wanted = [None] if len(dtypes) == len(_compared_dtypes(check, case)) else sorted(dtypes)
        for dtype in wanted:
            condition = {"dtype": dtype} if dtype else {}
            new.append({"case": case, "matches": list(names), "reason": "to be filled in", "since": today, **condition})
    return new


def _compared_dtypes(check: Check, case: str) -> set[str]:
    compared = ("pass", "coarse", "fail", "error")
    return {v.dtype for report in check.ops for v in report.cases if v.case.id == case and v.verdict in compared}
