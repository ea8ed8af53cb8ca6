"""`goldenppo list ops|cases|adapters|deviations|variants`: what there is."""

import json

KINDS = ("ops", "cases", "adapters", "deviations", "variants")


def add_parser(commands) -> None:
    parser = commands.add_parser("list", help="list ops, cases, adapters, deviations or variants")
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(main=main)


def main(args) -> int:
    rows = {"ops": ops, "cases": cases, "adapters": adapters, "deviations": deviations, "variants": variants}[args.what]()
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"there are no {args.what}")
        return 0
    from tabulate import tabulate

    widths = {"ops": [24, 52], "cases": [42, 8, 26], "adapters": [20, 56], "deviations": [38, 38], "variants": [18, 18, 38]}[
        args.what
    ]
    print(tabulate([list(row.values()) for row in rows], headers=list(rows[0]), maxcolwidths=widths, disable_numparse=True))
    return 0


def ops() -> list[dict]:
    """Every op with its title."""
    from goldenppo.conformance.cases import table

    return [{"op": op, "title": spec["title"]} for op, spec in table()["ops"].items()]


def cases() -> list[dict]:
    """Every case with its level and clauses."""
    from goldenppo.conformance.cases import load, table

    return [
        {"case": case.id, "level": case.level, "clauses": ", ".join(case.clauses)} for op in table()["ops"] for case in load(op)
    ]


def adapters() -> list[dict]:
    """The reference and the built-in adapters, read without importing them."""
    from goldenppo.adapters.loader import built_in

    own = {"adapter": "reference", "what": "The reference implementation of this project."}
    return [own, *({"adapter": name, "what": about} for name, (_, about) in built_in().items())]


def deviations() -> list[dict]:
    """Every deviation with its title."""
    from goldenppo.conformance.cases import read_yaml

    return [{"deviation": name, "title": entry["title"]} for name, entry in read_yaml("deviations.yaml")["deviations"].items()]


def variants() -> list[dict]:
    """Every value of every axis with its meaning."""
    from goldenppo.conformance.cases import read_yaml

    axes = read_yaml("variants.yaml")["axes"]
    return [
        {"axis": axis, "value": str(value), "meaning": entry["meaning"]}
        for axis, about in axes.items()
        for value, entry in about["values"].items()
    ]
