"""What mkdocs builds: the repository's own Markdown under its own paths, and pages generated from what the code reads.

Nothing generated is committed, so nothing goes stale. Formulas become MathML, which a browser draws without a script.
"""

import argparse
import html
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import latex2mathml.converter
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from goldenppo.adapters.binding import axes_of  # noqa: E402
from goldenppo.conformance import cli  # noqa: E402
from goldenppo.conformance.cases import clauses, read_yaml, table  # noqa: E402

SOURCES = ("*.md", "LICENSE", "spec/*.md", "spec/*.yaml", "docs/*.md", "docs/*.css", "adapters/*.md", "fixtures/run/*.svg")
SCHEMAS = ("adapters/**/*.schema.json", "conformance/**/*.schema.json", "fixtures/**/*.schema.json")
_SPECIAL = re.compile(r"([\\`*_\[\]#])")
_FORMULA = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)


def on_config(config):
    """Headings get the anchors that they have on GitHub, so that one link serves both; no page for a server's 404."""
    config.mdx_configs["toc"] = {"slugify": anchor}
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Files, config) -> Files:
    """Takes the repository's files under their own paths, and adds the generated pages."""
    theirs = [file for file in files if file.abs_src_path is None or not Path(file.abs_src_path).is_relative_to(ROOT)]
    found = sorted({path for pattern in (*SOURCES, *SCHEMAS) for path in ROOT.glob(pattern)})
    ours = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in found]
    return Files([*theirs, *ours, *(File.generated(config, name, content=write()) for name, write in GENERATED.items())])


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Formulas as MathML, and boxes that GitHub draws for `[ ]`."""
    markdown = _FORMULA.sub(lambda found: latex2mathml.converter.convert(found[1], display="block"), markdown)
    return markdown.replace("\n- [ ] ", "\n- ☐ ")


def anchor(heading: str, separator: str = "-") -> str:
    """The anchor that GitHub gives to a heading: lower case, punctuation dropped, each space a hyphen."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def escaped(said) -> str:
    """Text that Markdown shows as it stands."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(str(said).split()), quote=False)).replace("|", "&#124;")


def ops() -> str:
    """The op table: what each op takes and gives, and where its clauses stand."""
    parts = [
        "# Ops",
        "Read from `spec/ops.yaml`, as the engine does. B responses, T response positions, L full-sequence positions, "
        "V vocabulary, S steps. Inputs are positional and in this order; parameters and axes are keywords.",
    ]
    for op, spec in table()["ops"].items():
        labels = [f"[{label}](../spec/{op}.md#{anchor(_heading(label))})" for label in clauses() if clauses()[label]["op"] == op]
        parts += [
            f"## {escaped(op)}",
            f"{escaped(spec['title'])}. Chapter: [{op}](../spec/{op}.md). Clauses: {', '.join(labels)}.",
            "| | name | shape or values |\n| --- | --- | --- |\n" + "\n".join(f"| {' | '.join(row)} |" for row in _rows(spec)),
        ]
    return "\n\n".join(parts) + "\n"


def _heading(label: str) -> str:
    return f"{label} · {clauses()[label]['level']} · {clauses()[label]['sentence']}"


def _rows(spec: dict) -> list[tuple[str, str, str]]:
    """One row per input, parameter, axis and output of an op."""
    rows = [("input", f"`{name}`", _shape(about)) for name, about in spec["inputs"].items()]
    for name, about in spec["params"].items():
        needed = [f"{axis} {', '.join(map(str, values))}" for axis, values in about.get("needed_by", {}).items()]
        facts = [_shape(about) if "shape" in about else "number", *(["may be none"] if about.get("optional") else [])]
        rows.append(("parameter", f"`{name}`", escaped("; ".join([*facts, *(f"needed by {one}" for one in needed)]))))
    for alias, names in spec.get("alias", {}).items():
        rows.append(("parameter", f"`{alias}`", f"in place of {', '.join(f'`{name}`' for name in names)}, where they are equal"))
    for axis in axes_of(spec):
        rows.append(("axis", f"[{axis}](variants.md#{axis})", ", ".join(f"`{value}`" for value in table()["axes"][axis])))
    for name, about in spec["outputs"].items():
        gradients = [f"`{name}`" for name in about.get("gradients", [])]
        rows.append(("output", f"`{name}`", _shape(about) + (f"; gradients by {', '.join(gradients)}" if gradients else "")))
    return rows


def _shape(about: dict) -> str:
    kind = f", {about['kind']}" if "kind" in about else ""
    return escaped(f"[{', '.join(map(str, about['shape']))}]{kind}" if about["shape"] else f"scalar{kind}")


def deviations() -> str:
    """The catalogue of deviations, op by op."""
    catalogue = read_yaml("deviations.yaml")
    known = catalogue["deviations"]
    parts = [
        "# Known mistakes",
        f"{len(known)} deviations, from `spec/deviations.yaml`. Each is a function in `reference/deviations/` with its op's "
        "signature; when a trainer gives its numbers, `goldenppo check` names it. What a trainer means and documents is a "
        "[variant](variants.md) and stands elsewhere. The status of a report (fixed, open, disputed) is as of the day it was "
        "read. Where no public report is listed, the mistake is a neighbour of one that was reported.",
        ", ".join(f"[{op}](#{op})" for op in table()["ops"]),
    ]
    for op in table()["ops"]:
        mine = {name: entry for name, entry in known.items() if entry["op"] == op}
        parts += [f"## {escaped(op)}", f"{len(mine)} deviations of [{op}](../spec/{op}.md)."]
        parts += [_deviation(name, entry) for name, entry in mine.items()]
    parts += ["## Precision", "Found for any op: the result is what a narrower dtype gives."]
    parts += [_deviation(name, entry) for name, entry in catalogue["precision"].items()]
    parts += [
        "## Beyond the ops",
        "Public reports that no op can express, with what has to catch them.",
        "| report | caught by | why no op |\n| --- | --- | --- |\n"
        + "\n".join(
            f"| {_linked(entry['id'], entry.get('links', []))} | {escaped(entry['tier'])} | {escaped(entry['reason'])} |"
            for entry in catalogue["not_op_expressible"]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _deviation(name: str, entry: dict) -> str:
    facts = [f"**{escaped(entry['title'].rstrip('.'))}.**" + (f" Level {entry['level']}." if "level" in entry else "")]
    facts += ["\n".join(f"- {key}: {escaped(entry[key])}" for key in ("computed", "should", "effect", "fix") if key in entry)]
    if "seen" in entry:
        facts.append(f"Seen in {escaped('; '.join(map(str, entry['seen'])))}.")
    return "\n\n".join([f"### {name}", *facts, *_links(entry.get("links", []))])


def _links(addresses: list[str]) -> list[str]:
    """A line of links; none where there are none."""
    return ["Links: " + ", ".join(f"[{escaped(_short(address))}]({address})" for address in addresses) + "."] if addresses else []


def _linked(name: str, links: list[str]) -> str:
    return escaped(name) if not links else f"[{escaped(name)}]({links[0]})"


def _short(link: str) -> str:
    """A link's text: owner and name of a repository with the number, or the address without its scheme."""
    found = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)/(pull|issues|commit|blob)/([^/#]+).*", link)
    if not found:
        return link.split("://", 1)[1]
    return f"{found[1]} {found[3][:7]}" if found[2] in ("commit", "blob") else f"{found[1]}#{found[3]}"


def variants() -> str:
    """The variant axes: the question, each value, who has it and by which setting."""
    about = read_yaml("variants.yaml")
    used: dict[str, list[str]] = {}
    for op, spec in table()["ops"].items():
        for axis in axes_of(spec):
            used.setdefault(axis, []).append(f"[{op}](../spec/{op}.md)")
    parts = [
        "# Variants",
        "Where trainers differ on purpose, from `spec/variants.yaml`. `goldenppo identify ADAPTER` says which ones a trainer "
        "has; none of them is a mistake.",
        ", ".join(f"[{axis}](#{axis})" for axis in about["axes"]),
    ]
    for axis, entry in about["axes"].items():
        parts += [f"## {axis}", f"{escaped(entry['question'])} An axis of {', '.join(used[axis])}."]
        for value, one in entry["values"].items():
            who = [escaped(f"{t['trainer']} ({t['setting']})" if t.get("setting") else t["trainer"]) for t in one["trainers"]]
            lines = [f"**`{value}`**: {escaped(one['meaning'])}"]
            lines += [f"Trainers: {'; '.join(who)}."] if who else []
            parts.append("\n".join([*lines, *_links(one["links"])]))
    parts += ["## Reports that were no mistake", "Each was reported as one, and is right."]
    parts += [f"- [{escaped(entry['claim'])}]({entry['url']}) {escaped(entry['why'])}" for entry in about["false_alarms"]]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """Every command with what `--help` says."""
    os.environ["COLUMNS"] = "80"
    top = cli.parser()
    found = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Commands", "What `goldenppo COMMAND --help` prints.", _block(top.format_help())]
    parts += [f"## goldenppo {name}\n\n{_block(command.format_help())}" for name, command in found.choices.items()]
    return "\n\n".join(parts) + "\n"


def _block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def schemas() -> str:
    """The JSON schemas in full, with the files that they are read from, and the names in a dump."""
    from goldenppo.conformance.commands import audit

    parts = [
        "# Schemas",
        "The files that goldenppo reads and writes. Numbers are float64 in shortest round-trip form; those that are not "
        'finite are the strings "nan", "inf" and "-inf".',
    ]
    for path in sorted(path for pattern in SCHEMAS for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        parts += [f"## {escaped(json.loads(text)['title'])}", f"[{name}](../{name})", _block(text, "json")]
    parts += [
        "## Dump of a training step",
        "What `goldenppo audit` reads: a safetensors file, or one per rank.",
        _block(audit.EPILOG.split("\n\nexit codes:")[0]),
    ]
    return "\n\n".join(parts) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "docs/ops.md": ops,
    "docs/deviations.md": deviations,
    "docs/variants.md": variants,
    "docs/commands.md": commands,
    "docs/schemas.md": schemas,
}
