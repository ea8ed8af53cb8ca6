"""`goldenppo COMMAND …`: reads the command line and hands over to one module of commands/.

Kept light: nothing here imports torch, and a command imports what it needs when it runs.
"""

import argparse
import importlib
import os
import sys

from goldenppo import __version__
from goldenppo.adapters.interface import AdapterError, UsageError

COMMANDS = ("check", "identify", "audit", "fuzz", "run", "fixtures", "report", "explain", "list", "init", "doctor")


class _Version(argparse.Action):
    """Prints the version and the digest of the fixtures, which is read only now."""

    def __call__(self, parser, namespace, values, option_string=None):
        from goldenppo.conformance.cases import digest

        print(f"goldenppo {__version__} (fixtures {digest()})")
        parser.exit(0)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="goldenppo",
        description="Checks a PPO trainer's own code against exact answers, and names the bug that a wrong number matches.",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and the fixtures' digest")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        try:
            module = importlib.import_module(f"goldenppo.conformance.commands.{name}")
        except ModuleNotFoundError as missing:
            if missing.name != f"goldenppo.conformance.commands.{name}":
                raise
            continue
        module.add_parser(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code (0, 1, 2, 3 or 4: see `goldenppo check --help`)."""
    try:
        arguments = parser()
        args = arguments.parse_args(argv)
        if args.command is None:
            arguments.print_help()
            return 2
        code = args.main(args)
        sys.stdout.flush()
        return code
    except UsageError as problem:
        return _complain(problem, 2)
    except AdapterError as problem:
        return _complain(problem, 4)
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.startswith("goldenppo"):
            raise
        package = {"yaml": "pyyaml"}.get(str(missing.name), missing.name)
        return _complain(f"{missing.name} is not installed; `pip install {package}` and run again", 4)
    except ImportError as broken:
        if broken.name and broken.name.startswith("goldenppo"):
            raise
        return _complain(f"an installed library does not load ({broken}); install it again, or run where it works", 4)
    except (MemoryError, RuntimeError) as problem:
        if not _out_of_memory(problem):
            raise
        said = str(problem).strip().split("\n")[0] or "no more can be had"
        return _complain(f"out of memory ({said}); free some, or take a smaller run or another --device", 4)
    except KeyboardInterrupt:
        return _complain("interrupted", 4)
    except BrokenPipeError:  # `goldenppo … | head` closed the pipe: no fault of ours, nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:  # a disk that is full, a library whose own libraries are missing
        return _complain(f"the system does not go along: {problem}", 4)


def _out_of_memory(problem: Exception) -> bool:
    """Whether memory ran out, here or on a device; torch says so by a class of its own or, on the CPU, by words only."""
    return isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or "allocate memory" in str(problem)


def _complain(problem, code: int) -> int:
    print(f"goldenppo: {problem}", file=sys.stderr)
    return code
