"""Which ranks hold which tokens of the batch that is being computed, for modules that Megatron hands no batch to."""

from typing import Any

import torch
from torch import Tensor

from rl_contract import TokenShards

_current: TokenShards | None = None


def current() -> TokenShards | None:
    """The ranks that share the batch being computed; None where this rank holds all its tokens."""
    return _current


def enter(shards: TokenShards | None) -> None:
    """Say whose batch the next forward pass computes."""
    global _current
    _current = shards


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: TokenShards | None) -> Tensor:
        ctx.shards = shards
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        enter(ctx.shards)
        return grads[0], None


def announced(hidden: Tensor, shards: TokenShards | None) -> Tensor:
    """``hidden``, whose backward enters its batch again before any layer's.

    Layers that are computed again in the backward (activation recomputation) ask ``current`` a second time, when
    another batch may have been computed in between.
    """
    out: Tensor = _Return.apply(hidden, shards)
    return out
