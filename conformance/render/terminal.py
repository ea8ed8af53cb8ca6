"""What a check says on a terminal: one table over the ops, then one screen for each op that does not conform."""

import os
import pprint
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from goldenppo.conformance import naming
from goldenppo.conformance.cases import clauses, table
from goldenppo.conformance.judge import OpReport
from goldenppo.conformance.result import Check, wrong_element

WIDTH = 80
_COLOURS = {"conforms": "32", "does-not-conform": "31", "not-offered": "2"}


def coloured() -> bool:
    """Colour only on a terminal, and not where NO_COLOR asks for none."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str | None) -> str:
    """Text in a colour, where colours are wanted."""
    return f"\033[{code}m{text}\033[0m" if code and coloured() else text


def wrap(text: str, indent: str = "  ") -> str:
    """A paragraph within the width."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def show(check: Check, command: str, known: set[str] | frozenset = frozenset(), lines: Sequence[str] = ()) -> str:
    """The whole report of one check.

    Args:
        check: what was found.
        command: the command line, for the hints.
        known: ids of cases whose failure a baseline expects; they are not shown again.
        lines: what a comparison with a baseline says.
    """
    parts = [head(check), matrix(check)]
    notes = [f"  {report.op}: {note}" for report in check.ops for note in report.notes if note]
    if notes:
        parts.append("\n".join(["Notes", *(wrap(note.strip()) for note in notes)]))
    reasons = _unsupported(check)
    if reasons:
        parts.append(reasons)
    for report in check.ops:
        shown = [verdict for verdict in report.failed if verdict.case.id not in known]
        if shown:
            parts.append(failure(report, shown, check, command))
    if check.invariances is not None:
        parts += invariances(check)
    if lines:
        parts.append("\n".join(["Against the baseline", *(wrap(line) for line in lines)]))
    parts.append(verdict(check))
    return "\n\n".join(part for part in parts if part)


def head(check: Check) -> str:
    """Who was checked, by what."""
    version = check.hello["version"]
    lines = [f"{check.hello['name']}{' ' + version if version else ''} on {check.device}, in {', '.join(check.dtypes)}"]
    known = check.hello.get("known_versions", [])
    if version and known and version not in known:
        lines.append(f"warning: this adapter was run against {', '.join(known)}; version {version} is new to it")
    return "\n".join(lines)


def matrix(check: Check) -> str:
    """One row per op: verdict, variant, cases passed, worst error as a share of the tolerance."""
    from tabulate import tabulate

    rows = []
    for report in check.ops:
        if report.verdict == "not-offered" and not report.cases:
            continue
        compared = [v for v in report.cases if v.verdict in ("pass", "coarse", "fail", "error")]
        passed = [v for v in compared if v.verdict in ("pass", "coarse")]
        uses = [v.use for v in passed if v.verdict == "pass"]
        gradient = (
            ("yes" if report.gradients else "no")
            if any("gradients" in about for about in table()["ops"][report.op]["outputs"].values())
            else ""
        )
        worst = f"{max(uses):.2f}" if uses else ""
        name = (
            "\n".join(textwrap.wrap(report.op, 16, break_on_hyphens=False))
            if len(report.op) <= 16
            else report.op.replace("model_", "model_\n")
        )
        rows.append(
            [
                name,
                paint(_short(report), _COLOURS.get(report.verdict)),
                variant(report),
                f"{len(passed)}/{len(compared)}",
                worst,
                gradient,
            ]
        )
    text = tabulate(rows, headers=["op", "verdict", "variant", "cases", "worst", "grad"], disable_numparse=True) if rows else ""
    absent = [report.op for report in check.ops if report.verdict == "not-offered" and not report.cases]
    if absent:
        text += "\n\n" + wrap("not offered: " + ", ".join(absent), "").replace("\n", "\n  ")
    return text.strip()


def _short(report: OpReport) -> str:
    return {"does-not-conform": "FAILS", "not-offered": "not offered"}.get(report.verdict, report.verdict)


