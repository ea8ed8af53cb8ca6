"""`goldenppo check ADAPTER`: is this trainer's arithmetic right?"""

import argparse
import json
import shlex

EPILOG = """exit codes:
  0  conforms
  1  a deciding case fails
  2  usage: unknown adapter, op or flag; missing file; device absent; output not writable
  3  baseline out of date, or fixture drift
  4  no verdict possible: the adapter does not load, its process died or hung, or nothing was compared

examples:
  goldenppo check my_trainer.py
  goldenppo check verl --op gae --dtype float32
  goldenppo check trl-ppo --python ENV/bin/python --json result.json
  goldenppo check "cmd: node harness.js"
"""

NEXT = """usage: goldenppo check ADAPTER

ADAPTER is what is to be checked:
  a Python file with functions named after ops   goldenppo init my_trainer.py   writes one
  a built-in adapter                             goldenppo list adapters        shows them
  a dotted module, or a program                  goldenppo check "cmd: node harness.js"

Try `goldenppo check reference`, or `goldenppo check --help` for all flags."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "check",
        help="check a trainer's arithmetic",
        description="Runs a trainer's own code on golden inputs and compares with exact answers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("adapter", nargs="?", metavar="ADAPTER", help='built-in name, Python file, dotted module, or "cmd: …"')
    add_selection(parser)
    parser.add_argument(
        "--level", choices=("must", "should", "robust"), default="must", help="cases up to this level decide the exit code"
    )
    parser.add_argument("--fixtures", metavar="DIR", help="a folder of fixture files instead of the suite's own")
    parser.add_argument(
        "--invariances",
        action="store_true",
        help="also check properties that need no expected value: masks, padding, row order, micro-batches, ranks",
    )
    parser.add_argument("--json", metavar="F", help="write the result as JSON")
    parser.add_argument("--junit", metavar="F", help="write the result as JUnit XML")
    parser.add_argument("--markdown", metavar="F", help="write the result as Markdown, for a job summary")
    parser.add_argument("--baseline", metavar="F", help="hold the result against a file of known departures")
    parser.add_argument("--update-baseline", action="store_true", help="tighten the baseline to what is found")
    parser.add_argument("--allow-new", action="store_true", help="with --update-baseline: also add new departures")
    parser.set_defaults(main=main)


def add_selection(parser) -> None:
    """Flags that choose what is run, shared by the commands that call an adapter."""
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this op (may be repeated)")
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        choices=("float64", "float32", "bfloat16", "float16"),
        help="only this dtype (may be repeated; default float64, float32, bfloat16)",
    )
    parser.add_argument("--device", default="cpu", help="where the tensors live (default cpu)")
    parser.add_argument("--python", metavar="EXE", help="run the adapter in another environment's interpreter")
    parser.add_argument("--source", metavar="DIR", help="a trainer's checkout, for adapters that need one")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds per answer of another process (default 60)"
    )


def open_selected(args):
    """Checks the selection flags and opens the adapter."""
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance.cases import table
    from goldenppo.conformance.targets import check_device, open_adapter

    for op in args.op:
        if op not in table()["ops"]:
            raise UsageError(f"there is no op {op!r}; `goldenppo list ops` shows them: {', '.join(table()['ops'])}")
    if not 0 < args.timeout < 1e6:
        raise UsageError(f"--timeout is {args.timeout:g}; expected seconds above 0 and below a million")
    check_device(args.device)
    return open_adapter(args.adapter, args.python, args.source, args.timeout)


def main(args) -> int:
    import gc
    from pathlib import Path

    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import baseline
    from goldenppo.conformance.render import terminal
    from goldenppo.conformance.result import run_check
    from goldenppo.conformance.run import DTYPES

    if args.adapter is None:
        print(NEXT)
        return 2
    directory = Path(args.fixtures) if args.fixtures else None
    if directory is not None and not directory.is_dir():
        raise UsageError(f"--fixtures names no folder: {args.fixtures!r}")
    _check_outputs(args)
    known = baseline.read(args.baseline) if args.baseline and not args.update_baseline else None
    session = open_selected(args)
    gc.freeze()  # what torch and the trainer brought stays: walking it again and again takes a fifth of the time
    try:
        check = run_check(session, args.op, args.level, tuple(args.dtype) or DTYPES, args.device, directory, terminal.Progress())
        if args.invariances:
            check.invariances = _invariances(args, session, check)
    finally:
        session.close()
    lines, expected = [], set()
    if known is not None and check.exit_code in (0, 1):
        comparison = baseline.compare(check, known, args.op)
        check.exit_code, expected = comparison.exit_code, comparison.known
        lines = [*comparison.failures, *(f"out of date: {line}" for line in comparison.outdated), *comparison.shown]
    elif args.update_baseline and check.exit_code in (0, 1):
        lines = baseline.update(args.baseline, check, args.op, args.allow_new)
        check.exit_code, expected = (1, set()) if lines else (0, {v.case.id for r in check.ops for v in r.failed})
    if check.exit_code in (0, 3) and args.invariances and _broken(check):
        check.exit_code = 1
    _write(args, check, lines)
    print(terminal.show(check, shlex.join(["goldenppo", "check", args.adapter]), expected, lines))
    return check.exit_code


def _invariances(args, session, check) -> list:
    """The invariance tier, with the adapter in processes of its own where ranks are asked for."""
    from goldenppo.conformance import invariances
    from goldenppo.conformance.ranks import Ranks
    from goldenppo.conformance.render import terminal

    ranks = None if args.adapter.startswith("cmd:") else Ranks(args.adapter, args.python, args.source, args.timeout)
    try:
        return invariances.check(session, check, ranks, terminal.Progress("invariances of op"))
    finally:
        if ranks is not None:
            ranks.close()


def _broken(check) -> bool:
    """Whether an invariance fails at a level that decides."""
    from goldenppo.conformance import invariances

    return bool(invariances.failing(check.invariances, check.level))


def _check_outputs(args) -> None:
    """Refuses flags that contradict each other and files that cannot be written, before anything runs."""
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import files

    if args.update_baseline and not args.baseline:
        raise UsageError("--update-baseline needs --baseline F, the file to update")
    if args.allow_new and not args.update_baseline:
        raise UsageError("--allow-new does nothing without --update-baseline")
    for path in (args.json, args.junit, args.markdown, args.baseline if args.update_baseline else None):
        if path:
            files.check_writable(path)


def _write(args, check, lines: list[str]) -> None:
    """Writes the files that were asked for."""
    from goldenppo.conformance import files
    from goldenppo.conformance.render import junit, markdown
    from goldenppo.conformance.result import document

    if args.json:
        files.write(args.json, json.dumps(document(check), indent=1) + "\n")
    if args.junit:
        files.write(args.junit, junit.text(check))
    if args.markdown:
        files.write(args.markdown, markdown.text(check, lines))
