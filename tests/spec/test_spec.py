"""The spec holds together: chapters, clauses, worked examples, variants."""

import doctest
import re

import pytest

from goldenppo.conformance.cases import CHAPTERS, clauses, folder, load, read_yaml, table
from goldenppo.conformance.coverage import FAR, best_case, page, pairs
from goldenppo.conformance.invariances import INVARIANCES

OPS = list(table()["ops"])
ALL = {op: load(op) for op in OPS}


def labels_of(op):
    return [label for label, about in clauses().items() if about["op"] == op]


@pytest.mark.parametrize("op", [*OPS, *CHAPTERS])
def test_labels_are_consecutive_and_carry_the_prefix(op):
    """A label is never reused or left out: PL-1, PL-2, …"""
    prefix = table()["ops"][op]["label"] if op in OPS else {"invariances": "INV", "run": "RUN"}[op]
    expected = [f"{prefix}-{number}" for number in range(1, len(labels_of(op)) + 1)]

    assert labels_of(op) == expected
    headings = re.findall(r"^### ", (folder("spec") / f"{op}.md").read_text(), re.MULTILINE)
    assert len(headings) == len(expected) > 0, "a heading that is no clause"


@pytest.mark.parametrize("label", list(clauses()))
def test_the_worked_example_of_a_clause_comes_out(label):
    """Every clause has exactly one example, and it prints what the spec says."""
    blocks = re.findall(r"```python\n(.*?)```", clauses()[label]["text"], re.DOTALL)
    assert len(blocks) == 1
    test = doctest.DocTestParser().get_doctest(blocks[0], {}, label, None, 0)
    assert test.examples

    said = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)

    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("label", [label for label, about in clauses().items() if about["op"] in OPS])
def test_every_clause_has_a_case(label):
    assert any(label in case.clauses for case in ALL[clauses()[label]["op"]])


def test_every_invariance_has_a_check():
    """The chapter's clauses have no cases: the engine has a function for each, and no others."""
    assert labels_of("invariances") == list(INVARIANCES)


def test_every_clause_of_the_run_stands_beside_the_code_that_keeps_it():
    code = "".join(path.read_text(encoding="utf-8") for path in (folder("reference") / "run").glob("*.py"))

    assert [label for label in labels_of("run") if f"# {label}" not in code] == []


def test_every_case_names_clauses_of_its_op():
    for op, cases in ALL.items():
        assert cases, op
        for case in cases:
            assert case.clauses and set(case.clauses) <= set(labels_of(op)), case.id


def test_variants_cover_the_axes_of_the_op_table():
    axes = read_yaml("variants.yaml")["axes"]

    assert {axis: list(about["values"]) for axis, about in axes.items()} == table()["axes"]
    for about in axes.values():
        assert about["question"].endswith("?")
        assert all(value["meaning"].endswith(".") for value in about["values"].values())


def test_each_collected_difference_has_an_axis_or_a_reason():
    for name, about in read_yaml("variants.yaml")["research"].items():
        assert about.get("axis") in table()["axes"] or about.get("out_of_scope"), name


def test_links_are_web_addresses():
    documents = [read_yaml("variants.yaml"), read_yaml("deviations.yaml")]
    for match in re.findall(r"https?://[^\s'\"\]]+", str(documents)):
        assert " " not in match
    for axis in documents[0]["axes"].values():
        for value in axis["values"].values():
            assert all(link.startswith("http") for link in value["links"])


@pytest.mark.parametrize("op", OPS)
def test_every_pair_of_values_of_an_axis_is_told_apart_by_a_case(op):
    """By at least ten tolerances at float32; at float64 for epsilon and denominator."""
    for axis, one, other in pairs(op):
        best, _ = best_case(op, axis, one, other)
        assert best >= FAR, (axis, one, other, best)


def test_the_page_of_cases_is_up_to_date():
    """docs/cases.md is generated: python -m goldenppo.conformance.coverage > docs/cases.md"""
    written = (folder("spec").parent / "docs" / "cases.md").read_text(encoding="utf-8")

    assert written == page()
