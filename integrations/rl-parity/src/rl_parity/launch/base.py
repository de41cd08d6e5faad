"""What a launcher promises: start a worker, call its methods, wait for many at once, leave nothing behind."""

import importlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class WorkerFailure(RuntimeError):
    """A worker raised, died or did not answer in time. The message ends with the last lines it wrote."""


class WorkerGone(WorkerFailure):
    """A worker's process lives no more."""


class Gone(str):
    """In words, how a worker's process ended; ``failure`` makes the error of it."""

    @classmethod
    def of(cls, status: int | None) -> "Gone":
        """From the exit status as ``subprocess`` has it: the negative number of the signal that ended the process."""
        name = ""
        if status is not None and status < 0:
            name = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
        return cls(f"the process ended with status {status}{name}")


def failure(worker: "Worker", what: str) -> WorkerFailure:
    """``WorkerGone`` where ``what`` is ``Gone``, else ``WorkerFailure``."""
    return (WorkerGone if isinstance(what, Gone) else WorkerFailure)(worker.describe(what))


class Pending(Protocol):
    """A call in flight."""

    @property
    def worker(self) -> "Worker": ...

    def result(self, timeout: float | None = None) -> Any:
        """The call's value.

        Raises:
            WorkerFailure: the worker raised, died, or did not answer within ``timeout`` seconds.
        """
        ...


class Worker(Protocol):
    """One process holding one object. Calls are served in the order they were made."""

    name: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending: ...

    def describe(self, what: str) -> str:
        """``what`` with the worker's name and the last lines it wrote."""
        ...


class Launcher(Protocol):
    """Starts workers and ends all of them.

    ``factory`` is ``"module:callable"``; it is imported inside the worker after ``env`` is set, so that libraries which
    read the environment at import see their own worker's values and nobody else's.
    """

    def start(self, name: str, factory: str, *, env: Mapping[str, str], kwargs: Mapping[str, Any]) -> Worker: ...

    def wait(self, calls: Sequence[Pending], timeout: float | None) -> list[Any]: ...

    def close(self) -> None: ...


def wait_all(launcher: Launcher, calls: Sequence[Pending], timeout: float | None = None) -> list[Any]:
    """Values of all calls, in order; the first failure of any of them ends the wait, though others hang."""
    return launcher.wait(calls, timeout)


def build(factory: str, kwargs: Mapping[str, Any]) -> Any:
    """Import ``"module:callable"`` and call it."""
    module, _, attribute = factory.partition(":")
    return getattr(importlib.import_module(module), attribute)(**kwargs)


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, those of C libraries and children included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a worker's log, for error messages."""
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
