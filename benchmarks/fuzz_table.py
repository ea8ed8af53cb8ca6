"""How soon fuzzing finds each known deviation, and how small it makes the input.

    python benchmarks/fuzz_table.py [--seconds 20] [--op OP]… [--id ID]…

Every function of goldenppo.reference.deviations poses as a trainer, in a convention in which it acts, and is fuzzed with
seed 0 until it is found or the time is over. Goals: found within 60 s, and nine out of ten shrunk to at most 2 rows of 3.
"""

import argparse
import time

from tabulate import tabulate

from goldenppo.conformance import search
from goldenppo.conformance.cases import table
from goldenppo.conformance.commands.doctor import conventions, trainer
from goldenppo.conformance.result import Check, run_check
from goldenppo.reference.deviations import deviations

ROWS, POSITIONS = 2, 3


def caught(op: str, function) -> tuple[object, Check]:
    """The deviation as a trainer, in the first convention in which the fixtures catch it, and that check."""
    for axes in conventions(op):
        session = trainer(op, function, axes)
        check = run_check(session, [op], "robust", ("float64", "float32"), "cpu")
        if check.ops[0].failed:
            break
    return session, check


def fuzzed(op: str, function, seconds: float) -> tuple[search.Target, search.Outcome, float]:
    """The search of one deviation, and the seconds until its first failing input."""
    session, check = caught(op, function)
    target, outcome, first = search.targets(session, check)[0], search.Outcome(op), []
    start = time.monotonic()

    def watch(_) -> None:
        if outcome.failure and not first:
            first.append(time.monotonic() - start)

    search.search_op(target, "robust", 0, seconds, outcome, watch)
    return target, outcome, first[0] if first else outcome.seconds


def shape(outcome: search.Outcome) -> tuple[int, int]:
    """Rows and positions of the shrunk input."""
    sizes = [search.shape(nested) for nested in outcome.failure.given.inputs.values()]
    return max(rows for rows, _ in sizes), max(positions for _, positions in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each deviation (default 20)")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--id", action="append", default=[])
    args = parser.parse_args()
    rows, found, small, named = [], 0, 0, 0
    for op in args.op or table()["ops"]:
        for identifier, function in deviations(op).items():
            if args.id and identifier not in args.id:
                continue
            target, outcome, seconds = fuzzed(op, function, args.seconds)
            row = [identifier, "no", "", "", outcome.cases, ""]
            if outcome.failure:
                size = shape(outcome)
                names = [item.id for item in search.explain(target, outcome.failure, outcome.first).matches if item.exact]
                found, small, named = found + 1, small + (size[0] <= ROWS and size[1] <= POSITIONS), named + (identifier in names)
                row = [identifier, outcome.levels[-1], f"{seconds:.1f}", "{} × {}".format(*size), outcome.cases]
                row.append("yes" if identifier in names else ", ".join(names) or "no")
            rows.append(row)
            print(*row, sep="\t", flush=True)
    print()
    print(tabulate(rows, headers=["deviation", "found at", "s", "rows × positions", "cases", "named"], tablefmt="github"))
    print(
        f"\n{len(rows)} deviations: {found} found within {args.seconds:g} s, {small} of them in at most {ROWS} × {POSITIONS}, ",
        end="",
    )
    print(f"{named} named")


if __name__ == "__main__":
    main()
