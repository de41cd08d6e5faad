"""Leaving no process behind: every descendant of a run carries its mark in the environment."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from rl_parity.launch import traces
from rl_parity.launch.signals import shield

MARK = "RL_PARITY_RUN"


def end_group(process: "subprocess.Popen[Any]", patience: float = 5.0) -> None:
    """SIGTERM, then SIGKILL, to a child that leads its process group."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    # the leader may be gone while its children are not
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def marked(run_id: str) -> Iterator[None]:
    """Mark everything started inside; on the way out end what is left of it and remove what it left behind."""
    before = os.environ.get(MARK)
    os.environ[MARK] = run_id
    try:
        yield
    finally:
        with shield():
            if before is None:
                os.environ.pop(MARK, None)
            else:
                os.environ[MARK] = before
            sweep(run_id)
            traces.remove_weights(run_id)
            traces.remove_folders()


def survivors(run_id: str) -> list[psutil.Process]:
    """Live processes that carry the mark, and their descendants, without this one.

    Descendants count too, because a process that sets its title may overwrite the environment that others can read.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == run_id:
                for one in (process, *process.children(recursive=True)):
                    found[one.pid] = one
    found.pop(os.getpid(), None)
    return [process for process in found.values() if lives(process)]


def lives(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end(processes: Iterable[psutil.Process], patience: float = 3.0) -> None:
    """SIGTERM, then SIGKILL, to those that still live."""
    for method in ("terminate", "kill"):
        left = [process for process in processes if lives(process)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                getattr(process, method)()
        psutil.wait_procs(left, timeout=patience)


def sweep(run_id: str) -> int:
    """End every process that carries the mark; returns how many there were."""
    left = survivors(run_id)
    end(left)
    return len(left)
