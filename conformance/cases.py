"""Reads the op table, the fixtures and the spec's clauses. Needs no tensors."""

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from goldenppo.adapters.interface import UsageError

LEVELS = ("must", "should", "robust")
CHAPTERS = ("invariances", "run")  # chapters whose clauses are not of one op and have no cases
_HEADING = re.compile(r"^### (?P<label>[A-Z]+-\d+) · (?P<level>must|should|robust) · (?P<sentence>.+)$", re.MULTILINE)


def folder(name: str) -> Path:
    """A folder of the package (spec, fixtures), in a checkout as in a wheel."""
    import goldenppo

    return next(Path(root) / name for root in goldenppo.__path__ if (Path(root) / name).is_dir())


@functools.cache
def table() -> dict:
    """The op table (spec/ops.yaml)."""
    return yaml.load((folder("spec") / "ops.yaml").read_text(encoding="utf-8"), Loader=_yaml_loader())


def _yaml_loader():
    """libyaml's loader where it is built in: ten times faster, same result."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(name: str) -> dict:
    """A file of the spec folder."""
    return yaml.load((folder("spec") / name).read_text(encoding="utf-8"), Loader=_yaml_loader())


@dataclass(frozen=True)
class Case:
    """One case of a fixture file, as written there (fixtures/schema/fixture.schema.json)."""

    id: str
    op: str
    clauses: tuple[str, ...]
    level: str
    purpose: str
    params: dict
    inputs: dict
    answers: dict[str, list["Entry"]]
    constants: tuple[str, ...]
    source: dict
    precision: str | None = None
    edge: bool = False

    @property
    def full(self) -> bool:
        """Whether every position counts."""
        return all(all(row) for row in self.inputs.get("mask", []))


@dataclass(frozen=True)
class Block:
    """Right numbers: flat lists in row order; None = not compared."""

    shape: tuple[int, ...]
    want: tuple[float | None, ...]
    gauge: tuple[float, ...]
    low: float
    high: float
    upto: tuple[float | None, ...] | None = None  # an edge: anything between want and upto is right


@dataclass(frozen=True)
class Entry:
    """One right answer of an output and the variants that lead to it."""

    when: dict[str, list]
    block: Block
    gradients: dict[str, Block]


def load(op: str, directory: Path | None = None) -> list[Case]:
    """The cases of one op, in file order.

    Args:
        op: name of the op.
        directory: a folder of fixture files; the suite's own if None.

    Raises:
        UsageError: a file is no fixture file.
    """
    path = (directory or folder("fixtures") / "ops") / f"{op}.json"
    if not path.is_file():
        return []
    try:
        return parse(path.read_text(encoding="utf-8"), op)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UsageError(f"{path} is no fixture file: {problem}; `goldenppo fixtures write` makes them") from None


def parse(text: str, op: str) -> list[Case]:
    """The cases of the text of a fixture file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no such text.
    """
    document = json.loads(_plain(text))
    if document["schema"] != "goldenppo/fixture/1":
        raise KeyError(f"schema {document['schema']!r}; expected 'goldenppo/fixture/1'")
    return [_case(raw, op) for raw in document["cases"]]


def _plain(text: str) -> str:
    """JSON has no NaN and no infinities, so the fixtures hold them as strings; Python's reader knows the bare words."""
    return text.replace('"nan"', "NaN").replace('"inf"', "Infinity").replace('"-inf"', "-Infinity")


def _case(raw: dict, op: str) -> Case:
    answers = {output: [_entry(entry) for entry in entries] for output, entries in raw["answers"].items()}
    return Case(
        id=raw["id"],
        op=op,
        clauses=tuple(raw["clauses"]),
        level=raw["level"],
        purpose=raw["purpose"],
        params=raw["params"],
        inputs=raw["inputs"],
        answers=answers,
        constants=tuple(raw["constants"]),
        source=raw["source"],
        precision=raw.get("precision"),
        edge=raw.get("edge", False),
    )


def _entry(raw: dict) -> Entry:
    return Entry(raw["when"], _block(raw), {name: _block(grad) for name, grad in raw.get("gradients", {}).items()})


def _block(raw: dict) -> Block:
    shape, want = flatten(raw["value"])
    gauge = [0.0 if number is None else number for number in flatten(raw["gauge"])[1]]
    upto = tuple(flatten(raw["to"])[1]) if "to" in raw else None
    return Block(shape, tuple(want), tuple(gauge), raw["range"]["min"], raw["range"]["max"], upto)


def flatten(nested) -> tuple[tuple[int, ...], list]:
    """Shape and flat data of a nested list."""
    if not isinstance(nested, list):
        return (), [nested]
    if nested and isinstance(nested[0], list):
        rows = [flatten(row) for row in nested]
        return (len(nested), *rows[0][0]), [item for _, row in rows for item in row]
    return (len(nested),), nested


@functools.cache
def clauses() -> dict[str, dict]:
    """Every clause of the spec: label → level, sentence, op, and the text below its heading.

    `op` is the chapter: an op, or one of CHAPTERS.
    """
    found = {}
    for op in (*table()["ops"], *CHAPTERS):
        path = folder("spec") / f"{op}.md"
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        matches = list(_HEADING.finditer(text))
        for match, following in zip(matches, [*matches[1:], None], strict=True):
            body = text[match.end() : following.start() if following else len(text)]
            body = re.split(r"^## ", body, maxsplit=1, flags=re.MULTILINE)[0]
            found[match["label"]] = {"op": op, "level": match["level"], "sentence": match["sentence"], "text": body.strip()}
    return found


@functools.cache
def digest() -> str:
    """A short digest over all fixture files: two results with the same digest were judged by the same answers."""
    total = hashlib.sha256()
    for path in sorted((folder("fixtures") / "ops").glob("*.json")):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]
