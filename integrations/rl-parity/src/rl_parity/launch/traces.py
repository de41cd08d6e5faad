"""What a run leaves outside its directory: shared memory and scratch folders, and how they go with it."""

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from rl_parity.launch import leftovers
from rl_parity.launch.leftovers import SHM
from rl_parity.launch.signals import shield

_folders: set[Path] = set()


def scratch_folder() -> Path:
    """A new folder for sockets and logs; whatever is in its place when the run ends is removed.

    Ray never starts a worker, and never says so, where this folder lies inside the virtual environment; and the path
    of a socket may have some 100 characters, of which Ray needs 70 itself.
    """
    base = Path(tempfile.gettempdir()).resolve()
    if base.is_relative_to(Path(sys.prefix).resolve()) or len(str(base)) > 16:
        base = Path("/tmp")
    with shield():
        folder = Path(tempfile.mkdtemp(prefix="rlp-", dir=base))
        _folders.add(folder)
        leftovers.note_folder(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a scratch folder early; a process that lives yet may make it again, so it stays listed."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_folders() -> None:
    """Remove every scratch folder; for when no process of the run lives any more."""
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    _folders.clear()


def shared_names() -> set[str]:
    """Everything in shared memory now."""
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def inode_of(name: str) -> int | None:
    """The inode of a file in shared memory; None where there is none of that name."""
    try:
        return (SHM / name).stat().st_ino
    except OSError:
        return None


def mapped(pids: Iterable[int]) -> set[int]:
    """Inodes of the shared memory files that these processes have mapped.

    Inodes, because the process that made a semaphore shows it under the temporary name it had before it was linked.
    """
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                parts = line.split(maxsplit=5)
                if len(parts) == 6 and parts[5].startswith(f"{SHM}/"):
                    found.add(int(parts[4]))
    return found


def remove_shared(inodes: Iterable[int]) -> None:
    """Remove the shared memory files with these inodes that belong to this user."""
    wanted = set(inodes)
    if not wanted:
        return
    for name in shared_names():
        with contextlib.suppress(OSError):
            status = (SHM / name).stat()
            if status.st_ino in wanted and status.st_uid == os.geteuid():
                (SHM / name).unlink()


class Watch:
    """Remembers, while a block runs, which shared memory a set of processes has mapped.

    A process that dies no longer tells what it had mapped, and a file in shared memory does not tell who made it: what
    was never seen mapped by a process of this run may belong to another run, and stays.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], every: float = 1.0) -> None:
        self.inodes: set[int] = set()
        self._pids, self._every = pids, every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shared-memory-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Look now."""
        self.inodes |= mapped(self._pids())
        leftovers.note_inodes(self.inodes)

    def _watch(self) -> None:
        while not self._done.wait(self._every):
            self.look()


def weights_prefix(mark: str) -> str:
    """How the weight folders of a sitting begin."""
    return f"rl-parity-{mark}-"


def remove_weights(mark: str) -> None:
    """Remove the weight folders of a sitting; they carry its mark."""
    for name in shared_names():
        if name.startswith(weights_prefix(mark)):
            shutil.rmtree(SHM / name, ignore_errors=True)
