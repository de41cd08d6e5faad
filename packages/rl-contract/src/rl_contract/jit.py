"""``kernel``: the one way CPU kernels are compiled, and a disk cache that many processes may share.

Numba's cache alone is not safe enough. It checks the file that holds the kernel but not the files the kernel inlines,
and two processes that save different types at once can file one's code under the other's name. So the stamp covers all
sources of the kernel's package and of rl_contract, and looking up, compiling and saving happen under one lock per cache
directory; processes that start together wait for the first instead of compiling the same thing.
"""

import hashlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba as nb
from numba.core.compiler_lock import global_compiler_lock

try:
    import fcntl
except ImportError:  # no advisory locks: every process compiles for itself, and the cache is read at its own risk
    fcntl = None  # type: ignore[assignment]

_depth: dict[str, int] = {}


@cache
def _source_digest(package: str) -> str:
    digest = hashlib.sha256()
    for name in sorted({package, "rl_contract"}):
        for folder in getattr(importlib.import_module(name), "__path__", ()):
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.name.encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold ``directory``'s lock; re-entrant, for a kernel inside a kernel. The caller holds Numba's compiler lock."""
    held = _depth.get(directory, 0)
    if held or fcntl is None:
        yield
        return
    try:
        os.makedirs(directory, exist_ok=True)
        file = open(os.path.join(directory, "rl-kernels.lock"), "a")  # noqa: SIM115
    except OSError:
        # a cache nobody can write to needs no lock
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _depth[directory] = 1
        try:
            yield
        finally:
            _depth[directory] = 0


@cache
def _warn_once() -> None:
    warnings.warn(
        "rl_contract.jit finds no folder to keep compiled kernels in, so every process compiles them again; "
        "set NUMBA_CACHE_DIR to a folder that can be written to",
        RuntimeWarning,
        stacklevel=3,
    )


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` at its first call: no GIL, no fast math, division as IEEE has it.

    Cached on disk; where no folder can be written to, compiled in every process, with one warning.
    """
    dispatcher = nb.njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        _warn_once()
        return dispatcher
    disk = dispatcher._cache
    disk._cache_file._source_stamp = (
        disk._cache_file._source_stamp,
        _source_digest(function.__module__.partition(".")[0]),
    )
    compile_one = dispatcher.compile

    def compile_locked(signature: Any) -> Any:
        with global_compiler_lock, _locked(disk.cache_path):
            return compile_one(signature)

    dispatcher.compile = compile_locked
    return dispatcher
