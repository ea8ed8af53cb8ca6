"""An adapter in another process: JSON lines on its stdin and stdout, a time limit on every answer.

Offers the same `hello`, `call` and `close` as adapters/session.py, so the engine cannot tell the two apart.
"""

import collections
import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from pathlib import Path
from typing import NoReturn

from goldenppo.adapters.arrays import numbers, words
from goldenppo.adapters.interface import AdapterError, UsageError
from goldenppo.adapters.worker import PROTOCOL

_START_LIMIT = 300.0  # importing a trainer can take minutes on a cold disk


class Process:
    """A harness that speaks the protocol.

    Args:
        command: program and arguments.
        table: the op table, sent with the greeting.
        limit: seconds that one answer may take.
        name: for messages.
    """

    def __init__(self, command: list[str], table: dict, limit: float, name: str):
        self.table, self.limit, self.name, self.seq = table, limit, name, 0
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as problem:
            raise UsageError(f"cannot start {command[0]!r} ({problem.strerror}); give the path of a program") from None
        assert self.process.stdin and self.process.stdout and self.process.stderr  # each is a pipe
        self.stdin, self.stdout, self.errors = self.process.stdin, self.process.stdout, self.process.stderr
        self.lines: queue.Queue = queue.Queue()
        self.stderr: collections.deque = collections.deque(maxlen=4)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._drain, daemon=True).start()

    def hello(self) -> dict:
        """Greets the harness; what it offers comes back, completed with defaults."""
        answer = self._ask({"cmd": "hello", "protocol": PROTOCOL, "table": self.table}, max(self.limit, _START_LIMIT))
        if "refused" in answer:
            self.close()
            raise AdapterError(answer["refused"])
        hello = answer.get("hello")
        if not isinstance(hello, dict) or not isinstance(hello.get("ops"), dict):
            self._broken('answered the greeting without {"hello": {"name": …, "ops": {…}}}', answer)
        unknown = [op for op in hello["ops"] if op not in self.table["ops"]]
        if unknown:
            self._broken(f"offers {', '.join(map(repr, unknown))}, which is no op", answer)
        defaults = {"axes": [], "withheld": {}, "missing": [], "variants": {}, "gradients": True, "accumulated": False}
        hello["ops"] = {op: {**defaults, **(about or {})} for op, about in hello["ops"].items()}
        blank = {"version": "", "known_versions": [], "arrays": "json", "skipped": {}, "sources": {}}
        return {"name": self.name, **blank, **hello}

    def call(self, request: dict) -> dict:
        """Sends one case and waits for its answer."""
        answer = self._ask({"cmd": "run", **request}, self.limit)
        if len({"result", "unsupported", "error"} & answer.keys()) != 1:
            self._broken("answered with neither result, unsupported nor error", answer)
        if "error" in answer and isinstance(answer["error"], str):
            answer["error"] = {"type": "error", "message": answer["error"], "traceback": ""}
        if "result" in answer:
            answer["result"] = self._complete(answer["result"], request)
        return answer

    def close(self) -> None:
        """Ends the harness and everything that it started."""
        try:
            self.stdin.write(b'{"cmd": "stop"}\n')
            self.stdin.close()
            self.process.wait(timeout=2)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _complete(self, result, request: dict) -> dict:
        """A result in the full form: harnesses may send plain nested lists and leave out what they do not know."""
        if not isinstance(result, dict) or not isinstance(result.get("outputs"), dict):
            self._broken('sent a result without {"outputs": {…}}', result)
        arrays = {
            part: {name: self._array(value, name, request) for name, value in result.get(part, {}).items()}
            for part in ("outputs", "gradients")
        }
        return {"dead": False, "leaks": [], "changed": [], **result, **arrays}

    def _array(self, value, name: str, request: dict) -> dict:
        try:
            if isinstance(value, dict):
                dtype, shape, data = value["dtype"], list(value["shape"]), numbers(value["data"])
            else:
                shape, data = _flatten(numbers(value))
                dtype = request["dtype"]
            if any(not isinstance(item, int | float) for item in data):
                raise TypeError("a number is missing or not a number")
            return {"dtype": dtype, "shape": shape, "data": [float(item) for item in data]}
        except (KeyError, TypeError, ValueError) as problem:
            self._broken(f"sent {name} in a form that cannot be read ({problem!r})", value)

    def _ask(self, message: dict, limit: float) -> dict:
        self.seq += 1
        try:
            self.stdin.write(json.dumps(words({"seq": self.seq, **message}), allow_nan=False).encode() + b"\n")
            self.stdin.flush()
        except OSError:
            self._died()
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise AdapterError(
                f"{self.name} gave no answer within {limit:g} s and was stopped; --timeout SECONDS sets the limit"
            ) from None
        if line is None:
            self._died()
        try:
            answer = json.loads(line)
            seq = answer["seq"]
        except (ValueError, TypeError, KeyError):
            self._broken("printed a line that is no answer", line.decode(errors="replace").strip())
        if seq != self.seq:
            self._broken(f"answered request {seq} when asked request {self.seq}", answer)
        return answer

    def _died(self) -> NoReturn:
        code = self.process.wait()
        self.close()
        raise AdapterError(f"{self.name} ended with exit status {code} before answering{self._said()}")

    def _broken(self, what: str, shown) -> NoReturn:
        self.close()
        raise AdapterError(f"{self.name} {what}: {str(shown)[:120]}{self._said()}")

    def _said(self) -> str:
        said = " ".join(line.decode(errors="replace").strip() for line in self.stderr)[-300:]
        return f"; its last words: {said}" if said else ""

    def _read(self) -> None:
        for line in self.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _drain(self) -> None:
        for line in self.errors:
            self.stderr.append(line)


def harness(word: str, table: dict, limit: float) -> Process:
    """The process adapter behind "cmd: …"."""
    command = shlex.split(word.removeprefix("cmd:"))
    if not command:
        raise UsageError('"cmd:" names no program; expected for example "cmd: node harness.js"')
    return Process(command, table, limit, Path(command[-1] if len(command) > 1 else command[0]).name)


def python_worker(word: str, executable: str, source: str | None, table: dict, limit: float) -> Process:
    """A Python adapter inside another environment's interpreter, where goldenppo is not installed."""
    script = Path(__file__).resolve().parent / "worker.py"
    return Process([executable, str(script), word, *([source] if source else [])], table, limit, word)


def _flatten(nested) -> tuple[list[int], list]:
    if not isinstance(nested, list):
        return [], [nested]
    parts = [_flatten(item) for item in nested]
    if len({tuple(shape) for shape, _ in parts}) > 1:
        raise ValueError("rows of different lengths")
    shape = [len(nested), *(parts[0][0] if parts else [])]
    return shape, [item for _, data in parts for item in data]
