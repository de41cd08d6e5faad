"""Contract `logprob` on a GPU, gradients by hidden and weight for few tokens: all blocks of ids in one launch.

Hidden: for each block of ids a chain over its ids from +0, kept in fp32; then the chains are added onto the fp32 sum of
the blocks before them, in id order. Weight: a chain over the tokens in packed order from +0, then added once to what is
there, or rounded once. Tails are padded with zeros. Block sizes, warps, stages, persistence and the way operands are
loaded move no k and regroup no sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.triton_launch import descriptor, launch

_HIP = torch.version.hip is not None
_OPTIONS = {"enable_fp_fusion": False} | ({"kpack": 1, "matrix_instr_nonkdim": 16} if _HIP else {})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One launch shape: rows, columns and depth of a block. ``per_sm`` 0: a program per block, through pointers."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_sm: int = 0
    slices: int = 1


def hidden_shape(tokens: int, copy_engine: bool) -> Shape:
    """Rows are tokens, columns elements of hidden, the depth ids."""
    rows = 64 if tokens <= 64 else 128
    if not copy_engine:
        return Shape(rows=rows, columns=64, depth=64, warps=4 if rows == 64 else 8, stages=2 if _HIP else 3)
    if rows == 64:
        return Shape(rows=64, columns=128, depth=64, warps=4, stages=4, per_sm=2, slices=4)
    return Shape(rows=128, columns=256, depth=64, warps=8, stages=3, per_sm=1, slices=8)


def weight_shape(tokens: int, copy_engine: bool) -> Shape:
    """Rows are ids, columns elements of hidden, the depth tokens."""
    depth = 64 if tokens > 32 else 32
    if not copy_engine:
        return Shape(rows=128, columns=128, depth=depth, warps=8, stages=2 if _HIP else 3)
    if tokens <= 512:
        # what is written counts: small blocks, of which one writes while another one loads
        return Shape(rows=64, columns=128, depth=depth, warps=4, stages=3, per_sm=2, slices=2)
    return Shape(rows=128, columns=128, depth=depth, warps=8, stages=3, per_sm=1, slices=4)


@triton.jit
def _store(
    acc, out, row, column, ROWS, COLUMNS, base,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] into (ADD: once onto) out [ROWS, COLUMNS] from element ``base`` on.

    A slice of columns at a time, which holds less in shared memory.
    """
    if SLICES > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        low, high = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _store(low, out, row, column, ROWS, COLUMNS, base, BLOCK_M, HALF, SLICES // 2, ADD)
        _store(high, out, row, column + HALF, ROWS, COLUMNS, base, BLOCK_M, HALF, SLICES // 2, ADD)
    else:
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        at = out + base + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        if ADD:
            acc = tl.load(at, mask=mask, other=0.0) + acc
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N"])
def hidden_kernel(
    d, weight, out, T, N, H, stride_d, stride_w,
    GROUP_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out fp32 [blocks, T, H] = the chain d [T, ids] weight [ids, H] of each block of GROUP_N ids."""
    row, column, block = tl.program_id(1) * BLOCK_T, tl.program_id(0) * BLOCK_H, tl.program_id(2)
    rows, columns = row + tl.arange(0, BLOCK_T), column + tl.arange(0, BLOCK_H)
    row_mask, column_mask = (rows < T)[:, None], (columns < H)[None, :]
    ids = block * GROUP_N + tl.arange(0, BLOCK_K)
    end = tl.minimum(N, (block + 1) * GROUP_N)
    a_ptrs = d + rows.to(tl.int64)[:, None] * stride_d + ids[None, :]
    b_ptrs = weight + ids.to(tl.int64)[:, None] * stride_w + columns[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for k in range(0, end - block * GROUP_N, BLOCK_K):
        left = ids < end - k
        a = tl.load(a_ptrs + k, mask=row_mask & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & column_mask, other=0.0)
        acc = tl.dot(a, b, acc)
        b_ptrs += BLOCK_K * stride_w
    _store(acc, out, row, column, T, H, block.to(tl.int64) * T * H, BLOCK_T, BLOCK_H, 1, False)


@triton.jit(do_not_specialize=["T", "N"])
def hidden_tma_kernel(
    d_desc, weight_desc, out, T, N, H,
    GROUP_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """``hidden_kernel`` by persistent programs, operands through the copy engine."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_t = tl.cdiv(T, BLOCK_T)
    tiles = tiles_t * tl.cdiv(H, BLOCK_H)
    # blocks of GROUP_N ids come first, a shorter one last
    whole = N // GROUP_N * tiles
    full_steps = GROUP_N // BLOCK_K
    last_steps = tl.cdiv(N % GROUP_N, BLOCK_K)
    units = whole + tl.minimum(last_steps, 1) * tiles
    mine = tl.cdiv(whole - program, programs)
    count = mine * full_steps + (tl.cdiv(units - program, programs) - mine) * last_steps
    unit = program - programs
    step, steps = 0, 1
    block, row, column = 0, 0, 0
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    # one flat loop over all steps of all blocks, so that loads of the next block are in flight when one ends
    for _ in tl.range(0, count):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            unit += programs
            steps = tl.where(unit < whole, full_steps, last_steps)
            # tokens go fastest: neighbours share rows of the weight in the L2
            block = unit // tiles
            row, column = unit % tiles % tiles_t * BLOCK_T, unit % tiles // tiles_t * BLOCK_H
        k = block * GROUP_N + step * BLOCK_K
        acc = tl.dot(d_desc.load([row, k]), weight_desc.load([k, column]), acc)
        if step == steps - 1:
            _store(acc, out, row, column, T, H, tl.cast(block, tl.int64) * T * H, BLOCK_T, BLOCK_H, SLICES, False)
            acc = tl.zeros_like(acc)


@triton.jit(do_not_specialize=["size", "blocks"])
def fold_kernel(parts, root, size, blocks, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """root fp32 [size] = (root, or +0 if FIRST) + parts[0] + parts[1] + ... from the left."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    if not FIRST:
        total = tl.load(root + at, mask=mask, other=0.0)
    part = parts + at
    for _ in range(0, blocks):
        total += tl.load(part, mask=mask, other=0.0)
        part += size
    tl.store(root + at, total, mask=mask)


@triton.jit(do_not_specialize=["T", "N"])
def weight_kernel(
    d, hidden, out, T, N, H, stride_d, stride_h,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out [ids, H] = (out if ADD) + the chain d.T [ids, T] hidden [T, H], rounded to the type of out."""
    row, column = tl.program_id(1) * BLOCK_N, tl.program_id(0) * BLOCK_H
    ids, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_H)
    id_mask, column_mask = ids < N, (columns < H)[None, :]
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for k in range(0, T, BLOCK_K):
        rows = k + ks
        row_mask = (rows < T)[:, None]
        a_ptrs = d + rows.to(tl.int64)[:, None] * stride_d + ids[None, :]
        b_ptrs = hidden + rows.to(tl.int64)[:, None] * stride_h + columns[None, :]
        a = tl.load(a_ptrs, mask=row_mask & id_mask[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=row_mask & column_mask, other=0.0)
        acc = tl.dot(a.T, b, acc)
    _store(acc, out, row, column, N, H, 0, BLOCK_N, BLOCK_H, 1, ADD)


@triton.jit(do_not_specialize=["T", "N"])
def weight_tma_kernel(
    d_desc, hidden_desc, out, T, N, H,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """``weight_kernel`` by persistent programs, operands through the copy engine."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_h = tl.cdiv(H, BLOCK_H)
    steps = tl.cdiv(T, BLOCK_K)
    count = tl.cdiv(tl.cdiv(N, BLOCK_N) * tiles_h - program, programs) * steps
    tile = program - programs
    step = steps - 1
    row, column = 0, 0
    acc = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for _ in tl.range(0, count):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            row, column = tile // tiles_h * BLOCK_N, tile % tiles_h * BLOCK_H
        acc = tl.dot(d_desc.load([step * BLOCK_K, row]).T, hidden_desc.load([step * BLOCK_K, column]), acc)
        if step == steps - 1:
            _store(acc, out, row, column, N, H, 0, BLOCK_N, BLOCK_H, SLICES, ADD)
            acc = tl.zeros_like(acc)


def add_hidden(
    d: Tensor, weight: Tensor, root: Tensor, parts: Tensor, group_n: int, first: bool, processors: int, shape: Shape
) -> None:
    """d [T, N] and weight [N, H], rows contiguous, into root fp32 [T, H]; ``parts`` is room for fp32 [blocks, T, H]."""
    (tokens, h), n = root.shape, len(weight)
    blocks = triton.cdiv(n, group_n)
    tiles = (triton.cdiv(h, shape.columns), triton.cdiv(tokens, shape.rows), blocks)
    flags = {"GROUP_N": group_n, "BLOCK_T": shape.rows, "BLOCK_H": shape.columns, "BLOCK_K": shape.depth}
    options = {"num_warps": shape.warps, "num_stages": shape.stages, **_OPTIONS}
    if shape.per_sm:
        grid = (min(processors * shape.per_sm, tiles[0] * tiles[1] * tiles[2]), 1, 1)
        a = descriptor(d, [shape.rows, shape.depth])
        b = descriptor(weight, [shape.depth, shape.columns])
        launch(hidden_tma_kernel, grid, (a, b, parts, tokens, n, h), {**flags, "SLICES": shape.slices}, **options)
    else:
        launch(hidden_kernel, tiles, (d, weight, parts, tokens, n, h, d.stride(0), weight.stride(0)), flags, **options)
    size = tokens * h
    constants = {"FIRST": first, "BLOCK": 1024}
    launch(fold_kernel, (triton.cdiv(size, 1024), 1, 1), (parts, root, size, blocks), constants, num_warps=4)


def add_weight(d: Tensor, hidden: Tensor, out: Tensor, add: bool, processors: int, shape: Shape) -> None:
    """d [T, N] and hidden [T, H], rows contiguous, into out [N, H], fp32 with ``add``, else any type."""
    n, h = out.shape
    tiles = (triton.cdiv(h, shape.columns), triton.cdiv(n, shape.rows), 1)
    flags = {"BLOCK_N": shape.rows, "BLOCK_H": shape.columns, "BLOCK_K": shape.depth, "ADD": add}
    options = {"num_warps": shape.warps, "num_stages": shape.stages, **_OPTIONS}
    tokens = hidden.shape[0]
    if shape.per_sm:
        grid = (min(processors * shape.per_sm, tiles[0] * tiles[1]), 1, 1)
        a = descriptor(d, [shape.depth, shape.rows])
        b = descriptor(hidden, [shape.depth, shape.columns])
        launch(weight_tma_kernel, grid, (a, b, out, tokens, n, h), {**flags, "SLICES": shape.slices}, **options)
    else:
        launch(weight_kernel, tiles, (d, hidden, out, tokens, n, h, d.stride(0), hidden.stride(0)), flags, **options)
