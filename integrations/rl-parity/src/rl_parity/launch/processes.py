"""Leaving no process behind: every descendant of a run carries its mark in the environment."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "RL_PARITY_RUN"


def shared_segments(run_id: str) -> set[Path]:
    """Shared memory files that the marked processes have mapped; a process that is killed leaves its own behind."""
    found: set[Path] = set()
    for process in survivors(run_id):
        with contextlib.suppress(psutil.Error, OSError):
            found |= {
                Path(m.path) for m in process.memory_maps(grouped=True) if Path(m.path).parent == Path("/dev/shm")
            }
    return found


def end_group(process: "subprocess.Popen[bytes]", patience: float = 5.0) -> None:
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
    """Mark everything started inside, and end what is left of it on the way out."""
    before = os.environ.get(MARK)
    os.environ[MARK] = run_id
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = before
        sweep(run_id)


def survivors(run_id: str) -> list[psutil.Process]:
    """Live processes that carry the mark, without this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARK) == run_id
            ):
                found.append(process)
    return found


def sweep(run_id: str, patience: float = 3.0) -> int:
    """End every process that carries the mark; returns how many there were."""
    count = 0
    for end in ("terminate", "kill"):
        left = survivors(run_id)
        count = max(count, len(left))
        for process in left:
            with contextlib.suppress(psutil.Error):
                getattr(process, end)()
        psutil.wait_procs(left, timeout=patience)
    return count
