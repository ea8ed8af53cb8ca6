"""`goldenppo doctor`: the suite checked against itself.

Every deviation must be caught by a case and named; correct implementations written differently must pass.
"""

from dataclasses import dataclass


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the suite itself",
        description="Plants every known deviation and sees it caught and named; runs correct implementations written "
        "differently and sees them pass. Exit 1 if one deviation goes uncaught or one correct implementation fails.",
    )
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this op (may be repeated)")
    parser.add_argument("--verbose", action="store_true", help="one row per deviation: the cases that catch it")
    parser.set_defaults(main=main)


@dataclass(frozen=True)
class Diagnosis:
    """How the suite fares against one deviation."""

    op: str
    id: str
    level: str  # level at which it is expected to act
    caught_by: tuple[str, ...]  # cases of that level or below, at float32 (float64 where it acts below float32's sight)
    first: str  # the deviation named first
    among: bool  # whether it is among those named

    @property
    def caught(self) -> bool:
        """Whether a case fails under the deviation."""
        return bool(self.caught_by)

    @property
    def named(self) -> bool:
        """Whether its own name is the first one given."""
        return self.first == self.id


def main(args) -> int:
    from tabulate import tabulate

    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance.cases import table
    from goldenppo.conformance.render.terminal import wrap

    for op in args.op:
        if op not in table()["ops"]:
            raise UsageError(f"there is no op {op!r}; `goldenppo list ops` shows them")
    ops = args.op or list(table()["ops"])
    found = [diagnosis for op in ops for diagnosis in diagnose(op)]
    rows = []
    for op in ops:
        mine = [diagnosis for diagnosis in found if diagnosis.op == op]
        rows.append([op, len(mine), sum(d.caught for d in mine), sum(d.named for d in mine)])
    caught, named = sum(d.caught for d in found), sum(d.named for d in found)
    rows.append(["all", len(found), caught, named])
    print(tabulate(rows, headers=["op", "deviations", "caught", "named first"]))
    if args.verbose:
        for d in found:
            print(wrap(f"{d.id}: {', '.join(d.caught_by) or 'not caught'}"))
    for d in found:
        if not d.caught:
            print(wrap(f"not caught: {d.id} (level {d.level})"))
        elif not d.named:
            why = ", which gives the same numbers here" if d.among else ""
            print(wrap(f"not named first: {d.id}; named {d.first or 'nothing'}{why}"))
    if not args.op:
        print(wrap(reports(), ""))
    wrong = correct(ops)
    for line in wrong:
        print(wrap(f"a correct implementation fails: {line}"))
    print(f"caught {caught}/{len(found)}, named first {named}/{len(found)}, correct implementations failing: {len(wrong)}")
    return 1 if caught < len(found) or named < 0.95 * len(found) or wrong else 0


def reports() -> str:
    """Counts of public reports by what became of them: signatures, variants, precision, or the tier that has to catch them."""
    from goldenppo.conformance.cases import read_yaml

    catalogue = read_yaml("deviations.yaml")
    covered = {bug for entry in catalogue["deviations"].values() for bug in entry.get("bugs") or []}
    signatures = sum(bool(entry.get("bugs")) for entry in catalogue["deviations"].values())
    textbook = len(catalogue["deviations"]) - signatures
    variants = {bug for entry in catalogue["links_of_variants"] for bug in entry.get("bugs") or []}
    precision = {bug for entry in catalogue["precision"].values() for bug in entry.get("bugs") or []}
    tiers: dict[str, int] = {}
    for entry in catalogue["not_op_expressible"]:
        tiers[entry["tier"]] = tiers.get(entry["tier"], 0) + 1
    rest = ", ".join(f"{count} {tier}" for tier, count in tiers.items())
    total = len(covered) + len(variants) + len(precision) + sum(tiers.values())
    return (
        f"{total} public reports: {len(covered)} in {signatures} signatures, {len(variants)} are documented variants, "
        f"{len(precision)} are precision, {sum(tiers.values())} no op can express ({rest}); {textbook} textbook signatures more"
    )


