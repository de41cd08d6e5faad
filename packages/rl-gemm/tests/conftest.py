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