def variant(report: OpReport) -> str:
    """The variant that an op implements, a line per axis; all values of an axis are not worth a line."""
    lines = []
    for axis, values in report.variant.items():
        if len(values) < len(table()["axes"][axis]) or len(values) == 1:
            lines += textwrap.wrap(f"{axis}: {', '.join(map(str, values))}", 34, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _unsupported(check: Check) -> str:
    """How many cases were not compared, and why, grouped by reason."""
    lines = []
    for report in check.ops:
        reasons: dict[str, set] = {}
        for v in report.cases:
            if v.verdict in ("unsupported", "blind", "out-of-range"):
                reasons.setdefault(v.reason or v.verdict, set()).add((v.case.id, v.dtype))
        lines += [wrap(f"{report.op}: {len(cases)} × {reason}", "  ") for reason, cases in reasons.items()]
    return "\n".join(["Not compared (case and dtype)", *lines]) if lines else ""


def failure(report: OpReport, failed: list, check: Check, command: str) -> str:
    """One screen: the case, the clause, the first wrong element, the bug that it matches, how to reproduce and record it."""
    known = ["  Known? Record it:", f"    {command} \\", "      --baseline baseline.yaml --update-baseline --allow-new"]
    return "\n".join([screen(report, failed), "", *known])


def screen(report: OpReport, failed: list) -> str:
    """A failure as a command that searches shows it: what `failure` prints, without the baseline."""
    first = failed[0]
    case = first.case
    lines = [paint(f"FAIL {report.op}: {case.id} in {first.dtype}", "31"), wrap(case.purpose)]
    for label in case.clauses[:1]:
        clause = clauses().get(label)
        if clause:
            lines.append(wrap(f"{label}: {clause['sentence']}"))
    lines += ["", *_wrong(first)]
    if report.precision.startswith("computes"):
        lines += [
            "",
            wrap(f"matches {report.precision}: right only by the law of that dtype; `goldenppo explain {report.precision}`"),
        ]
    lines += ["", *named(report)]
    lines += ["", "  Reproduce:", textwrap.indent(snippet(case, first), "    ")]
    others = sorted({f"{v.case.id} ({v.dtype})" for v in failed[1:]})
    if others:
        more = f" and {len(others) - 6} more" if len(others) > 6 else ""
        lines += ["", wrap(f"also failing: {', '.join(others[:6])}{more}")]
    return "\n".join(lines)


def _wrong(verdict) -> list[str]:
    if verdict.match is None or verdict.match.problem:
        if verdict.verdict == "error":
            place = verdict.attempt.answer["error"]["traceback"].strip().split("\n")
            where = next((line.strip() for line in reversed(place) if line.strip().startswith("File")), "")
            return [wrap(f"raised {verdict.reason}"), *([wrap(where)] if where else [])]
        output = f"{verdict.output}: " if verdict.output else ""
        return [wrap(f"{output}{verdict.reason or verdict.match.problem}")]
    element = wrong_element(verdict)
    assert element is not None  # where there is a match, there is one
    where = f"[{', '.join(map(str, element['index']))}]" if element["index"] else ""
    share = f"{verdict.use:.3g} × the tolerance" if verdict.use != float("inf") else "without bound"
    axes = {axis: value for axis, value in verdict.attempt.axes.items()}
    asked = f" with {', '.join(f'{axis}={value}' for axis, value in axes.items())}" if axes else ""
    return [
        wrap(f"{element['output']}{where}{asked}"),
        f"    got   {element['got']}",
        f"    want  {element['want']}",
        f"    error {share}",
    ]


def named(report: OpReport) -> list[str]:
    """The deviations that a report matches, with what to change; or the nearest one."""
    exact = [match for match in report.matches if match.exact]
    if not report.matches:
        return [wrap("matches no known deviation")] if not report.precision.startswith("computes") else []
    if not exact and report.precision.startswith("computes"):
        return []
    if not exact:
        nearest = report.matches[0]
        return [wrap(f"matches no known deviation; the nearest is {nearest.id} ({nearest.distance:.3g} × the tolerance away)")]
    lines = []
    for match in exact[:3]:
        entry = naming.describe(match.id)
        seen = f"; seen in {', '.join(entry['links'][:2])}" if entry.get("links") else ""
        lines.append(wrap(f"matches {paint(match.id, '1')}: {match.title}{seen}"))
        lines.append(wrap(f"fix: {entry['fix']}"))
    return lines


def snippet(case, verdict=None) -> str:
    """Python that shows the case's inputs and the right answer; runs as printed."""
    spec = table()["ops"][case.op]
    kinds = {"bool": ", dtype=torch.bool", "int": ", dtype=torch.int64"}
    lines = ["import torch", f"from goldenppo.reference import {case.op}"]
    for name, about in spec["inputs"].items():
        numbers, kind = _plain(case.inputs[name]), kinds.get(about.get("kind"), ", dtype=torch.float64")
        one_line = f"{name} = torch.tensor({numbers}{kind})"
        fits = "\n" not in numbers and len(one_line) <= WIDTH - 4
        lines.append(one_line if fits else f"{name} = torch.tensor(\n{textwrap.indent(numbers, '  ')}{kind})")
    given = []
    for name, value in case.params.items():
        if value is not None:
            shaped = "shape" in spec["params"][name]
            kind = kinds.get(spec["params"][name].get("kind"), ", dtype=torch.float64")
            given.append(f"{name}=torch.tensor({_plain(value)}{kind})" if shaped else f"{name}={value!r}")
    when = verdict.match.entry.when if verdict is not None and verdict.match is not None else {}
    chosen = {axis: values[0] for axis, values in when.items()} | (verdict.attempt.axes if verdict is not None else {})
    given += [f"{axis}={value!r}" for axis, value in chosen.items()]
    call = f"print({case.op}({', '.join([*spec['inputs'], *given])}))"
    lines += textwrap.wrap(call, WIDTH - 4, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, "# prints what is right; your function takes the same inputs"])


