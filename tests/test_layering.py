"""Data flows one way: spec <- reference <- fixtures <- conformance -> adapters -> a trainer."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REQUIRED_BY_US = ("jinja2", "jsonschema", "mpmath", "safetensors", "tabulate", "tqdm", "yaml")


def imports(source: str, package: str) -> Iterator[str]:
    """The dotted name of everything that a module imports, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names, level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                yield from [base, *(f"{base}.{alias.name}" for alias in names)]
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield name


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def reached(path: Path, banned: tuple[str, ...]) -> set[str]:
    package = ".".join(["goldenppo", *path.relative_to(ROOT).parent.parts])
    names = imports(path.read_text(encoding="utf-8"), package)
    return {name for name in names if any(name == ban or name.startswith(ban + ".") for ban in banned)}


@pytest.mark.parametrize(
    ("folder", "banned"),
    [
        ("reference", ("goldenppo.conformance", "goldenppo.adapters", "goldenppo.fixtures")),
        ("fixtures", ("goldenppo.adapters",)),
        ("adapters", ("goldenppo.reference", "goldenppo.conformance", "goldenppo.fixtures", *REQUIRED_BY_US)),
    ],
)
def test_folder_imports_nothing_above_it(folder: str, banned: tuple[str, ...]) -> None:
    paths = modules(folder)
    assert paths
    found = {str(path.relative_to(ROOT)): names for path in paths if (names := reached(path, banned))}
    assert not found


def test_every_way_to_import_is_seen() -> None:
    source = """
import a.b as c
from a import d
from . import e
from .f import g
from ..h import i
importlib.import_module("j.k")
__import__("l")
"""
    assert set(imports(source, "goldenppo.adapters")) == {
        "a.b", "a", "a.d", "goldenppo.adapters", "goldenppo.adapters.e", "goldenppo.adapters.f",
        "goldenppo.adapters.f.g", "goldenppo.h", "goldenppo.h.i", "j.k", "l",
    }  # fmt: skip
