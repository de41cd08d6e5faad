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
    running: dict[int, _Running] = {}
    try:
        while running or any(waiting):
            for i, lane in enumerate(waiting):
                if i in running or not lane:
                    continue
                job = lane.pop(0)
                if time.time() > end:
                    yield job, None
                else:
                    running[i] = _Running(job, min(end, time.time() + job.limit))
            # late ones are asked all at once, so that none waits for another's end
            for one in running.values():
                one.look()
            for i in [i for i, one in running.items() if one.over]:
                one = running.pop(i)
                yield one.job, one.finish()
            time.sleep(0.1)
    finally:
        for one in running.values():
            one.stop()
        for one in running.values():
            one.finish()


class _Running:
    """A job's process. ``over``: it has ended, or was late and its grace is over too."""

    def __init__(self, job: Job, limit: float) -> None:
        self.job, self.limit, self.late, self._kill_at = job, limit, False, 0.0
        self.process = _start(job)

    def look(self) -> None:
        if not self.late and time.time() > self.limit and self.process.poll() is None:
            self.late = True
            self.stop()

    def stop(self) -> None:
        self._kill_at = time.time() + self.job.grace
        if self.process.poll() is None:
            self.process.send_signal(self.job.stop)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None or (self.late and time.time() > self._kill_at)

    def finish(self) -> int | None:
        """The status; None where it was late."""
        while not self.over and time.time() < self._kill_at:
            time.sleep(0.05)
        # also what a program left behind that ended by itself
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        return None if self.late else status


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
