"""Contract `collective`: the balanced binary tree over ranks, lower rank on the left, every addition in fp32.

Parts are taken pairwise, (0+1), (2+3), ..., then pairs of pairs, so a world of 2t continues the tree of a world of t.
The value is rounded once, at the root.
"""

from collections.abc import Sequence

import torch

WORLD_SIZES = (1, 2, 4, 8)


def tree_sum(parts: Sequence[torch.Tensor] | torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum ``parts`` (1, 2, 4 or 8 equal-shaped fp32 tensors, rank 0 first) by the tree; round once to ``out_dtype``."""
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2])]
    return level[0] if out_dtype is None else level[0].to(out_dtype)
