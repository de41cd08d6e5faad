"""Programs beside one another, each with a limit; what is late is ended, with all that it has started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program; ``stop`` is the signal that asks it to end by itself, within ``grace`` seconds."""

    name: str
    command: Sequence[str]
    log: Path
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    stop: int = signal.SIGTERM
    grace: float = 2.0

    def tail(self, size: int = 1500) -> str:
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else "never started"


def run_lanes(lanes: Sequence[Sequence[Job]], end: float) -> Iterator[tuple[Job, int | None]]:
    """Each lane's jobs in turn, lanes beside one another; yields every job as it ends, with its status.

    The status is None for a job that was late, or whose turn came after ``end`` (of ``time.time``).
    """
    waiting = [list(lane) for lane in lanes]
    running: dict[int, tuple[Job, subprocess.Popen[bytes], float]] = {}
    try:
        while running or any(waiting):
            for i, lane in enumerate(waiting):
                if i in running or not lane:
                    continue
                job = lane.pop(0)
                if time.time() > end:
                    yield job, None
                    continue
                running[i] = (job, _start(job), time.time() + job.limit)
            for i, (job, process, limit) in list(running.items()):
                status = process.poll()
                if status is None and time.time() < min(limit, end):
                    continue
                _end(job, process)
                del running[i]
                yield job, status
            time.sleep(0.1)
    finally:
        for job, process, _ in running.values():
            _end(job, process)


def _start(job: Job) -> "subprocess.Popen[bytes]":
    with job.log.open("wb") as log:
        return subprocess.Popen(
            job.command,
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _end(job: Job, process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(job.stop)
        with suppress(subprocess.TimeoutExpired):
            process.wait(job.grace)
    # also what a program left behind that ended by itself
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
