"""Leaving no process behind: every descendant of a sitting carries its mark in the environment.

The mark is of one sitting, not of the run: copies of a run directory share the run's id, and may run side by side.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from rl_parity.launch import leftovers, traces
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


def new_mark(run_id: str) -> str:
    """A mark that no other sitting has."""
    return f"{run_id}-{uuid.uuid4().hex[:12]}"


def current_mark() -> str:
    """The mark of this process's sitting; empty outside of one."""
    return os.environ.get(MARK, "")


@contextlib.contextmanager
def marked(mark: str) -> Iterator[None]:
    """Mark everything started inside; on the way out end what is left of it and remove what it left behind."""
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    record = leftovers.Record(mark)
    try:
        yield
    finally:
        with shield():
            if before is None:
                os.environ.pop(MARK, None)
            else:
                os.environ[MARK] = before
            sweep(mark)
            traces.remove_weights(mark)
            traces.remove_folders()
            record.close()


def survivors(mark: str) -> list[psutil.Process]:
    """Live processes that carry the mark, and their descendants, without this one.

    Descendants count too, because a process that sets its title may overwrite the environment that others can read.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
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


def sweep(mark: str) -> int:
    """End every process that carries the mark; returns how many there were."""
    left = survivors(mark)
    end(left)
    return len(left)


def sweep_dead() -> int:
    """End and remove what this user's sittings have left whose main process was killed; returns how many those were."""
    with leftovers.dead() as found:
        for left in found:
            processes = survivors(left.mark)
            # a name alone may have been given anew
            inodes = {inode for name, inode in left.shared.items() if traces.inode_of(name) == inode}
            inodes |= traces.mapped(process.pid for process in processes)
            end(processes)
            traces.remove_shared(inodes)
            traces.remove_weights(left.mark)
            for folder in left.folders:
                shutil.rmtree(folder, ignore_errors=True)
        if found:
            print(f"rl-parity: removed what {len(found)} killed sitting(s) had left", file=sys.stderr)
    return len(found)