def _plain(nested) -> str:
    """A nested list as Python text that fits the width, not-a-number and infinities included."""
    text = pprint.pformat(nested, width=WIDTH - 8, compact=True)
    return re.sub(r"-?\b(nan|inf)\b", lambda match: f"float('{match[0]}')", text)


_MARKS = {"holds": "ok", "coarse": "ok~", "fails": "FAIL", "not-compared": "-", "does-not-apply": ""}


def invariances(check: Check) -> list[str]:
    """The invariances: a table of ops and clauses, why some were not compared, and a screen for each failure."""
    from tabulate import tabulate

    from goldenppo.conformance.invariances import failing

    findings = check.invariances or []
    labels = list(dict.fromkeys(finding.clause for finding in findings))
    rows: dict[str, list] = {}
    reasons: dict[str, set] = {}
    for finding in findings:
        mark = _MARKS[finding.verdict]
        name = finding.op if len(finding.op) <= 16 else finding.op.replace("model_", "model_\n")
        rows.setdefault(name, [name]).append(paint(mark, "31") if finding.verdict == "fails" else mark)
        if finding.reason:
            reasons.setdefault(f"{finding.clause}: {finding.reason}", set()).add(finding.op)
    headers = ["INV-", *(label.removeprefix("INV-") for label in labels)]
    lines = ["Invariances", tabulate(list(rows.values()), headers=headers, disable_numparse=True), ""]
    if any(finding.verdict == "coarse" for finding in findings):
        lines.append(wrap("ok~ holds to float32 accuracy at float64"))
    lines += [wrap(f"{reason} ({', '.join(sorted(ops))})") for reason, ops in reasons.items()]
    deciding = failing(findings, check.level)
    above: dict[str, list] = {}
    for finding in findings:
        if finding.verdict == "fails" and finding not in deciding:
            above.setdefault(f"{finding.clause} ({finding.level})", []).append(finding.op)
    lines += [wrap(f"{clause} fails above the level that decides: {', '.join(ops)}") for clause, ops in above.items()]
    if above:
        lines.append(wrap("--level robust shows them in full"))
    lines.append(wrap("`goldenppo explain INV-6` explains a clause"))
    return ["\n".join(lines), *map(broken, deciding)]


