"""Every op of a built-in adapter says what really runs. Read from the source, so that no trainer is needed."""

import ast

import pytest

from goldenppo.adapters.loader import FOLDER, built_in
from goldenppo.conformance.cases import table

NAMES = list(built_in())


@pytest.mark.parametrize("name", NAMES)
def test_every_op_says_what_really_runs(name):
    """Read from the source, so that no trainer is needed."""
    tree = ast.parse((FOLDER / f"{built_in()[name][0]}.py").read_text(encoding="utf-8"))
    ops = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in table()["ops"]}
    text = ast.unparse(tree)

    assert ops, "an adapter without ops"
    for op in ops:
        assert f"'{op}'" in text.split("SOURCES")[1], f"{op} has no entry in SOURCES"
