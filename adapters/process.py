"""An adapter in another process: JSON lines on its stdin and stdout, a time limit on every answer.

Offers the same `hello`, `call` and `close` as adapters/session.py, so the engine cannot tell the two apart.
"""

import contextlib
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import threading
from pathlib import Path
from typing import NoReturn

from goldenppo.adapters.arrays import numbers, words
from goldenppo.adapters.binding import axes_of
from goldenppo.adapters.interface import AdapterError, UsageError
from goldenppo.adapters.session import check_variants
from goldenppo.adapters.worker import PROTOCOL

_START_LIMIT = 300.0  # importing a trainer can take minutes on a cold disk
_LONGEST = 1 << 26  # bytes of a line: a harness that never ends one must not fill the memory
_HELLO: dict = {"name": "", "version": "", "known_versions": [], "arrays": "json", "skipped": {}, "sources": {}}
_OFFER: dict = {"axes": [], "withheld": {}, "missing": [], "variants": {}, "gradients": True, "accumulated": False}
_RESULT: dict = {"outputs": {}, "gradients": {}, "dead": False, "leaks": [], "changed": []}
_KINDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}


class Process:
    """A harness that speaks the protocol.

    Args:
        command: program and arguments.
        table: the op table, sent with the greeting.
        limit: seconds that one answer may take.
        name: for messages.
    """

    def __init__(self, command: list[str], table: dict, limit: float, name: str):
        self.table, self.limit, self.name, self.seq, self.closed = table, limit, name, 0, False
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as problem:
            raise UsageError(f"cannot start {command[0]!r} ({problem.strerror}); give the path of a program") from None
        assert self.process.stdin and self.process.stdout and self.process.stderr  # each is a pipe
        self.stdin, self.stdout, self.errors = self.process.stdin, self.process.stdout, self.process.stderr
        # One thread a pipe: whichever of them a harness fills or leaves unread, the time limit holds.
        self.requests: queue.Queue = queue.Queue()
        self.lines: queue.Queue = queue.Queue(maxsize=64)  # a harness that floods stdout waits
        self.stderr = b""
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()
        self.draining = threading.Thread(target=self._drain, daemon=True)
        self.draining.start()

    def hello(self) -> dict:
        """Greets the harness; what it offers comes back, completed with defaults."""
        answer = self._ask({"cmd": "hello", "protocol": PROTOCOL, "table": self.table}, max(self.limit, _START_LIMIT))
        if "refused" in answer:
            self.close()
            raise AdapterError(str(answer["refused"]))
        hello = answer.get("hello")
        if not isinstance(hello, dict) or not isinstance(hello.get("ops"), dict):
            self._broken('answered the greeting without {"hello": {"name": …, "ops": {…}}}', answer)
        unknown = [op for op in hello["ops"] if op not in self.table["ops"]]
        if unknown:
            self._broken(f"offers {', '.join(map(repr, unknown))}, which is no op", answer)
        ops = {op: self._offer(op, about) for op, about in hello["ops"].items()}
        try:
            check_variants({op: offer["variants"] for op, offer in ops.items()}, self.table)
        except AdapterError as problem:
            self.close()
            raise AdapterError(f"{self.name}: {problem}") from None
        full = {**self._filled("greeted", {name: value for name, value in hello.items() if name in _HELLO}, _HELLO), "ops": ops}
        if not all(isinstance(found, list) and all(map(_is_source, found)) for found in full["sources"].values()):
            self._broken('greeted with sources that are not {op: [{"name": …, "sha256": …}]}', full["sources"])
        return {**full, "name": full["name"] or self.name}

    def call(self, request: dict) -> dict:
        """Sends one case and waits for its answer."""
        answer = self._ask({"cmd": "run", **request}, self.limit)
        if len({"result", "unsupported", "error"} & answer.keys()) != 1:
            self._broken("answered with neither result, unsupported nor error, or with several", answer)
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {"message": answer["error"]}
            blank = {"type": "error", "message": "", "traceback": ""}
            return {"error": {key: str(error.get(key, default)) for key, default in blank.items()}}
        if "unsupported" in answer:
            return {"unsupported": str(answer["unsupported"])}
        return {"result": self._complete(answer["result"], request)}

    def close(self) -> None:
        """Ends the harness and everything that it started."""
        if self.closed:
            return
        self.closed = True
        self.requests.put(b'{"cmd": "stop"}\n')
        self.requests.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _offer(self, op: str, about) -> dict:
        """What the greeting says of an op, in full; a misspelt key or axis would otherwise offer nothing, unseen."""
        offer = self._filled(f"offers {op}", {} if about is None else about, _OFFER)
        unknown = [axis for axis in offer["axes"] if axis not in axes_of(self.table["ops"][op])]
        if unknown:
            axes = ", ".join(axes_of(self.table["ops"][op])) or "none"
            self._broken(f"offers {op} with the axis {unknown[0]!r}; its axes are {axes}", about)
        if not all(isinstance(values, list) for values in offer["withheld"].values()):
            self._broken(f"offers {op} with withheld that is not {{axis: [values]}}", about)
        return offer

    def _complete(self, result, request: dict) -> dict:
        """A result in the full form: harnesses may send plain nested lists and leave out what they do not know."""
        if not isinstance(result, dict) or not isinstance(result.get("outputs"), dict):
            self._broken('sent a result without {"outputs": {…}}', result)
        result = {name: value for name, value in result.items() if value is not None or name not in _RESULT}
        spec = self.table["ops"][request["op"]]
        full = self._filled("sent a result", result, _RESULT)
        for part, known in (("outputs", spec["outputs"]), ("gradients", spec["inputs"])):
            unknown = [name for name in full[part] if name not in known]
            if unknown or (part == "outputs" and not full[part]):
                given = ", ".join(map(repr, unknown)) or "nothing"
                self._broken(f"sent {given} among the {part} of {request['op']}; expected {', '.join(known)}", result)
            full[part] = {name: self._array(value, name, request) for name, value in full[part].items()}
        return full

    def _filled(self, what: str, given, defaults: dict) -> dict:
        """An object with its defaults filled in; a key that has no place there, or a value of another kind, is refused."""
        if not isinstance(given, dict):
            self._broken(f"{what} with something that is no object", given)
        for key, value in given.items():
            if key not in defaults:
                self._broken(f"{what} with {key!r}; expected some of {', '.join(defaults)}", given)
            if type(value) is not type(defaults[key]):
                self._broken(f"{what} with {key} that is not {_KINDS[type(defaults[key])]}", value)
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                self._broken(f"{what} with {key} that is not a list of strings", value)
        return {**defaults, **given}

    def _array(self, value, name: str, request: dict) -> dict:
        try:
            if isinstance(value, dict):
                dtype, shape, data = str(value["dtype"]), list(value["shape"]), numbers(value["data"])
            else:
                shape, data = _flatten(numbers(value))
                dtype = request["dtype"]
            if any(not isinstance(item, int | float) for item in data):
                raise TypeError("a number is missing or not a number")
            if math.prod(shape) != len(data):
                raise ValueError(f"{len(data)} numbers for the shape {shape}")
            return {"dtype": dtype, "shape": shape, "data": [float(item) for item in data]}
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
            self._broken(f"sent {name} in a form that cannot be read ({problem!r})", value)

    def _ask(self, message: dict, limit: float) -> dict:
        self.seq += 1
        self.requests.put(json.dumps(words({"seq": self.seq, **message}), allow_nan=False).encode() + b"\n")
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise AdapterError(
                f"{self.name} gave no answer within {limit:g} s and was stopped; --timeout SECONDS sets the limit{self._said()}"
            ) from None
        if line is None:
            self._died()
        try:
            answer = json.loads(line)
            seq = answer["seq"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self._broken("printed a line that is no answer", line[:1000].decode(errors="replace").strip())
        if seq != self.seq:
            self._broken(f"answered request {seq} when asked request {self.seq}", answer)
        return answer

    def _died(self) -> NoReturn:
        self.lines.put(None)  # whoever asks again learns it too
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._broken("closed its stdout before answering", "nothing more can come")
        self.close()
        end = f"exit status {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        raise AdapterError(f"{self.name} ended with {end} before answering{self._said()}")

    def _broken(self, what: str, shown) -> NoReturn:
        self.close()
        raise AdapterError(f"{self.name} {what}: {str(shown)[:120]}{self._said()}")

    def _said(self) -> str:
        self.draining.join(timeout=1)
        said = " ".join(self.stderr.decode(errors="replace").split())[-300:]
        return f"; its last words: {said}" if said else ""

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it has ended or reads no more: the end of its stdout or the limit says so
            while (line := self.requests.get()) is not None:
                self.stdin.write(line)
                self.stdin.flush()
            self.stdin.close()

    def _read(self) -> None:
        while line := self.stdout.readline(_LONGEST):
            self.lines.put(line)
        self.lines.put(None)

    def _drain(self) -> None:
        while said := os.read(self.errors.fileno(), 1 << 16):
            self.stderr = (self.stderr + said)[-2000:]


def harness(word: str, table: dict, limit: float) -> Process:
    """The process adapter behind "cmd: …"."""
    try:
        command = shlex.split(word.removeprefix("cmd:"))
    except ValueError as problem:
        raise UsageError(f"{word!r} is no command line: {problem}; quote it as a shell wants it") from None
    if not command:
        raise UsageError('"cmd:" names no program; expected for example "cmd: node harness.js"')
    script = next((part for part in command[1:] if Path(part).is_file()), command[0])
    return Process(command, table, limit, Path(script).name)


def python_worker(word: str, executable: str, source: str | None, table: dict, limit: float) -> Process:
    """A Python adapter inside another environment's interpreter, where goldenppo is not installed."""
    script = Path(__file__).resolve().parent / "worker.py"
    return Process([executable, str(script), word, *([source] if source else [])], table, limit, word)


def _is_source(found) -> bool:
    return isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("sha256"), str | None)


def _flatten(nested) -> tuple[list[int], list]:
    if not isinstance(nested, list):
        return [], [nested]
    parts = [_flatten(item) for item in nested]
    if len({tuple(shape) for shape, _ in parts}) > 1:
        raise ValueError("rows of different lengths")
    shape = [len(nested), *(parts[0][0] if parts else [])]
    return shape, [item for _, data in parts for item in data]
