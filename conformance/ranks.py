"""The same adapter in several processes at once, as the ranks of data-parallel training."""

import itertools
import sys
import tempfile
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.process import Process, python_worker
from goldenppo.conformance.cases import table

GRACE = 2.0  # seconds in which the other ranks may still answer once one has failed


class Ranks:
    """Processes that hold an adapter, started when they are first needed.

    Args:
        word: the adapter, as a user names it; no "cmd: …".
        python: an interpreter in which the adapter runs; this one if None.
        source: a trainer's checkout, for adapters that need one.
        timeout: seconds that one answer may take.
    """

    def __init__(self, word: str, python: str | None, source: str | None, timeout: float):
        self.word = "goldenppo.reference" if word == "reference" else word
        self.python, self.source, self.timeout = python or sys.executable, source, timeout
        self.workers: list[Process] = []
        self.refused: AdapterError | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="goldenppo-ranks-")
        self.groups = itertools.count()

    def ask(self, requests: list[dict]) -> list[dict]:
        """Sends every rank its request, all of one process group, and waits for all answers.

        Where a rank fails the others wait for it in vain, so all are ended and its error is the answer.

        Raises:
            AdapterError: the adapter does not load in the processes.
        """
        self._start(len(requests))
        store = str(Path(self.folder.name) / str(next(self.groups)))
        sent = [
            {**request, "group": {"rank": rank, "ranks": len(requests), "store": store}} for rank, request in enumerate(requests)
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            waiting = [pool.submit(self._call, rank, request) for rank, request in enumerate(sent)]
            done, pending = wait(waiting, return_when=FIRST_COMPLETED)
            while pending and not any("error" in call.result() for call in done):
                done, pending = wait(waiting, timeout=0.05)
            done, _ = wait(waiting, timeout=GRACE)
            failed = [call.result()["error"] for call in done if "error" in call.result()]
            if failed:
                self._end()
                # The others fail too once a rank has left, and only say that they lost it.
                cause = next((error for error in failed if "gloo" not in error["message"]), failed[0])
                return [{"error": cause}]
        return [call.result() for call in waiting]

    def _call(self, rank: int, request: dict) -> dict:
        """One rank's answer; a process that ends or hangs is an error like another."""
        try:
            return self.workers[rank].call(request)
        except AdapterError as problem:
            return {"error": {"type": "AdapterError", "message": str(problem), "traceback": ""}}

    def _start(self, count: int) -> None:
        """Starts the processes that are missing, all at once: importing a trainer takes a while."""
        if self.refused:
            raise self.refused
        missing = max(count - len(self.workers), 0)
        started = [python_worker(self.word, self.python, self.source, table(), self.timeout) for _ in range(missing)]
        self.workers += started
        try:
            with ThreadPoolExecutor(max(missing, 1)) as pool:
                list(pool.map(Process.hello, started))
        except AdapterError as problem:
            self.refused = problem  # it will not load the next time either
            self._end()
            raise

    def close(self) -> None:
        """Ends all processes."""
        self._end()
        self.folder.cleanup()

    def _end(self) -> None:
        for worker in self.workers:
            worker.process.kill()  # it may be waiting for a rank that has ended, and cannot be asked to stop
        for worker in self.workers:
            worker.close()
        self.workers = []
