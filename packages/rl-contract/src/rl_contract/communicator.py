"""What an operator may ask of its peers. rl-comm implements it; ``SingleRank`` is the world of one."""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Communicator(Protocol):
    """Peers in a fixed order. Every reduction is the balanced tree over ranks, lower rank on the left, in fp32."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Sum fp32 ``partial`` by the tree, round once to ``out_dtype`` (default fp32). Same bits on every rank."""
        ...

    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This rank's equal slice along ``dim`` of what ``all_reduce`` would give."""
        ...

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        """Concatenate equal-shaped ``x`` of every rank along ``dim``, rank 0 first. Moves bytes, any dtype."""
        ...


class SingleRank:
    """A world of one rank: every collective is the identity, with the same rounding."""

    rank = 0
    world_size = 1

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return partial if out_dtype is None else partial.to(out_dtype)

    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.all_reduce(partial, out_dtype=out_dtype)

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        return x
