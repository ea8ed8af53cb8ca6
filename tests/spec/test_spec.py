"""The spec holds together: chapters, clauses, worked examples, variants."""

import doctest
import itertools
import re

import pytest

from goldenppo.conformance.cases import clauses, folder, load, read_yaml, table

OPS = list(table()["ops"])
ALL = {op: load(op) for op in OPS}


def labels_of(op):
    return [label for label, about in clauses().items() if about["op"] == op]


@pytest.mark.parametrize("op", OPS)
def test_labels_are_consecutive_and_carry_the_prefix(op):
    """A label is never reused or left out: PL-1, PL-2, …"""
    expected = [f"{table()['ops'][op]['label']}-{number}" for number in range(1, len(labels_of(op)) + 1)]

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


@pytest.mark.parametrize("label", list(clauses()))
def test_every_clause_has_a_case(label):
    assert any(label in case.clauses for case in ALL[clauses()[label]["op"]])


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


def separation(case, axis, one, other, dtype):
    """How far apart two values of an axis are in a case, in tolerances of a dtype."""
    from goldenppo.conformance.law import DTYPES, tolerance

    law, furthest = DTYPES[dtype], 0.0
    for output, about in table()["ops"][case.op]["outputs"].items():
        if axis not in about["axes"]:
            continue
        for a, b in itertools.product(case.answers[output], repeat=2):
            if one not in a.when.get(axis, [one]) or other not in b.when.get(axis, [other]) or a is b:
                continue
            rest = set(a.when) | set(b.when)
            if any(
                not set(a.when.get(name, table()["axes"][name])) & set(b.when.get(name, table()["axes"][name]))
                for name in rest - {axis}
            ):
                continue
            pairs = [(a.block, b.block), *((a.gradients[name], b.gradients[name]) for name in a.gradients)]
            for x, y in pairs:
                for want, wrong, gauge in zip(x.want, y.want, x.gauge, strict=True):
                    if want is None or wrong is None:
                        furthest = max(furthest, 1e9 if want is not wrong else 0.0)
                    elif (want != want) != (wrong != wrong):
                        furthest = 1e9
                    else:
                        furthest = max(furthest, abs(want - wrong) / tolerance(want, gauge, law, law))
    return furthest


@pytest.mark.parametrize("op", OPS)
def test_every_pair_of_values_of_an_axis_is_told_apart_by_a_case(op):
    """By at least ten tolerances at float32; at float64 for epsilon and denominator."""
    axes = dict.fromkeys(axis for about in table()["ops"][op]["outputs"].values() for axis in about["axes"])
    for axis in axes:
        dtype = "float64" if axis in ("epsilon", "denominator") else "float32"
        for one, other in itertools.combinations(table()["axes"][axis], 2):
            if "plain_mean" in (one, other):
                continue  # defined only where it cannot be told from the token mean by a right answer
            assert any(separation(case, axis, one, other, dtype) >= 10 for case in ALL[op]), (axis, one, other)
