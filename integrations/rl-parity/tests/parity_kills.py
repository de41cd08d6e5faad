"""What SIGKILL leaves of a run directory at its file events: copies of it, taken while the run goes on."""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.chmod"}
_PATH = (str, os.PathLike)
_taking = []


def _hook(event, args):
    # it can't be taken away again
    if _taking and event in _EVENTS:
        _taking[-1](event, args)


sys.addaudithook(_hook)


@contextmanager
def copies(out, into, wanted=None):
    """A list that fills with (event, copy of ``out``) just before each event that writes to ``out``.

    What a process has not handed to the kernel is lost with it, and is not in the copy.

    Args:
        wanted: of ``event path``, with the path below ``out``; by default all.
    """
    found, root = [], str(out)

    def take(event, args):
        names = [os.fspath(a) for a in args[: 1 if event == "open" else 2] if isinstance(a, _PATH)]
        if not names or not any(name.startswith(root) for name in names) or ".lock" in names[0]:
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        what = " ".join([event, *(name.removeprefix(root + "/") for name in names)])
        if wanted is None or wanted(what):
            _taking.remove(take)
            try:
                copy = Path(into) / f"{len(found):03d}"
                if Path(out).exists():
                    shutil.copytree(out, copy)
                    found.append((what, copy))
            finally:
                _taking.append(take)

    _taking.append(take)
    try:
        yield found
    finally:
        _taking.remove(take)
