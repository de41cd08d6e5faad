from collections.abc import Callable
from typing import Any

import pytest
import torch

import rl_contract.testing


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """on_ranks(world_size, body) -> [body(comm) of rank 0, 1, ...]."""
    return rl_contract.testing.on_ranks


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned() -> None:
    """Freed blocks of GPU memory full of NaN, so that an output that nobody wrote shows."""
    junk = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    del junk
