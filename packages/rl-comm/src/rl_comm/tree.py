"""Contract `collective`: the balanced binary tree over ranks, lower rank on the left, every addition in fp32.

Parts are taken pairwise, (0+1), (2+3), ..., then pairs of pairs, so a world of 2t continues the tree of a world of t.
The value is rounded once, at the root.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from rl_contract import ContractError
from rl_contract.communicator import sum_problem

WORLD_SIZES = (1, 2, 4, 8)


@cache
def _kernels() -> Any | None:
    try:
        from rl_comm import triton_tree
    except ImportError:
        return None
    return triton_tree


def _problem(parts: Any, out_dtype: Any) -> ContractError | None:
    stacked = isinstance(parts, torch.Tensor)
    if not stacked and not isinstance(parts, Sequence):
        return ContractError(f"tree_sum got a {type(parts).__name__}, supported: a list of tensors, or one, stacked")
    each = [parts] if stacked else parts
    for x in each:
        if (problem := sum_problem("tree_sum", x, out_dtype)) is not None:
            return problem
    count = len(parts) if not stacked or parts.dim() else 0
    if count not in WORLD_SIZES:
        return ContractError(f"tree_sum got {count} parts, supported: {WORLD_SIZES}; give one of each rank")
    if len({(x.shape, x.device) for x in each}) > 1:
        given = [f"{tuple(x.shape)} on {x.device}" for x in each]
        return ContractError(f"tree_sum got parts {given}, supported: one shape on one device; give all alike")
    return None


def tree_sum(parts: Sequence[torch.Tensor] | torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum ``parts`` (1, 2, 4 or 8 equal-shaped fp32 tensors, rank 0 first) by the tree; round once to ``out_dtype``.

    One stacked contiguous tensor on a GPU is summed by one kernel, if Triton is there; the bits are the same.

    Raises:
        ContractError: another number of parts, parts of another type or of several shapes or devices, or an
            ``out_dtype`` that is none of fp32, bf16 and fp16.
    """
    if (problem := _problem(parts, out_dtype)) is not None:
        raise problem
    if isinstance(parts, torch.Tensor) and parts.is_cuda and parts.is_contiguous():
        kernels = _kernels()
        if kernels is not None:
            fused: torch.Tensor = kernels.tree_sum(parts, out_dtype or parts.dtype)
            return fused
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2])]
    return level[0] if out_dtype is None else level[0].to(out_dtype)
