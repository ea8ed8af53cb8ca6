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
    named = {
        key.value for node in ast.walk(tree) if _is_sources(node) for key in node.value.keys if isinstance(key, ast.Constant)
    }

    assert ops, "an adapter without ops"
    assert ops <= named, f"no entry in SOURCES: {', '.join(sorted(ops - named))}"


def _is_sources(node) -> bool:
    """SOURCES = {…}, or SOURCES |= {…} where versions of a trainer differ."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(getattr(target, "id", None) == "SOURCES" for target in targets) and isinstance(node.value, ast.Dict)
