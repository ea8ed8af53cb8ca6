"""`goldenppo fixtures write|verify`: regenerate the golden numbers, or prove that they are what the oracle gives."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "fixtures",
        help="write or verify the golden fixtures",
        description="verify: regenerates every file from its recipe and the exact oracle and compares byte by byte (exit 3 on "
        "a difference); with --device, checks the reference ops there against the exact answers instead.",
    )
    parser.add_argument("what", choices=("write", "verify"))
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this op (may be repeated)")
    parser.add_argument("--device", metavar="D", help="verify the reference ops on this device (cpu, cuda)")
    parser.set_defaults(main=main)


def main(args) -> int:
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance.cases import table

    ops = args.op or list(table()["ops"])
    for op in ops:
        if op not in table()["ops"]:
            raise UsageError(f"there is no op {op!r}; `goldenppo list ops` shows them")
    if args.device:
        if args.what == "write":
            raise UsageError("fixtures are exact and need no device; drop --device, or use `fixtures verify --device`")
        return on_device(args)
    return write(ops) if args.what == "write" else verify(ops)


def built(ops: list[str]) -> dict[str, str]:
    """The text of every fixture file, worked out on all cores."""
    import concurrent.futures
    import multiprocessing
    import os

    from goldenppo.fixtures.generate import build_file

    workers = min(len(ops), os.cpu_count() or 1)
    if workers == 1:
        return {op: build_file(op) for op in ops}
    # spawn: a fork of a process with torch's threads may hang
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return dict(zip(ops, pool.map(build_file, ops), strict=True))


def write(ops: list[str]) -> int:
    """Writes fixtures/ops/<op>.json after linting what would be written."""
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import files
    from goldenppo.conformance.cases import folder
    from goldenppo.fixtures.lint import lint

    texts = built(ops)
    problems = lint(texts)
    if problems:
        raise UsageError("nothing was written; " + "; ".join(problems[:5]))
    for op, text in texts.items():
        path = folder("fixtures") / "ops" / f"{op}.json"
        changed = not path.is_file() or path.read_text(encoding="utf-8") != text
        if changed:
            files.write(path, text)
        print(f"{op}.json {'written' if changed else 'unchanged'}")
    return 0


def verify(ops: list[str]) -> int:
    """Compares every fixture file with what the oracle gives now."""
    from goldenppo.conformance.cases import folder
    from goldenppo.fixtures.lint import lint

    texts, drifted = built(ops), []
    for op, text in texts.items():
        path = folder("fixtures") / "ops" / f"{op}.json"
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
        if there != text:
            drifted.append(op)
            line = _first_difference(there, text)
            print(f"{op}.json differs from its recipe, first at line {line}; `goldenppo fixtures write --op {op}`")
    problems = lint(texts)
    for problem in problems:
        print(problem)
    if not drifted and not problems:
        cases = sum(text.count('\n   "id": ') for text in texts.values())
        print(f"{len(texts)} files, {cases} cases: byte-identical on regeneration")
    return 3 if drifted or problems else 0


def _first_difference(there: str, text: str) -> int:
    pairs = zip(there.split("\n"), text.split("\n"), strict=False)
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 1)


def on_device(args) -> int:
    """Checks the reference ops on a device against the exact answers and prints how much of the tolerance they use."""
    from tabulate import tabulate

    from goldenppo.conformance.render.terminal import Progress
    from goldenppo.conformance.result import run_check
    from goldenppo.conformance.run import DTYPES
    from goldenppo.conformance.targets import check_device, open_adapter

    check_device(args.device)
    check = run_check(open_adapter("reference"), args.op, "robust", DTYPES, args.device, progress=Progress())
    rows = []
    for report in check.ops:
        worst = {dtype: [v.use for v in report.cases if v.dtype == dtype and v.verdict == "pass"] for dtype in DTYPES}
        rows.append([report.op, report.verdict, *(f"{max(uses):.3f}" if uses else "" for uses in worst.values())])
    print(f"Worst share of the tolerance used on {args.device} (1 is the limit)")
    print(tabulate(rows, headers=["op", "verdict", *DTYPES], disable_numparse=True))
    return check.exit_code
