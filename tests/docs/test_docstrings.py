"""Public functions and classes say what they do, in the form that CONTRIBUTING.md shows."""

import ast
from pathlib import Path

import pytest

import goldenppo
from goldenppo.conformance.cases import table

ROOTS = [Path(root) for root in goldenppo.__path__]
FOLDERS = ("reference", "conformance", "adapters")
# what a command's module or an adapter offers under a name that says it all: the module's docstring speaks for them
ENTRY_POINTS = {"add_parser", "main"}


def modules(folder: str) -> list[Path]:
    """The Python files of a folder of the package, in a checkout as in a wheel."""
    root = next(root for root in ROOTS if (root / folder).is_dir())
    return sorted((root / folder).rglob("*.py"))


def undocumented(tree: ast.Module, exempt: set[str]) -> list[str]:
    """The public functions, classes and methods at any depth of a module's classes that have no docstring."""
    found = [] if ast.get_docstring(tree) or not tree.body else ["the module"]

    def visit(body: list, prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if node.name not in exempt and not ast.get_docstring(node):
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_names_have_docstrings(folder):
    missing = []
    for path in modules(folder):
        exempt = set(ENTRY_POINTS) if path.parent.name == "commands" else set()
        if folder == "adapters":  # a function named after an op does what the spec says of the op
            exempt |= {*table()["ops"], *(f"accumulated_{op}" for op in table()["ops"]), "setup", "main"}
        missing += [f"{path.name}: {name}" for name in undocumented(ast.parse(path.read_text(encoding="utf-8")), exempt)]
    assert missing == []


@pytest.mark.parametrize("op", table()["ops"])
def test_the_docstring_of_a_reference_op_is_whole(op):
    import goldenppo.reference as reference

    text = getattr(reference, op).__doc__
    arguments = text[text.index("Args:") : text.index("Returns:")]
    for name in (*table()["ops"][op]["inputs"], *table()["ops"][op]["params"]):
        assert name in arguments, f"{op} does not say what {name} is"
    assert "Source:" in text


def test_what_is_missing_is_found():
    tree = ast.parse(
        '"""Says."""\ndef open(): pass\ndef _hidden(): pass\nclass Box:\n    """Holds."""\n    def shut(self): pass\n'
    )

    assert undocumented(tree, set()) == ["open", "Box.shut"]
    assert undocumented(ast.parse("x = 1"), set()) == ["the module"]
