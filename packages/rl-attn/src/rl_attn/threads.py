"""Spread independent tasks over threads. An output element belongs to one task, so threads never show in the bits."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# below this many floating point operations a hand-over to threads costs more than it saves
INLINE_FLOPS = 4_000_000

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    # threads do not survive a fork, and the lock may be held by one that did not
    global _lock, _pool, _pool_size
    _lock, _pool, _pool_size = threading.Lock(), None, 0


os.register_at_fork(after_in_child=_forget_pool)


def _get_pool(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="rl_attn"), size
        return _pool


def spread(run: Callable[[int, int], int], task_count: int, flops: float) -> list[int]:
    """Call ``run(first, step)`` so that tasks first, first+step, ... over all calls cover ``range(task_count)`` once.

    ``run`` must release the GIL to gain from it. The calling thread takes a share. Returns what each call returned.
    """
    workers = min(torch.get_num_threads(), task_count)
    if workers <= 1 or flops < INLINE_FLOPS:
        return [run(0, 1)]
    pool = _get_pool(workers - 1)
    futures = [pool.submit(run, first, workers) for first in range(1, workers)]
    # a failed share must not leave the others running on arrays that the caller gives up
    try:
        mine = run(0, workers)
    finally:
        others = [future.result() for future in futures]
    return [mine, *others]
