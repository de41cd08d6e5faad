"""Contract `collective`: the balanced binary tree over ranks, lower rank on the left, every addition in fp32.

Parts are taken pairwise, (0+1), (2+3), ..., then pairs of pairs, so a world of 2t continues the tree of a world of t.
The value is rounded once, at the root.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

WORLD_SIZES = (1, 2, 4, 8)


@cache
def _kernels() -> Any | None:
    try:
        from rl_comm import triton_tree
    except ImportError:
        return None
    return triton_tree


def tree_sum(parts: Sequence[torch.Tensor] | torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum ``parts`` (1, 2, 4 or 8 equal-shaped fp32 tensors, rank 0 first) by the tree; round once to ``out_dtype``.

    One stacked contiguous tensor on a GPU is summed by one kernel, if Triton is there; the bits are the same.
    """
    if isinstance(parts, torch.Tensor) and parts.is_cuda and parts.is_contiguous():
        kernels = _kernels()
        if kernels is not None:
            fused: torch.Tensor = kernels.tree_sum(parts, out_dtype or parts.dtype)
            return fused
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2])]
    return level[0] if out_dtype is None else level[0].to(out_dtype)
