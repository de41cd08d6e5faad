"""Ranks as threads: what a process group does, for tests that should not need one."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rl_contract.errors import ContractError

T = TypeVar("T")


class ThreadRank:
    """A ``Communicator`` among threads. Tensors move by reference; partials are joined by the tree over ranks."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._slots = rank, world_size, barrier, slots

    def everyone(self, x: Any) -> list[Any]:
        """``x`` of every rank, rank 0 first."""
        self._slots[self.rank] = x
        self._barrier.wait()
        parts = list(self._slots)
        # no rank may put its next value before all have read this one
        self._barrier.wait()
        return parts

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        assert partial.dtype == torch.float32, f"all_reduce got {partial.dtype}, it takes fp32 partials"
        level = self.everyone(partial)
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2])]
        return level[0] if out_dtype is None else level[0].to(out_dtype)

    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.all_reduce(partial, out_dtype=out_dtype).chunk(self.world_size, dim)[self.rank].contiguous()

    def all_gather_said(self, x: torch.Tensor, said: str, *, dim: int = 0) -> torch.Tensor:
        every = self.everyone(said)
        other = next((r for r, theirs in enumerate(every) if theirs != every[0]), None)
        if other is not None:
            raise ContractError(f"ranks were given different values: rank 0 {every[0]}, rank {other} {every[other]}")
        return self.all_gather(x, dim=dim)

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        return torch.cat(self.everyone(x), dim)


def on_ranks(
    world_size: int, body: Callable[[Any], T], kind: type[ThreadRank] = ThreadRank, timeout_s: float = 60
) -> list[T]:
    """``body(comm)`` on every rank at once; results, rank 0 first.

    Raises:
        The error of the rank that failed; the others, left waiting for it, end with it. A rank that does not come
        within ``timeout_s`` counts as failed.
    """
    barrier, slots = threading.Barrier(world_size, timeout=timeout_s), [None] * world_size
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(kind(rank, world_size, barrier, slots))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world_size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        # a broken barrier is what the others saw of the first failure
        raise min(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError))
    return results
