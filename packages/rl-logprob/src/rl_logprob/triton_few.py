"""Contract `logprob` on a GPU, gradients by hidden and weight for few tokens: every block of ids in one launch.

Hidden: for each block of ids in turn a chain over its ids from +0, added onto the fp32 sum of the blocks before it.
Weight: a chain over the tokens in packed order from +0, then added once to what is there, or rounded once. Tails are
padded with zeros. Block sizes, warps and stages move no k and regroup no sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HIP = torch.version.hip is not None
_OPTIONS = {"enable_fp_fusion": False} | ({"kpack": 1, "matrix_instr_nonkdim": 16} if _HIP else {})
_STAGES = 2 if _HIP else 3


@triton.jit(do_not_specialize=["T", "N"])
def hidden_kernel(
    d, weight, root, T, N, H, stride_d, stride_block, stride_w,
    GROUP_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """root fp32 [T, H] = (root, or +0 if FIRST) + one chain d [T, ids] weight [ids, H] per block of GROUP_N ids."""
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_mask, column_mask = (rows < T)[:, None], (columns < H)[None, :]
    ks = tl.arange(0, BLOCK_K)
    at = root + rows.to(tl.int64)[:, None] * H + columns[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    if not FIRST:
        total = tl.load(at, mask=row_mask & column_mask, other=0.0)
    steps = GROUP_N // BLOCK_K
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    # one flat loop over all blocks, so that loads of the next block are in flight when one ends
    for step in range(0, tl.cdiv(N, BLOCK_K)):
        ids = step * BLOCK_K + ks
        place = (step // steps).to(tl.int64) * stride_block + (step % steps) * BLOCK_K
        a_ptrs = d + place + rows.to(tl.int64)[:, None] * stride_d + ks[None, :]
        b_ptrs = weight + ids.to(tl.int64)[:, None] * stride_w + columns[None, :]
        a = tl.load(a_ptrs, mask=row_mask & (ids < N)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(ids < N)[:, None] & column_mask, other=0.0)
        acc = tl.dot(a, b, acc)
        if step % steps == steps - 1 or step == tl.cdiv(N, BLOCK_K) - 1:
            total = total + acc
            acc = tl.zeros_like(acc)
    tl.store(at, total, mask=row_mask & column_mask)


@triton.jit(do_not_specialize=["T", "N"])
def weight_kernel(
    d, hidden, out, T, N, H, stride_d, stride_block, stride_h,
    GROUP_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out [ids, H] = (out if ADD) + the chain d.T [ids, T] hidden [T, H], rounded to the type of out."""
    first = tl.program_id(1) * BLOCK_N
    ids = first + tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    id_mask, column_mask = ids < N, (columns < H)[None, :]
    place = (first // GROUP_N).to(tl.int64) * stride_block + first % GROUP_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for k in range(0, T, BLOCK_K):
        rows = k + ks
        row_mask = (rows < T)[:, None]
        a_ptrs = d + rows.to(tl.int64)[:, None] * stride_d + place[None, :]
        b_ptrs = hidden + rows.to(tl.int64)[:, None] * stride_h + columns[None, :]
        a = tl.load(a_ptrs, mask=row_mask & id_mask[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=row_mask & column_mask, other=0.0)
        acc = tl.dot(a.T, b, acc)
    at = out + ids.to(tl.int64)[:, None] * H + columns[None, :]
    mask = id_mask[:, None] & column_mask
    if ADD:
        acc = tl.load(at, mask=mask, other=0.0) + acc
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


def _strides(parts: list[Tensor]) -> tuple[int, int]:
    """Elements from row to row of a block of ids, and from block to block."""
    apart = int(parts[1].storage_offset() - parts[0].storage_offset()) if len(parts) > 1 else 0
    return parts[0].stride(0), apart


def add_hidden(parts: list[Tensor], weight: Tensor, root: Tensor, group_n: int, first: bool) -> None:
    """parts [T, ids of a block], all of group_n ids but the last; weight [N, H]; into root fp32 [T, H]."""
    (tokens, h), n = root.shape, len(weight)
    block_t = 64 if tokens <= 128 else 128
    block_h = 64 if tokens <= 256 else 128
    hidden_kernel[(triton.cdiv(h, block_h), triton.cdiv(tokens, block_t))](
        parts[0], weight, root, tokens, n, h, *_strides(parts), weight.stride(0), GROUP_N=group_n, BLOCK_T=block_t,
        BLOCK_H=block_h, BLOCK_K=64, FIRST=first,
        num_warps=4 if block_t * block_h <= 4096 else 8, num_stages=_STAGES, **_OPTIONS,
    )  # fmt: skip


def add_weight(parts: list[Tensor], hidden: Tensor, out: Tensor, group_n: int, add: bool) -> None:
    """parts as for ``add_hidden``; hidden [T, H]; into out [N, H], fp32 with ``add``, else any type."""
    n, h = out.shape
    weight_kernel[(triton.cdiv(h, 128), triton.cdiv(n, 128))](
        parts[0], hidden, out, len(hidden), n, h, *_strides(parts), hidden.stride(0), GROUP_N=group_n, BLOCK_N=128,
        BLOCK_H=128, BLOCK_K=64 if len(hidden) > 32 else 32, ADD=add, num_warps=8, num_stages=_STAGES, **_OPTIONS,
    )  # fmt: skip
