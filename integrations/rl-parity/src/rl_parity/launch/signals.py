"""Signals that end a run: the first one unwinds it, those that follow wait for the cleanup."""

import contextlib
import os
import signal
import stat
import sys
import time
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# a signal this soon after the one that interrupted the run would hit the unwinding, not the work
_QUIET_SECONDS = 10.0


class _State:
    depth = 0
    pending = False
    told = False
    raised: float | None = None


def install() -> None:
    """Have Ctrl-C, SIGTERM and a closed terminal interrupt the run; ``nohup`` keeps its meaning.

    SIGINT is taken also where a shell started the run in the background with SIGINT ignored.
    """
    _State.depth, _State.pending, _State.told, _State.raised = 0, False, False, None
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, on_signal)


def ignore() -> None:
    """For the last moments of the process: whatever comes no longer changes its exit status."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def on_signal(number: int, _: object) -> None:
    if number == signal.SIGHUP:
        _leave_terminal()
    unwinding = _State.raised is not None and time.monotonic() - _State.raised < _QUIET_SECONDS
    if not _State.depth and not unwinding:
        interrupt()
    _State.pending = _State.pending or bool(_State.depth)
    if not _State.told:
        _State.told = True
        with contextlib.suppress(OSError):
            os.write(2, b"\nrl-parity: ending the run, its processes and shared memory first; please wait\n")


def interrupt() -> NoReturn:
    _State.raised = time.monotonic()
    raise KeyboardInterrupt


class shield:
    """Nothing inside is cut short by a signal; one that came meanwhile interrupts the run on the way out.

    It does not where the run is ending already, so that the first reason for its end stays.
    """

    def __enter__(self) -> None:
        # a signal between these two lines still interrupts before anything inside has begun
        self._ending = sys.exc_info()[0] is not None
        _State.depth += 1

    def __exit__(self, kind: object, *_: object) -> None:
        _State.depth -= 1
        if _State.depth or not _State.pending:
            return
        _State.pending = False
        if kind is None and not self._ending and _State.raised is None:
            interrupt()


def _leave_terminal() -> None:
    """Writing to a terminal that is gone is an error, which would hide why the run ended."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(null, stream)
    os.close(null)
