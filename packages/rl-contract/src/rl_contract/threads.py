"""Sharing nogil kernels over a few threads.

Which thread computes a range never shows in the bits: a range is a set of whole outputs.

Numba's own layers are avoided on purpose: its work queue aborts when two Python threads enter it.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _forget() -> None:
    global _lock
    _pools.clear()
    _lock = threading.Lock()


# a forked child inherits pools without their threads, and perhaps a lock that nobody will release
os.register_at_fork(after_in_child=_forget)


def _pool(workers: int) -> ThreadPoolExecutor:
    with _lock:
        if workers not in _pools:
            _pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="rl-kernel")
        return _pools[workers]


def for_ranges(body: Callable[[int, int], object], count: int, work: float) -> None:
    """Call ``body(first, last)`` over ``[0, count)`` in contiguous ranges on up to ``torch.get_num_threads()`` threads.

    Args:
        body: must release the GIL and write outputs of its own range only.
        count: number of units.
        work: estimated operations in all; below two million the calling thread does everything, since handing over
            costs some 30 microseconds.
    """
    parts = 1 if work < 2e6 else min(count, torch.get_num_threads())
    if parts <= 1:
        body(0, count)
        return
    cuts = [count * i // parts for i in range(parts + 1)]
    pool = _pool(parts - 1)
    waiting = [pool.submit(body, cuts[i], cuts[i + 1]) for i in range(1, parts)]
    try:
        body(cuts[0], cuts[1])
    finally:
        # outputs must not be freed while a worker still writes them
        errors = [w.exception() for w in waiting]
    for error in errors:
        if error is not None:
            raise error
