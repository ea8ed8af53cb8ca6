"""`goldenppo identify ADAPTER [ADAPTER]`: the conventions that a trainer implements, without any declaration."""

from goldenppo.conformance.commands.check import add_selection, open_selected


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "identify",
        help="show the conventions that a trainer implements",
        description="One adapter: its value on every variant axis. Two adapters: side by side, differences marked with *, "
        "and the settings that make the second behave as the first.",
    )
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER")
    add_selection(parser)
    parser.set_defaults(main=main)


def main(args) -> int:
    from tabulate import tabulate

    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance.render.terminal import Progress

    if len(args.adapters) > 2:
        raise UsageError(f"{len(args.adapters)} adapters are named; identify takes one or two")
    checks = []
    for word in args.adapters:
        args.adapter = word
        session = open_selected(args)
        try:
            checks.append(check_undeclared(session, args, Progress()))
        finally:
            session.close()
    names = [check.hello["name"] for check in checks]
    found = [conventions(check) for check in checks]
    rows, settings = [], []
    for op, axis in dict.fromkeys(key for one in found for key in one):
        values = [one.get((op, axis)) for one in found]
        known = [set(value) for value in values if value is not None]
        differ = len(known) == 2 and not known[0] & known[1]
        mark = ["*" if differ else ""] if len(values) == 2 else []
        rows.append([*mark, op, axis, *(", ".join(map(str, value)) if value else "–" for value in values)])
        if differ:
            settings += _settings(names[1], op, axis, values)
    if not rows:
        print("nothing was identified: no offered op has a variant axis that its numbers could tell")
    else:
        widths = [1, 16, 16, 19, 19] if len(names) == 2 else [24, 18, 32]
        headers = [*([""] if len(names) == 2 else []), "op", "axis", *names]
        print(tabulate(rows, headers=headers, maxcolwidths=widths, disable_numparse=True))
    for line in settings:
        print(line)
    broken = [(name, report.op) for name, check in zip(names, checks, strict=True) for report in check.ops if report.failed]
    for name, op in broken:
        print(f"note: {name}'s {op} conforms to no variant; what stands there is the nearest one. `goldenppo check` says more")
    return 4 if any(check.exit_code == 4 for check in checks) else 0


def check_undeclared(session, args, progress):
    """A check without declarations: what an adapter declares is what is to be found out here."""
    from goldenppo.conformance.result import run_check
    from goldenppo.conformance.run import DTYPES

    greet = session.hello

    def undeclared():
        hello = greet()
        for about in hello["ops"].values():
            about["variants"] = {}
        return hello

    session.hello = undeclared
    return run_check(session, args.op, "must", tuple(args.dtype) or DTYPES, args.device, progress=progress)


def conventions(check) -> dict:
    """(op, axis) → the values that are left, or that are all offered by keyword."""
    return {(report.op, axis): values for report in check.ops for axis, values in report.variant.items()}


def _settings(second: str, op: str, axis: str, values: list) -> list[str]:
    """What to set in the second trainer so that it behaves as the first, where the catalogue knows it."""
    from goldenppo.conformance.cases import read_yaml
    from goldenppo.conformance.render.terminal import wrap

    entries = read_yaml("variants.yaml")["axes"][axis]["values"]
    for value in values[0]:
        for trainer in entries[value].get("trainers", []):
            if trainer["trainer"].lower().split()[0] == second.lower() and trainer.get("setting"):
                return [wrap(f"to have {op}.{axis} = {value} in {second}: {trainer['setting']}", "")]
    return [wrap(f"no setting of {second} is known that gives {op}.{axis} = {' or '.join(map(str, values[0]))}", "")]