def diagnose(op: str) -> list[Diagnosis]:
    """Plants every deviation of an op in a trainer and runs a check on it."""
    from goldenppo.conformance.cases import LEVELS, load, read_yaml
    from goldenppo.conformance.naming import Evaluator
    from goldenppo.reference.deviations import deviations

    catalogue = read_yaml("deviations.yaml")["deviations"]
    cases, evaluator = load(op), Evaluator(op)
    found = []
    for identifier, function in deviations(op).items():
        level = catalogue[identifier]["level"]
        mine = [case for case in cases if LEVELS.index(case.level) <= LEVELS.index(level)]
        for axes in conventions(op):
            diagnosis = examine(identifier, function, mine, level, axes, evaluator)
            if diagnosis.caught:
                break
        found.append(diagnosis)
    return found


def conventions(op: str):
    """Variants that a trainer with the deviation may have: the default of every axis, then one other value at a time.

    A mistake in one branch (the constant length, k3) shows only in a trainer that takes this branch.
    """
    from goldenppo.adapters.binding import axes_of
    from goldenppo.conformance.cases import table

    yield {}
    spec = table()["ops"][op]
    for axis in axes_of(spec):
        under = {other: values[0] for other, values in spec.get("acts_under", {}).get(axis, {}).items()}
        for value in table()["axes"][axis][1:]:
            if value in table()["unmasked"].get(axis, []):
                continue  # reads no mask: right or wrong, it would fail every masked case
            yield {axis: value, **under}


def examine(identifier: str, function, cases: list, level: str, axes: dict, evaluator) -> Diagnosis:
    """Checks one planted deviation and says what caught it and what it was called."""
    from goldenppo.conformance.judge import judge
    from goldenppo.conformance.naming import name

    op = evaluator.op
    attempts = planted(op, function, cases, axes)
    report = judge(op, attempts, level)
    named = name(report, attempts, evaluator) if report.failed else []
    caught = tuple(dict.fromkeys(v.case.id for v in report.failed if v.dtype == "float32" or level != "must"))
    ids = [item.id for item in named if item.exact]
    return Diagnosis(op, identifier, level, caught, ids[0] if ids else "", identifier in ids)


def planted(op: str, function, cases: list, axes: dict | None = None, dtypes: tuple = ("float64", "float32")) -> list:
    """All attempts of a function posing as a trainer that has one fixed convention and takes no axis.

    Args:
        op: name of the op.
        function: with the op's signature.
        cases: cases to run.
        axes: the convention, where it is not the default of every axis.
        dtypes: dtypes to run in.
    """
    from goldenppo.conformance.run import attempts

    session = trainer(op, function, axes)
    return list(attempts(session, op, session.hello()["ops"][op], cases, dtypes, "cpu"))


def trainer(op: str, function, axes: dict | None = None):
    """An adapter with one op, whose function has one fixed convention and takes no axis."""
    import types

    from goldenppo.adapters.binding import axes_of
    from goldenppo.adapters.session import Session
    from goldenppo.conformance.cases import table

    spec = table()["ops"][op]
    module = types.ModuleType("planted")
    setattr(module, op, without_axes(function, axes_of(spec), axes or {}))
    return Session(module, {"ops": {op: spec}, "axes": table()["axes"]})


def without_axes(function, axes: list[str], fixed: dict):
    """The function with its variant axes taken out of the signature: some fixed, the others at their defaults."""
    import functools
    import inspect

    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in axes]

    @functools.wraps(function)
    def plain(*args, **kwargs):
        return function(*args, **kwargs, **fixed)

    plain.__module__ = "planted"
    plain.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return plain


def correct(ops: list[str]) -> list[str]:
    """Runs correct implementations written differently; every failure is a line."""
    from goldenppo.conformance.correct import IMPLEMENTATIONS

    lines = []
    for label, op, function in IMPLEMENTATIONS:
        if op in ops:
            from goldenppo.conformance.cases import load
            from goldenppo.conformance.judge import judge

            report = judge(op, planted(op, function, [case for case in load(op) if case.level == "must"]), "must")
            if report.verdict != "conforms":
                lines.append(f"{op}, {label}: {report.failed[0].case.id if report.failed else report.verdict}")
    return lines
