"""One sitting at a time holds a run directory; the kernel lets go of it however the process ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from rl_contract import ContractError

LOCK = ".lock"


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """Hold ``root``, which exists, while the block runs.

    Raises:
        ContractError: another process holds it, or it cannot be written; nothing was changed.
    """
    path, descriptor = root / LOCK, _take(root)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # removed while it is held: who opened it meanwhile sees that it is gone, and opens the next one
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def refuse_if_held(root: Path) -> None:
    """Raise ContractError where another process holds ``root``, which need not exist."""
    try:
        descriptor = os.open(root / LOCK, os.O_RDWR)
    except (OSError, ValueError):
        # the checks of a new directory name what is wrong with it
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ContractError(_by_whom(root, descriptor)) from None
    finally:
        os.close(descriptor)


def _take(root: Path) -> int:
    while True:
        try:
            descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ContractError(f"{root} cannot be written ({error}); make it a directory that can be") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            message = _by_whom(root, descriptor)
            os.close(descriptor)
            raise ContractError(message) from None
        except OSError as error:
            os.close(descriptor)
            raise ContractError(f"{root / LOCK} cannot be locked ({error}); use a file system with locks") from error
        os.close(descriptor)


def _by_whom(root: Path, descriptor: int) -> str:
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    return f"{root} is in use by a sitting with pid {pid}; wait until it ends, or give another directory"
