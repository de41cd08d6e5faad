"""Workers as plain child processes, one pipe each; needs nothing but the standard library."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rl_parity.launch.base import Gone, Pending, WorkerFailure, failure, tail
from rl_parity.launch.processes import end_group


class _Call:
    def __init__(self, worker: "LocalWorker") -> None:
        self.worker: LocalWorker = worker
        self.answer: tuple[bool, Any] | None = None

    def result(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.answer is None:
            left = None if deadline is None else deadline - time.monotonic()
            if (left is not None and left <= 0) or not self.worker.connection.poll(left):
                raise WorkerFailure(self.worker.describe(f"no answer within {timeout:.0f} s"))
            self.worker.receive()
        ok, value = self.answer
        if not ok:
            raise failure(self.worker, value)
        return value


class LocalWorker:
    def __init__(self, name: str, connection: Connection, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.connection, self.process, self.log = name, connection, process, log
        self.waiting: deque[_Call] = deque()

    def call(self, method: str, *args: Any, **kwargs: Any) -> _Call:
        call = _Call(self)
        try:
            self.connection.send((method, args, kwargs))
        except OSError:
            call.answer = (False, Gone.of(self.process.wait()))
            return call
        self.waiting.append(call)
        return call

    def receive(self) -> None:
        """Take one answer from the pipe; a closed pipe answers every waiting call with the failure."""
        try:
            self.waiting.popleft().answer = self.connection.recv()
        except (EOFError, OSError):
            gone = Gone.of(self.process.wait())
            for call in self.waiting:
                call.answer = (False, gone)
            self.waiting.clear()
            raise failure(self, gone) from None

    def describe(self, what: str) -> str:
        return f"{self.name}: {what}\n--- last lines of {self.log} ---\n{tail(self.log)}"


class LocalLauncher:
    """One process group per worker, so that an engine's own children end with it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._workers: list[LocalWorker] = []

    def start(self, name: str, factory: str, *, env: Mapping[str, str], kwargs: Mapping[str, Any]) -> LocalWorker:
        ours, theirs = Pipe()
        log = self._logs / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl_parity.launch.serve", str(theirs.fileno())],
                env={**os.environ, **env},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        theirs.close()
        worker = LocalWorker(name, ours, process, log)
        self._workers.append(worker)
        worker.call("__build__", factory, dict(kwargs))
        return worker

    def wait(self, calls: Sequence[Pending], timeout: float | None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        mine: list[_Call] = [c for c in calls if isinstance(c, _Call)]
        while True:
            # a worker whose object was not built has failed, whatever else was asked of it
            for call in mine:
                if call.answer is not None and not call.answer[0]:
                    call.result()
            open_calls = [c for c in mine if c.answer is None]
            if not open_calls:
                return [c.result() for c in mine]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            by_connection = {c.worker.connection: c.worker for c in open_calls}
            ready = wait(list(by_connection), left)
            if not ready:
                names = ", ".join(sorted({c.worker.name for c in open_calls}))
                raise WorkerFailure(
                    open_calls[0].worker.describe(f"no answer within {timeout} s (waiting for {names})")
                )
            for connection, worker in by_connection.items():
                if connection in ready:
                    worker.receive()

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            end_group(worker.process)
        self._workers.clear()
