"""`goldenppo explain ID`: a clause, case, variant or deviation, in full."""

import json
import textwrap


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="explain a clause, case, variant or deviation",
        description="ID is a clause (GAE-2), a case (gae/holes), an axis or its value (gaps, gaps=skip), a deviation "
        "(gae-pad-bootstrap) or an op (gae).",
    )
    parser.add_argument("id", metavar="ID")
    parser.set_defaults(main=main)


def main(args) -> int:
    from goldenppo.adapters.interface import UsageError

    for explain in (clause, case, deviation, variant, op):
        text = explain(args.id)
        if text:
            print(text)
            return 0
    close = _close(args.id)
    hint = f"; close to it: {', '.join(close)}" if close else "; `goldenppo list cases` and `list deviations` show what there is"
    raise UsageError(f"there is nothing called {args.id!r}{hint}")


def clause(name: str) -> str | None:
    """A clause with its text and the cases that are examples of it."""
    from goldenppo.conformance.cases import clauses, load, table
    from goldenppo.conformance.render.terminal import wrap

    found = clauses().get(name.upper())
    if not found:
        return None
    cases = [item.id for item in load(found["op"]) if name.upper() in item.clauses]
    checked = {"invariances": "goldenppo check ADAPTER --invariances", "run": "goldenppo run --verify"}
    by = f"cases: {', '.join(cases)}" if found["op"] in table()["ops"] else f"checked by: {checked[found['op']]}"
    parts = [f"{name.upper()} ({found['op']}, {found['level']})", wrap(found["sentence"]), textwrap.indent(found["text"], "  ")]
    return "\n\n".join([*parts, wrap(by)])


def case(name: str) -> str | None:
    """A case: purpose, clauses, inputs, every right answer with the variants that lead to it, and a snippet."""
    from goldenppo.conformance.cases import clauses, load, table
    from goldenppo.conformance.render.terminal import snippet, wrap

    if "/" not in name or name.split("/")[0] not in table()["ops"]:
        return None
    found = next((item for item in load(name.split("/")[0]) if item.id == name), None)
    if found is None:
        return None
    lines = [f"{found.id} ({found.level})", wrap(found.purpose)]
    for label in found.clauses:
        if label in clauses():
            lines.append(wrap(f"{label}: {clauses()[label]['sentence']}"))
    lines += ["", "  params: " + json.dumps({key: value for key, value in found.params.items() if value is not None})]
    for output, entries in found.answers.items():
        lines += ["", f"  {output}"]
        for entry in entries:
            when = "; ".join(f"{axis}: {', '.join(map(str, values))}" for axis, values in entry.when.items()) or "always"
            lines.append(wrap(f"{when}", "    "))
            lines.append(textwrap.fill(f"= {_numbers(entry.block)}", 80, initial_indent="      ", subsequent_indent="        "))
    return "\n".join([*lines, "", "  Snippet:", textwrap.indent(snippet(found), "    ")])


def _numbers(block) -> str:
    shown = ["–" if number is None else f"{number:.9g}" for number in block.want]
    width = block.shape[-1] if block.shape else 1
    rows = [" ".join(shown[start : start + width]) for start in range(0, len(shown), width)]
    return " | ".join(rows)


def deviation(name: str) -> str | None:
    """A deviation: what it computes, what it should, where it was seen, and the case that shows it."""
    from goldenppo.conformance.cases import load, read_yaml
    from goldenppo.conformance.render.terminal import snippet, wrap

    catalogue = read_yaml("deviations.yaml")
    entry = catalogue["deviations"].get(name)
    if entry is None:
        return _precision(name, catalogue)
    lines = [f"{name} (deviation of {entry['op']}, level {entry['level']})", wrap(entry["title"])]
    for key in ("computed", "should", "effect", "fix"):
        if entry.get(key):
            lines += ["", wrap(f"{key}: {entry[key]}")]
    if entry.get("seen"):
        lines += ["", "  seen in"] + [
            wrap(str(item if isinstance(item, str) else "; ".join(map(str, item.values()))), "    ") for item in entry["seen"]
        ]
    lines += [f"    {link}" for link in entry.get("links", [])]
    cases = load(entry["op"])
    if cases:
        shown = snippet(cases[0]).split("\n")
        lines += ["", "  What it gives instead:", textwrap.indent(_instead(shown, name, entry["op"]), "    ")]
    return "\n".join(lines)


def _instead(shown: list[str], name: str, op: str) -> str:
    """The snippet of a case, ending with the deviation's number beside the right one."""
    text = "\n".join(shown[:-1])
    call = text[text.index(f"print({op}(") + len("print(") : -1]
    wrong = call.replace(f"{op}(", f"deviations({op!r})[{name!r}](", 1)
    head = text[: text.index(f"print({op}(")]
    return f"{head}from goldenppo.reference.deviations import deviations\nprint({call})  # right\nprint({wrong})  # the deviation"


def _precision(name: str, catalogue: dict) -> str | None:
    from goldenppo.conformance.render.terminal import wrap

    entries = catalogue.get("precision", {})
    entry = entries.get(name) if isinstance(entries, dict) else None
    if entry is None:
        return None
    lines = [name, *(wrap(f"{key}: {value}") for key, value in entry.items() if isinstance(value, str))]
    return "\n".join([*lines, *(f"    {link}" for link in entry.get("links", []))])


def variant(name: str) -> str | None:
    """An axis with its values, or one value: meaning, and which trainers have it by which setting."""
    from goldenppo.conformance.cases import read_yaml
    from goldenppo.conformance.render.terminal import wrap

    axis, _, value = name.partition("=")
    about = read_yaml("variants.yaml")["axes"].get(axis)
    if about is None:
        return None
    values = {key: entry for key, entry in about["values"].items() if not value or str(key) == value}
    if not values:
        return None
    lines = [f"{axis} (variant axis)", wrap(about["question"])]
    for key, entry in values.items():
        lines += ["", f"  {key}", wrap(entry["meaning"], "    ")]
        for trainer in entry.get("trainers", []):
            setting = f": {trainer['setting']}" if trainer.get("setting") else ""
            lines.append(wrap(f"{trainer['trainer']}{setting}", "    - "))
        lines += [f"    {link}" for link in entry.get("links", [])]
    return "\n".join(lines)


def op(name: str) -> str | None:
    """An op: signature, axes, clauses."""
    from goldenppo.adapters.binding import axes_of
    from goldenppo.conformance.cases import clauses, load, table
    from goldenppo.conformance.render.terminal import wrap

    spec = table()["ops"].get(name)
    if spec is None:
        return None
    keywords = ", ".join([*spec["params"], *axes_of(spec)])
    lines = [f"{name}: {spec['title']}", wrap(f"{name}({', '.join(spec['inputs'])}{', *, ' + keywords if keywords else ''})")]
    lines += [wrap(f"axis {axis}: {', '.join(map(str, table()['axes'][axis]))}") for axis in axes_of(spec)]
    lines += [
        "",
        *(wrap(f"{label} ({about['level']}): {about['sentence']}") for label, about in clauses().items() if about["op"] == name),
    ]
    return "\n".join([*lines, "", wrap("cases: " + ", ".join(item.id for item in load(name)))])


def _close(name: str) -> list[str]:
    import difflib

    from goldenppo.conformance.cases import clauses, load, read_yaml, table

    names = [*clauses(), *table()["ops"], *table()["axes"], *read_yaml("deviations.yaml")["deviations"]]
    names += [item.id for op in table()["ops"] for item in load(op)] if "/" in name else []
    return difflib.get_close_matches(name, names, 3, 0.6)
