"""StrictOptimizer on a GPU: one pass a parameter for AdamW, and squares summed in an order that sizes alone decide.

AdamW is the CPU's sequence: every multiplication, addition, IEEE division and square root is rounded by itself, none
contracted, so that both devices have the same bits. Squares are exact in fp64; a program sums a block of BLOCK elements
of a leaf in the leaf's own order: lane j adds elements j, j + LANES, ... in turn, then neighbouring lanes are joined,
then neighbours of the results. A leaf's blocks are summed likewise. Every step is written out: a reduction over many
elements would add as the registers hold them, and how they do follows from how the shard lies in memory.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ADAMW_BLOCK = 2048
_SQUARES_BLOCK = 8192
_LANES = 1024


@triton.jit
def _join_lanes(lanes, LANES: tl.constexpr):
    """Sum of [LANES], neighbours first. Two elements at a time: one addition has one result, whatever the layout."""
    if LANES == 2:
        return tl.sum(lanes, 0)
    else:
        return _join_lanes(tl.sum(lanes.reshape(LANES // 2, 2), 1), LANES // 2)


@triton.jit
def adamw_kernel(
    master, exp_avg, exp_avg_sq, grad, parameter, n, coef, b1, rest1, b2, rest2, root2, eps, keep, size,
    CLIP: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < n
    g = tl.load(grad + at, held)
    if CLIP:
        g = g * coef
    m = tl.load(exp_avg + at, held) * b1
    m = m + g * rest1
    v = tl.load(exp_avg_sq + at, held) * b2
    v = v + (g * g) * rest2
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root2) + eps
    w = tl.load(master + at, held)
    if DECAY:
        w = w * keep
    w = w - tl.div_rn(m, denominator) * size
    tl.store(exp_avg + at, m, held)
    tl.store(exp_avg_sq + at, v, held)
    tl.store(master + at, w, held)
    tl.store(parameter + at, w.to(parameter.dtype.element_ty), held)


@triton.jit
def squares_kernel(
    grad, sums, length, section, section_stride, columns, row_stride, leaf_stride, blocks,
    STRIDED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """sums fp64 [leaves, blocks]; element i of a leaf lies in section i // section, there in row-major order."""
    leaf, block = tl.program_id(1), tl.program_id(0)
    lanes = tl.zeros([LANES], tl.float64)
    for step in tl.static_range(BLOCK // LANES):
        at = block.to(tl.int64) * BLOCK + step * LANES + tl.arange(0, LANES)
        held = at < length
        second = at >= section
        inner = tl.where(second, at - section, at)
        if STRIDED:
            # 64-bit division would cost more than the memory traffic
            short = inner.to(tl.int32) if NARROW else inner
            inner = (short // columns).to(tl.int64) * row_stride + short % columns
        place = leaf.to(tl.int64) * leaf_stride + tl.where(second, section_stride, 0) + inner
        x = tl.load(grad + place, held, other=0.0).to(tl.float64)
        lanes += x * x
    tl.store(sums + leaf * blocks + block, _join_lanes(lanes, LANES))


@triton.jit
def fold_kernel(sums, out, blocks, LANES: tl.constexpr):
    """out fp64 [leaves]: lane j adds blocks j, j + LANES, ... in turn, then lanes are joined."""
    leaf = tl.program_id(0)
    lanes = tl.zeros([LANES], tl.float64)
    for begin in range(0, blocks, LANES):
        at = begin + tl.arange(0, LANES)
        lanes += tl.load(sums + leaf * blocks + at, at < blocks, other=0.0)
    tl.store(out + leaf, _join_lanes(lanes, LANES))


@dataclass(frozen=True, kw_only=True)
class Step:
    """Scalars of one AdamW step, as Python numbers; each is rounded to fp32 once."""

    coef: float
    b1: float
    b2: float
    size: float
    root2: float
    eps: float


def adamw(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, parameter: Tensor, step: Step,
          keep: float) -> None:  # fmt: skip
    """Update all in place; ``grad`` is only read. Tensors are contiguous and of one shape."""
    n = master.numel()
    if n == 0:
        return
    adamw_kernel[(triton.cdiv(n, _ADAMW_BLOCK),)](
        master, exp_avg, exp_avg_sq, grad, parameter, n, step.coef, step.b1, 1 - step.b1, step.b2, 1 - step.b2,
        step.root2, step.eps, keep, step.size,
        CLIP=step.coef < 1.0, DECAY=keep != 1.0, BLOCK=_ADAMW_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def square_sums(grad: Tensor, out: Tensor, dim: int | None, fused: int) -> None:
    """out fp64 [leaves]: sums of squares of the equal parts of ``grad`` along ``dim``.

    ``fused`` 2 says that rows are [gate; up] and a leaf is the same slice of both; a leaf of columns has one section.
    """
    leaves, n = out.numel(), grad.numel()
    if n == 0:
        out.zero_()
        return
    length = n // leaves
    section = section_stride = columns = row_stride = leaf_stride = length
    if dim == 1 and leaves > 1:
        row_stride = grad.shape[1]
        columns = leaf_stride = row_stride // leaves
    elif fused == 2:
        section = leaf_stride = length // 2
        section_stride = n // 2
    blocks = triton.cdiv(length, _SQUARES_BLOCK)
    sums = torch.empty((leaves, blocks), dtype=torch.float64, device=grad.device)
    squares_kernel[(blocks, leaves)](
        grad, sums, length, section, section_stride, columns, row_stride, leaf_stride, blocks,
        STRIDED=row_stride != columns,
        NARROW=length < 2**31 - _SQUARES_BLOCK,
        BLOCK=_SQUARES_BLOCK, LANES=_LANES, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    fold_kernel[(leaves,)](sums, out, blocks, LANES=_LANES, num_warps=4, enable_fp_fusion=False)
