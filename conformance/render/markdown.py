"""A check as Markdown, for the job summary of a CI run."""

from collections.abc import Sequence

from goldenppo.conformance.render.junit import message
from goldenppo.conformance.result import Check


def text(check: Check, lines: Sequence[str] = ()) -> str:
    """A table over the ops, then a line per failing case.

    Args:
        check: what was found.
        lines: what a comparison with a baseline says.
    """
    version = f" {check.hello['version']}" if check.hello["version"] else ""
    rows = [
        f"### goldenppo: {check.hello['name']}{version}",
        "",
        "| op | verdict | variant | cases |",
        "| --- | --- | --- | --- |",
    ]
    for report in check.ops:
        if report.cases:
            compared = [v for v in report.cases if v.verdict in ("pass", "coarse", "fail", "error")]
            passed = sum(v.verdict in ("pass", "coarse") for v in compared)
            variant = ", ".join(f"{axis}: {' or '.join(map(str, values))}" for axis, values in report.variant.items())
            rows.append(f"| {report.op} | {report.verdict} | {_cell(variant)} | {passed}/{len(compared)} |")
    failed = [(report, verdict) for report in check.ops for verdict in report.failed]
    if failed:
        rows += ["", *(f"- `{v.case.id}` ({v.dtype}): {_cell(message(report, v))}" for report, v in failed)]
    if lines:
        rows += ["", "Against the baseline:", "", *(f"- {_cell(line)}" for line in lines)]
    return "\n".join(rows) + "\n"


def _cell(said: str) -> str:
    return said.replace("|", "\\|").replace("\n", " ")
