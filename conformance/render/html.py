"""Result documents as one self-contained page: a matrix, what is behind each cell, and how large the errors are."""

from pathlib import Path

from goldenppo.conformance.cases import LEVELS, clauses, read_yaml
from goldenppo.conformance.commands import report

EDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 1000.0)  # in tolerance units: at most 1 passes
_LABELS = ("≤ 0.001", "≤ 0.01", "≤ 0.03", "≤ 0.1", "≤ 0.3", "≤ 1", "≤ 10", "≤ 1000", "above")


def text(results: list[dict], titles: list[str]) -> str:
    """The page.

    Args:
        results: result documents.
        titles: how to call each.
    """
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).resolve().parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    catalogue = read_yaml("deviations.yaml")
    known = {**catalogue["deviations"], **catalogue.get("precision", {})}
    columns = [_column(index, result, title, known) for index, (result, title) in enumerate(zip(results, titles, strict=True))]
    names = report.ops(results)
    dtypes = list(dict.fromkeys(case["dtype"] for result in results for case in result["cases"]))
    return environment.get_template("report.html.j2").render(
        columns=columns,
        rows=[(op, [column["cells"].get(op) for column in columns]) for op in names],
        dtypes=dtypes,
        levels=LEVELS,
        labels=_LABELS,
        sums=lambda bins: [sum(levels.values()) for levels in bins],
        marks=report.MARKS,
        mixed=len({result["suite"]["fixtures"] for result in results}) > 1,
    )


def _column(index: int, result: dict, title: str, known: dict) -> dict:
    """One result, with a cell per op that it speaks of."""
    cells = {
        row["op"]: _cell(f"r{index}-{number}", row, [case for case in result["cases"] if case["op"] == row["op"]], known)
        for number, row in enumerate(result["ops"])
    }
    dtypes = dict.fromkeys(case["dtype"] for case in result["cases"])
    histograms = {dtype: _histogram([case for case in result["cases"] if case["dtype"] == dtype]) for dtype in dtypes}
    return {"title": title, "result": result, "cells": cells, "histograms": histograms}


def _cell(anchor: str, row: dict, cases: list[dict], known: dict) -> dict:
    """One op of one result: counts by level and dtype, and its cases, failures first and in full."""
    precision = [str(name) for name in row["matches"] if str(name).startswith("computes-in-")]
    counts: dict[tuple[str, str], list[dict]] = {}
    for case in cases:
        counts.setdefault((case["level"], case["dtype"]), []).append(case)
    failing = [
        case
        | {
            "anchor": f"{anchor}-{number}",
            "sentences": [(label, clauses().get(label, {}).get("sentence", "")) for label in case["clauses"]],
            "named": [_named(str(name), known) for name in dict.fromkeys([*case["matches"], *precision])],
        }
        for number, case in enumerate(case for case in cases if case["verdict"] in ("fail", "error"))
    ]
    good, compared = report.tally(cases)
    return {
        "anchor": anchor,
        "row": row,
        "cases": cases,
        "failing": failing,
        "good": good,
        "compared": compared,
        "counts": [[*key, *report.tally(group)] for key, group in counts.items()],
    }


def _named(name: str, known: dict) -> dict:
    """A deviation as this suite's catalogue has it; only its name where the catalogue is another."""
    entry = known.get(name, {})
    links = [link for link in entry.get("links", []) if link.startswith("https://")]
    return {"id": name, "links": links} | {key: entry.get(key, "") for key in ("title", "computed", "should", "fix")}


def _histogram(cases: list[dict]) -> list[dict]:
    """How many compared cases lie in each bin, by level."""
    bins = [dict.fromkeys(LEVELS, 0) for _ in _LABELS]
    for case in cases:
        if case["verdict"] in ("pass", "coarse", "fail") and case["level"] in LEVELS:
            use = float(case["use"])
            bins[next((place for place, edge in enumerate(EDGES) if use <= edge), len(EDGES))][case["level"]] += 1
    return bins
