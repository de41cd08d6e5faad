"""Contract `collective` on a GPU: the balanced tree over ranks, fp32, lower rank on the left, one rounding at the root.

Each element is one thread's own chain of additions in the order written below, so no launch shape can change it.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def tree_sum_kernel(parts, out, n, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """parts fp32 [WORLD, n] -> out [n]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < n
    # one step after another in 64 bits: a multiple of n may leave 32
    total = tl.load(parts + at, held)
    row = at
    if WORLD >= 2:
        row += n
        total += tl.load(parts + row, held)
    if WORLD >= 4:
        row += n
        left = tl.load(parts + row, held)
        row += n
        total += left + tl.load(parts + row, held)
    if WORLD >= 8:
        row += n
        first = tl.load(parts + row, held)
        row += n
        first += tl.load(parts + row, held)
        row += n
        second = tl.load(parts + row, held)
        row += n
        second += tl.load(parts + row, held)
        total += first + second
    tl.store(out + at, total.to(out.dtype.element_ty), held)


def tree_sum(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """parts fp32 [world, ...], contiguous -> [...] of ``out_dtype``."""
    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    n = out.numel()
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        tree_sum_kernel[grid](parts, out, n, WORLD=parts.shape[0], BLOCK=_BLOCK, num_warps=8)
    return out
