"""`goldenppo report RESULT.json…`: one matrix over trainers and versions, from the result files of `goldenppo check`."""

import argparse

EPILOG = """exit codes:
  0  written
  2  usage: a file is missing or is no result file; output not writable

examples:
  goldenppo check my_trainer.py --json result.json
  goldenppo report result.json                          a matrix in Markdown, on the terminal
  goldenppo report old.json new.json --html report.html
  goldenppo report result.json --badge badge.json
"""

MARKS = {"conforms": "✓", "does-not-conform": "✗", "error": "!", "not-offered": "–"}
_COMPARED = ("pass", "coarse", "fail", "error")


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "report",
        help="show result files as one matrix",
        description="Reads files that `goldenppo check --json F` wrote and shows trainers and versions side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", metavar="RESULT.json", help="what `goldenppo check --json` wrote")
    parser.add_argument("--html", metavar="F", help="write one self-contained page")
    parser.add_argument("--markdown", metavar="F", help="write the matrix as Markdown")
    parser.add_argument("--badge", metavar="F", help="write a badge endpoint file (of one result)")
    parser.set_defaults(main=main)


def main(args) -> int:
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import badge, files

    if not args.results:
        raise UsageError("no result file given; `goldenppo check ADAPTER --json result.json` writes one")
    if args.badge and len(args.results) != 1:
        raise UsageError(f"--badge shows one result; {len(args.results)} were given")
    for path in (args.html, args.markdown, args.badge):
        if path:
            files.check_writable(path)
    results = [read(path) for path in args.results]
    titles = name(results, args.results)
    if args.html:
        from goldenppo.conformance.render import html

        files.write(args.html, html.text(results, titles))
    if args.markdown:
        files.write(args.markdown, markdown(results, titles))
    if args.badge:
        files.write(args.badge, badge.text(results[0]))
    if not (args.html or args.markdown or args.badge):
        print(markdown(results, titles), end="")
    return 0


def read(path: str) -> dict:
    """A result document, checked as far as a report reads it.

    Raises:
        UsageError: the file is missing, is no JSON, or is another document.
    """
    import json
    from pathlib import Path

    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance.result import SCHEMA

    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot read {path!r} ({problem.strerror}); `goldenppo check ADAPTER --json F` writes one") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{path!r} is no JSON: {problem}; `goldenppo check ADAPTER --json {path}` writes it") from None
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{path!r} is no result file: its schema is {schema!r}, expected {SCHEMA!r}")
    fault = _fault(result)
    if fault:
        raise UsageError(f"{path!r} is no result file: {fault}; `goldenppo check ADAPTER --json {path}` writes it")
    return result


_FIELDS: dict[str, dict[str, type]] = {
    "suite": {"version": str, "fixtures": str},
    "adapter": {"name": str, "version": str},
    "environment": {},
}
_OP: dict[str, type] = {"op": str, "verdict": str, "variant": dict, "matches": list, "counts": dict, "notes": list}
_CASE: dict[str, type] = {"id": str, "op": str, "clauses": list, "dtype": str, "level": str, "verdict": str, "matches": list}


def _fault(result: dict) -> str | None:
    """What a result document lacks."""
    for key, fields in _FIELDS.items():
        problem = _lacks(result.get(key), fields, key)
        if problem:
            return problem
    if not isinstance(result.get("level"), str):
        return "level is missing"
    for key, fields in (("ops", _OP), ("cases", _CASE)):
        if not isinstance(result.get(key), list):
            return f"{key} is no list"
        for index, row in enumerate(result[key]):
            problem = _lacks(row, fields, f"{key}[{index}]")
            if problem:
                return problem
    for index, row in enumerate(result["cases"]):
        try:
            float(row["use"])
        except (KeyError, TypeError, ValueError):
            return f"cases[{index}].use is no number"
    return None


def _lacks(row, fields: dict, where: str) -> str | None:
    if not isinstance(row, dict):
        return f"{where} is no object"
    wrong = next((key for key, kind in fields.items() if not isinstance(row.get(key), kind)), None)
    return f"{where}.{wrong} is missing or no {fields[wrong].__name__}" if wrong else None


def name(results: list[dict], paths: list[str]) -> list[str]:
    """A title per result: name and version; the file too, where two would read the same."""
    titles = [" ".join(part for part in (result["adapter"]["name"], result["adapter"]["version"]) if part) for result in results]
    return [title if titles.count(title) == 1 else f"{title} ({path})" for title, path in zip(titles, paths, strict=True)]


def ops(results: list[dict]) -> list[str]:
    """The rows of the matrix: every op that a result speaks of, in the suite's order."""
    return list(dict.fromkeys(row["op"] for result in results for row in result["ops"]))


def tally(rows: list[dict]) -> tuple[int, int]:
    """How many cases pass, of how many that were compared."""
    compared = [row for row in rows if row["verdict"] in _COMPARED]
    return sum(row["verdict"] in ("pass", "coarse") for row in compared), len(compared)


def markdown(results: list[dict], titles: list[str]) -> str:
    """The matrix as a Markdown table, and the deviations that were named."""
    lines = [
        "| op | " + " | ".join(_cell(title) for title in titles) + " |",
        "| --- |" + " --- |" * len(results),
    ]
    for op in ops(results):
        row = [op]
        for result in results:
            found = next((item for item in result["ops"] if item["op"] == op), None)
            good, compared = tally([case for case in result["cases"] if case["op"] == op])
            mark = MARKS.get(found["verdict"], "?") if found else MARKS["not-offered"]
            named = f" {', '.join(map(str, found['matches']))}" if found and found["matches"] else ""
            row.append(f"{mark} {good}/{compared}{named}" if compared else mark)
        lines.append("| " + " | ".join(_cell(item) for item in row) + " |")
    lines.append("")
    for title, result in zip(titles, results, strict=True):
        suite = result["suite"]
        said = f"{title}: level {result['level']}, suite {suite['version']}, fixtures {suite['fixtures']}"
        lines.append(f"- {_cell(said)}")
    return "\n".join(lines) + "\n"


def _cell(said: str) -> str:
    """Text that stays within its cell, and is no markup."""
    for letter, stands in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        said = said.replace(letter, stands)
    return said