def broken(finding) -> str:
    """One screen for an invariance that fails: the clause, the change, the two numbers, the smallest input that shows it."""
    given, claim = finding.given, finding.claim
    shape = next((x for x in given.inputs.values() if isinstance(x, list)), [])
    axes = [(len(shape), "row"), *([(len(shape[0]), "position")] if shape and isinstance(shape[0], list) else [])]
    size = " × ".join(f"{count} {name}{'s' if count != 1 else ''}" for count, name in axes)
    lines = [
        paint(f"FAIL {finding.op}: {finding.clause} ({finding.level}) in {finding.dtype}", "31"),
        wrap(clauses()[finding.clause]["sentence"]),
        "",
        wrap(f"changed: {finding.what}"),
    ]
    if claim is None:
        lines.append(wrap(f"raised {finding.problem}"))
    else:
        where = f"[{', '.join(map(str, claim.index))}]" if claim.index else ""
        share = f"{finding.use:.3g}" if finding.use != float("inf") else "not a finite number"
        error = "error of " if claim.allowed is not None else ""
        lines += [
            wrap(f"{error}{claim.part}{where}"),
            f"    with the change     {claim.got!r}",
            f"    without, so wanted  {claim.want!r}",
            f"    difference          {share} × the tolerance",
        ]
    lines += ["", f"  Smallest input that shows it ({size}):"]
    for name, nested in {**given.inputs, **{k: v for k, v in given.params.items() if v is not None}, **given.axes}.items():
        numbers = _plain(nested)
        fits = "\n" not in numbers and len(f"{name} = {numbers}") <= WIDTH - 4
        lines.append(textwrap.indent(f"{name} = {numbers}" if fits else f"{name} =\n{textwrap.indent(numbers, '  ')}", "    "))
    return "\n".join(lines)


def verdict(check: Check) -> str:
    """The last line."""
    offered = [report for report in check.ops if report.verdict in ("conforms", "does-not-conform")]
    wrong = [report.op for report in offered if report.verdict == "does-not-conform"]
    if check.exit_code == 4:
        return paint("no verdict: nothing was compared", "33")
    if check.exit_code == 3:
        return paint("the baseline is out of date: --update-baseline tightens it", "33")
    if check.exit_code == 0 and wrong:
        return paint(f"{check.hello['name']}: only known departures ({', '.join(wrong)})", "32")
    broke = sorted({finding.op for finding in check.invariances or () if finding.verdict == "fails"})
    if check.exit_code == 1 and broke and not wrong:
        return paint(f"{check.hello['name']} breaks invariances: {', '.join(broke)}", "31")
    if check.exit_code == 1 and not wrong:
        return paint(f"{check.hello['name']} is not what the baseline says", "31")
    if wrong:
        return paint(f"{check.hello['name']} does not conform: {', '.join(wrong)}", "31")
    return paint(f"{check.hello['name']} conforms at level {check.level}: {len(offered)} ops", "32")


class Progress:
    """A line that counts cases, or something else, on a terminal only."""

    def __init__(self, what: str = "case"):
        self.shown, self.what = sys.stderr.isatty(), what

    def __call__(self, op: str, done: int, total: int) -> None:
        if self.shown:
            width = shutil.get_terminal_size().columns
            end = "\r" if done < total else "\r" + " " * (width - 1) + "\r"
            print(f"{op}: {self.what} {done} of {total}"[: width - 1].ljust(width - 1), end=end, file=sys.stderr, flush=True)
