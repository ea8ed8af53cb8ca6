"""`goldenppo fuzz ADAPTER`: random inputs against the exact oracle, shrunk to the smallest that fails."""

import argparse
import contextlib
import shlex

from goldenppo.conformance.commands.check import add_selection, open_selected

EPILOG = """exit codes:
  0    nothing was found
  1    an input was found on which the trainer is wrong
  2    usage: unknown adapter, op or flag; device absent; DIR not writable
  4    no verdict possible: the adapter does not load, its process died or hung, or nothing could be compared;
       hypothesis is not installed
  130  stopped by Ctrl-C before anything was found (1 if something was)

examples:
  goldenppo fuzz my_trainer.py
  goldenppo fuzz verl --op gae --seconds 300 --seed 7
  goldenppo fuzz my_trainer.py --save found && goldenppo check my_trainer.py --fixtures found
"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "fuzz",
        help="search random inputs for one that a trainer gets wrong",
        description="Draws shapes, masks, parameters and values at random, compares with exact answers under the variant "
        "that the trainer implements, and shrinks what fails. An op is searched until its share of the time is over or an "
        "input fails, ordinary values first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("adapter", metavar="ADAPTER", help='built-in name, Python file, dotted module, or "cmd: …"')
    add_selection(parser)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="time for all ops together (default 60)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed draws the same inputs (default 0)")
    parser.add_argument(
        "--level",
        choices=("must", "should", "robust"),
        default="robust",
        help="must: ordinary values only; should: of any size; robust (default): also NaN in masked slots and empty rows",
    )
    parser.add_argument("--save", metavar="DIR", help="write what is found as fixtures for `goldenppo check --fixtures DIR`")
    parser.set_defaults(main=main)


def main(args) -> int:
    import importlib.util
    import math

    from goldenppo.adapters.interface import AdapterError, UsageError
    from goldenppo.conformance.render import terminal
    from goldenppo.conformance.result import run_check
    from goldenppo.conformance.run import DTYPES

    if not (args.seconds > 0 and math.isfinite(args.seconds)):
        raise UsageError(f"--seconds is {args.seconds:g}; expected a number above 0")
    if importlib.util.find_spec("hypothesis") is None:
        raise AdapterError('fuzz needs hypothesis, which is not installed; `pip install "goldenppo[fuzz]"` brings it')
    if args.save:
        _prepare(args.save)
    session = open_selected(args)
    try:
        dtypes = tuple(args.dtype) or DTYPES
        try:
            check = run_check(session, args.op, "must", dtypes, args.device, progress=terminal.Progress())
        except KeyboardInterrupt:
            print("stopped before the search began")
            return 130
        return _fuzz(session, check, args)
    finally:
        session.close()


def _prepare(directory: str) -> None:
    """Makes the folder, and refuses one that cannot be written or holds other files of these names, before anything runs."""
    from pathlib import Path

    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import files
    from goldenppo.conformance.cases import load, table

    try:
        Path(directory).mkdir(exist_ok=True)
    except OSError as problem:
        raise UsageError(f"cannot make the folder {directory!r}: {problem.strerror}") from None
    for op in table()["ops"]:
        files.check_writable(Path(directory) / f"{op}.json")
        load(op, Path(directory))


def _fuzz(session, check, args) -> int:
    """Searches one op after the other, prints what was found, and says how it went."""
    import time

    from goldenppo.adapters.interface import AdapterError
    from goldenppo.conformance import search
    from goldenppo.conformance.render import terminal

    targets = search.targets(session, check)
    print(f"{terminal.head(check)}, seed {args.seed}", flush=True)
    for report in check.ops:
        if report.failed:
            print(terminal.wrap(f"{report.op} fails fixtures already, `goldenppo check` says where", ""))
    outcomes, interrupted, broken, progress = [], False, None, Progress()
    start = time.monotonic()
    try:
        with asked_to_stop() as progress.stop:
            for index, target in enumerate(targets):
                left = args.seconds - (time.monotonic() - start)
                outcomes.append(search.Outcome(target.op))
                search.search_op(target, args.level, args.seed, left / (len(targets) - index), outcomes[-1], progress)
    except KeyboardInterrupt:
        interrupted = True
    except AdapterError as problem:  # its process died or hung: what was found before that is shown all the same
        broken = problem
    progress.clear()
    _show(args, targets, outcomes)
    if broken:
        last = outcomes[-1].last
        print(terminal.wrap(f"the search of {outcomes[-1].op} ended at the input {last.key if last else ''}", ""))
        raise broken
    return _conclude(check, outcomes, interrupted)


def _show(args, targets: list, outcomes: list) -> None:
    """One screen for each failure, saved if that is wanted, and a table over the ops."""
    from pathlib import Path

    from tabulate import tabulate

    from goldenppo.conformance import search
    from goldenppo.conformance.render import terminal

    for target, outcome in zip(targets, outcomes, strict=False):
        if outcome.failure:
            report = search.explain(target, outcome.failure, outcome.first)
            if args.save:
                search.save(Path(args.save), target.op, outcome.failure.raw)
            print("\n" + terminal.screen(report, report.failed))
            print("\n" + _replay(args, target, outcome))
    rows = [[o.op, ", ".join(o.levels), o.cases, f"{o.cases / max(o.seconds, 1e-3):.0f}", _found(o)] for o in outcomes]
    if rows:
        print("\n" + tabulate(rows, headers=["op", "inputs", "cases", "per second", "found"], disable_numparse=True))


def _replay(args, target, outcome) -> str:
    """How to see the failure again."""
    from goldenppo.conformance import judge
    from goldenppo.conformance.render.terminal import wrap

    if not args.save:
        return "  Keep it: the same command with --save DIR writes it as a fixture"
    text = f"  Replay:\n    {shlex.join(['goldenppo', 'check', args.adapter, '--fixtures', args.save])}"
    if not judge.judge(target.op, outcome.failure.attempts, "must").failed:
        text += "\n" + wrap("only float64 shows it, and alone it reads as float32 accuracy: check calls that coarse, no failure")
    return text


def _conclude(check, outcomes: list, interrupted: bool) -> int:
    """The last line and the exit code."""
    from goldenppo.conformance.render.terminal import paint

    name, cases = check.hello["name"], sum(outcome.cases for outcome in outcomes)
    found = [f"{outcome.op} ({outcome.failure.level})" for outcome in outcomes if outcome.failure]
    stopped = "stopped; " if interrupted else ""
    if found:
        print(paint(f"{stopped}{name} is wrong on the inputs shown: {', '.join(found)}", "31"))
        return 1
    if interrupted:
        print(f"stopped; nothing was found in {cases} cases")
        return 130
    if not any(outcome.compared for outcome in outcomes):
        print(paint("no verdict: nothing could be compared", "33"))
        return 4
    print(paint(f"nothing was found in {cases} cases: {len(outcomes)} ops", "32"))
    return 0


def _found(outcome) -> str:
    return f"at level {outcome.failure.level}" if outcome.failure else "nothing"


@contextlib.contextmanager
def asked_to_stop():
    """Notes Ctrl-C instead of raising at once, which libraries may swallow where it hits them; the second one raises.

    Yields:
        A list that is no longer empty once Ctrl-C was pressed.
    """
    import signal

    pressed: list[int] = []

    def note(number, frame) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """Called after every case: a line that counts them, on a terminal only, and the place where Ctrl-C acts."""

    def __init__(self):
        import sys
        import time

        self.stream, self.clock = sys.stderr, time.monotonic
        self.shown, self.start, self.last, self.op = sys.stderr.isatty(), 0.0, 0.0, ""
        self.stop: list[int] = []

    def __call__(self, outcome) -> None:
        if self.stop:
            raise KeyboardInterrupt
        now = self.clock()
        if outcome.op != self.op:
            self.op, self.start = outcome.op, now
        if not self.shown or now - self.last < 0.2:
            return
        self.last = now
        doing = "shrinking" if outcome.failure else outcome.levels[-1]
        rate = outcome.cases / max(now - self.start, 1e-3)
        print(
            f"\r{outcome.op}: {doing}, {outcome.cases} cases, {rate:.0f} per second\033[K", end="", file=self.stream, flush=True
        )

    def clear(self) -> None:
        """Takes the line away."""
        if self.shown:
            print("\r\033[K", end="", file=self.stream, flush=True)
