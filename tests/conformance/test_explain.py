"""`goldenppo explain`: everything has an explanation, and every snippet runs as printed."""

import contextlib
import io

import pytest

from goldenppo.conformance.cases import clauses, load, read_yaml, table
from goldenppo.conformance.cli import main
from goldenppo.conformance.commands import explain

CASES = [case.id for op in table()["ops"] for case in load(op)]
DEVIATIONS = read_yaml("deviations.yaml")["deviations"]


def snippet_of(text):
    """The indented Python of an explanation."""
    lines = text.split("\n")
    start = next(number for number, line in enumerate(lines) if line.strip() == "import torch")
    return "\n".join(line[4:] for line in lines[start:])


def run(code):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "snippet", "exec"), {})
    return said.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_the_snippet_of_a_case_runs(case):
    assert run(snippet_of(explain.case(case))).strip()


@pytest.mark.parametrize("op", list(table()["ops"]))
def test_the_snippets_of_deviations_run(op):
    """One line for what is right, one for the deviation."""
    for name in [name for name, entry in DEVIATIONS.items() if entry["op"] == op]:
        text = explain.deviation(name)
        said = run(snippet_of(text))
        assert said.strip(), name
        assert "fix:" in text


@pytest.mark.parametrize(
    "name", [*clauses(), *table()["ops"], *table()["axes"], *(f"gaps={gap}" for gap in table()["axes"]["gaps"])]
)
def test_a_name_has_an_explanation_within_the_width(name, capsys):
    assert main(["explain", name]) == 0
    assert capsys.readouterr().out.strip()


def test_precision_names_have_an_explanation(capsys):
    for name in ("computes-in-bfloat16", "computes-in-float16"):
        assert main(["explain", name]) == 0
    assert "float32" in capsys.readouterr().out


def test_an_unknown_name_gets_the_nearest_ones(capsys):
    assert main(["explain", "gae-pad-bootstrp"]) == 2
    assert "gae-pad-bootstrap" in capsys.readouterr().err
