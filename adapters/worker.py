"""Runs a Python adapter inside another interpreter and answers JSON lines on stdin and stdout.

Started by path (`EXE worker.py ADAPTER`), with standard library only: goldenppo need not be installed there. The stub
below makes `goldenppo.adapters` importable from this folder, so adapters can `from goldenppo.adapters import Unsupported`.
"""

import json
import os
import sys
import types
from pathlib import Path

PROTOCOL = "goldenppo/protocol/1"


def serve(word: str, source: str | None, requests, answers) -> None:
    """Answers requests until stdin ends or a stop arrives.

    Args:
        word: the adapter, as a user names it.
        source: the directory given as --source, or None.
        requests: lines to read.
        answers: function that writes one answer.
    """
    from goldenppo.adapters.arrays import numbers
    from goldenppo.adapters.interface import AdapterError, UsageError
    from goldenppo.adapters.loader import load
    from goldenppo.adapters.session import Session

    session: Session | None = None
    for line in requests:
        request = json.loads(line)
        if request["cmd"] == "stop":
            return
        if request["cmd"] == "hello":
            try:
                session = Session(load(word), request["table"], source, Path(word).stem)
                answer: dict = {"hello": session.hello()}
            except (AdapterError, UsageError) as problem:
                answer = {"refused": str(problem)}
        else:
            for part in ("inputs", "params"):
                request[part] = {name: numbers(value) for name, value in request[part].items()}
            assert session is not None  # the greeting comes first
            answer = session.call(request)
        answers({"seq": request["seq"], **answer})


def _stub_package() -> None:
    """Makes this folder importable as goldenppo.adapters where goldenppo is not installed."""
    package = types.ModuleType("goldenppo")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["goldenppo"] = package


def main() -> None:
    _stub_package()
    from goldenppo.adapters.arrays import words

    # Trainers print while they are imported and run, and may ask a question. The protocol keeps the real stdin and stdout for
    # itself; prints go to stderr, and who reads finds the end of the input.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        channel.write(json.dumps(words(message), allow_nan=False) + "\n")
        channel.flush()

    here = str(Path(__file__).resolve().parent)
    # The script's own folder holds verl.py, trl.py …: left on the path it would hide the trainers of these names.
    sys.path[:] = [entry for entry in sys.path if entry and str(Path(entry).resolve()) != here]
    sys.path.insert(0, os.getcwd())
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, requests, answer)


if __name__ == "__main__":
    main()
