"""Ranks as threads: a Communicator for tests, since rl-norm does not depend on rl-comm."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


class ThreadRank:
    """One of ``world_size`` threads; partials meet in a shared list and every rank folds the same tree."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._slots = rank, world_size, barrier, slots

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = x
        self._barrier.wait(timeout=60)
        everyone = list(self._slots)
        self._barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        assert partial.dtype == torch.float32
        parts = self._exchange(partial)
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        return parts[0].to(out_dtype or torch.float32)

    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.all_reduce(partial, out_dtype=out_dtype).chunk(self.world_size, dim)[self.rank]

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """on_ranks(world_size, body) -> [body(comm) of rank 0, 1, ...]."""

    def run(world_size: int, body: Callable[[ThreadRank], Any]) -> list[Any]:
        barrier, slots = threading.Barrier(world_size), [None] * world_size
        with ThreadPoolExecutor(world_size) as pool:
            ranks = [ThreadRank(r, world_size, barrier, slots) for r in range(world_size)]
            return list(pool.map(body, ranks))

    return run


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
