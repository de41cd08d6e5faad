"""A record, outside the run directory, of what a sitting has made in shared memory and scratch folders.

A sitting whose main process is killed cannot clean up. Its record stays, and the kernel has let go of the lock on it:
by that the next start of the same user tells it from the record of a sitting which lives.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SHM = Path("/dev/shm")
BASE = Path("/tmp")


@dataclass
class Left:
    """What a record names. ``shared``: name in shared memory -> inode."""

    mark: str
    shared: dict[str, int] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)


class Record:
    """The record of this process's sitting; ``note`` appends to it, one line a fact."""

    def __init__(self, mark: str) -> None:
        self._path, self._descriptor = _create(mark)
        self._known: set[object] = set()
        _open.append(self)

    def note(self, *, shared: Mapping[str, int] | None = None, folder: Path | None = None) -> None:
        facts: list[dict[str, object]] = [{"shared": name, "inode": inode} for name, inode in (shared or {}).items()]
        facts += [{"folder": str(folder)}] if folder is not None else []
        for fact in facts:
            key = tuple(fact.values())
            if self._descriptor is not None and key not in self._known:
                self._known.add(key)
                with contextlib.suppress(OSError):
                    os.write(self._descriptor, (json.dumps(fact) + "\n").encode())

    def close(self) -> None:
        """Remove the record, for when everything that it names is gone."""
        _open.remove(self)
        if self._path is not None and self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()
        self._path = self._descriptor = None


_open: list[Record] = []


def note_folder(folder: Path) -> None:
    for record in _open:
        record.note(folder=folder)


def note_inodes(inodes: Iterable[int]) -> None:
    """Note the names which these inodes have in shared memory now."""
    wanted = set(inodes)
    if not wanted or not _open:
        return
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            if entry.inode() in wanted:
                found[entry.name] = entry.inode()
    for record in _open:
        record.note(shared=found)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether nobody else has ``path`` locked; it is locked while the block runs if so."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield os.fstat(descriptor).st_uid == os.geteuid()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def dead() -> Iterator[list[Left]]:
    """What sittings of this user have left whose main process is gone; their records go with the end of the block."""
    with contextlib.ExitStack() as stack:
        found, paths = [], []
        folder = _folder()
        for path in sorted(folder.glob("*.jsonl")) if _is_ours(folder) else ():
            with contextlib.suppress(OSError):
                if stack.enter_context(_locked(path)):
                    found.append(_read(path))
                    paths.append(path)
        yield found
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def _read(path: Path) -> Left:
    left = Left(mark=path.stem)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        # a line that was cut off names nothing
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fact = json.loads(line)
            if "folder" in fact:
                left.folders.append(Path(fact["folder"]))
            else:
                left.shared[str(fact["shared"])] = int(fact["inode"])
    return left


def _folder() -> Path:
    return BASE / f"rl-parity-{os.geteuid()}"


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _create(mark: str) -> tuple[Path | None, int | None]:
    """A locked, empty record; (None, None) where none can be kept, which changes nothing else."""
    folder = _folder()
    path = folder / f"{mark}.jsonl"
    for _ in range(100):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(folder):
                break
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            # whoever ended last removed the folder
            continue
        except OSError:
            break
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        # another start took it, still unlocked, for one that nobody holds
        os.close(descriptor)
    return None, None
