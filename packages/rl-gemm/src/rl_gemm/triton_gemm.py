"""GPU GEMM kernels for the contracts gemm.column (chain) and gemm.row (tree(G)); one source for CUDA and ROCm.

Order: an fp32 accumulator per output and leaf starts at +0 and takes k in ascending order in steps of the matrix
unit's depth, tails padded with zeros; leaves are merged by the balanced binary tree in fp32, lower k on the left.
Bias is added to the root in fp32, then the value is rounded once (to nearest, ties to even). Tile sizes, warps,
stages, the number of programs and which of the kernels below runs are free: none of them moves a k to another
accumulator or changes a merge.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_contract.triton_launch import Prepared, without_base
from rl_contract.triton_launch import at as moved_to
from rl_gemm.plans import Kernel
from rl_gemm.triton_merge import can_start_early
from rl_gemm.triton_stamps import STAMPS, now, processor


@triton.jit
def _tile_origin(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Walk the tiles in groups of GROUP_M rows, so that neighbours share rows of ``b`` in the L2."""
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first + within % height, within // height


@triton.jit
def _leaf_start(k, leaf, leaf_k, K, FUSED: tl.constexpr):
    """Index in K of the leaf's k-th element; with FUSED=2 a leaf is its part of the first half, then of the second."""
    if FUSED == 1:
        return leaf * leaf_k + k
    half = leaf_k // 2
    return tl.where(k < half, leaf * half + k, K // 2 + leaf * half + (k - half))


@triton.jit
def _let_next_start():
    """The next kernel on the stream, if launched for it, may take its place now; it waits for what this one writes."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, False, 1)


@triton.jit(do_not_specialize=["M"])
def gemm_leaf_kernel(
    a, b, bias, out, M, N, K, leaf_k,
    stride_am, stride_ak, stride_bn, stride_bk, stride_out_leaf, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    FUSED: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A program per (tile, leaf): out[leaf, M, N] = sum over the leaf's k of a[M, k] * b[N, k]. Any stride."""
    leaf = tl.program_id(1)
    tile_m, tile_n = _tile_origin(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a + rows.to(tl.int64)[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
    if SWAP:
        b_ptrs = b + columns.to(tl.int64)[:, None] * stride_bn + ks[None, :].to(tl.int64) * stride_bk
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        b_ptrs = b + ks[:, None].to(tl.int64) * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_mask, column_mask = rows < M, columns < N
    for k in range(0, leaf_k, BLOCK_K):
        start = _leaf_start(k, leaf, leaf_k, K, FUSED).to(tl.int64)
        # with FUSED=2 a block never crosses from one half to the other: the launcher asks BLOCK_K to divide the half
        k_mask = ks < leaf_k - k
        if EVEN_K:
            a_tile = tl.load(a_ptrs + start * stride_ak, mask=row_mask[:, None], other=0.0)
        else:
            a_tile = tl.load(a_ptrs + start * stride_ak, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        if SWAP:
            if EVEN_K:
                b_tile = tl.load(b_ptrs + start * stride_bk, mask=column_mask[:, None], other=0.0)
            else:
                b_tile = tl.load(b_ptrs + start * stride_bk, mask=column_mask[:, None] & k_mask[None, :], other=0.0)
            acc = tl.dot(b_tile, a_tile.T, acc)
        else:
            if EVEN_K:
                b_tile = tl.load(b_ptrs + start * stride_bk, mask=column_mask[None, :], other=0.0)
            else:
                b_tile = tl.load(b_ptrs + start * stride_bk, mask=column_mask[None, :] & k_mask[:, None], other=0.0)
            acc = tl.dot(a_tile, b_tile, acc)
    if SWAP:
        acc = acc.T
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out + leaf.to(tl.int64) * stride_out_leaf + rows.to(tl.int64)[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["M"])
def gemm_tma_kernel(
    a_desc, b_desc, bias, out, scratch, M, N, K, stride_out_leaf, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    LEAVES: tl.constexpr, LEAF_GRID: tl.constexpr, FUSED: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
    SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, HELD: tl.constexpr, SLICES: tl.constexpr, EARLY: tl.constexpr,
    stamps=None,
):  # fmt: skip
    """Persistent programs over units of one (tile, leaf), operands through the tensor copy engine.

    LEAF_GRID: units are spread over programs and each writes its fp32 partial, as in ``gemm_leaf_kernel``. Otherwise
    a program takes all leaves of a tile in turn and joins them as a binary counter carries: finished sub-trees of the
    lowest HELD levels wait in registers, those above in ``scratch[program, level, BLOCK_M, BLOCK_N]``, which stays in
    the L2.

    ``stamps``: None, or int64 [programs, STAMPS] for a profile, as in ``gluon_tree``; place 2: the second step.
    """
    if stamps is not None:
        stamps += tl.program_id(0) * STAMPS
        tl.store(stamps, processor().to(tl.int64))
        tl.store(stamps + 1, now())
    if LEAF_GRID and EARLY:
        _let_next_start()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    leaf_k = K // LEAVES
    leaf_steps = tl.cdiv(leaf_k, BLOCK_K)
    TREE: tl.constexpr = LEAVES > 1 and not LEAF_GRID
    LEVELS: tl.constexpr = 0 if not TREE else (1 if LEAVES == 2 else (2 if LEAVES == 4 else (3 if LEAVES == 8 else 4)))
    STASHED: tl.constexpr = LEVELS - HELD if LEVELS > HELD else 0
    stash = scratch + program.to(tl.int64) * (STASHED * BLOCK_M * BLOCK_N)
    # a program of the tree walks whole tiles: its units are ``programs`` tiles apart, the leaves of a tile follow
    # each other
    if TREE:
        count = tl.cdiv(tiles - program, programs) * LEAVES
    else:
        count = tl.cdiv(tiles * LEAVES - program, programs)
    # one flat loop over all steps of all units, so that loads of the next unit are in flight during an epilogue
    unit = -1
    step = leaf_steps - 1
    row, column, leaf = 0, 0, 0
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TREE and HELD > 0:
        held0 = tl.zeros_like(acc)
    if LEVELS > 1 and HELD > 1:
        held1 = tl.zeros_like(acc)
    if LEVELS > 2 and HELD > 2:
        held2 = tl.zeros_like(acc)
    for i in tl.range(0, count * leaf_steps):
        if stamps is not None:
            if i == 1:
                tl.store(stamps + 2, now())
        step = tl.where(step == leaf_steps - 1, 0, step + 1)
        if step == 0:
            unit += 1
            if TREE:
                tile = program + (unit // LEAVES) * programs
                leaf = unit % LEAVES
            else:
                tile = (program + unit * programs) % tiles
                leaf = (program + unit * programs) // tiles
            tile_m, tile_n = _tile_origin(tile, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        k = _leaf_start(step * BLOCK_K, leaf, leaf_k, K, FUSED)
        if A_T:
            a_tile = a_desc.load([k, row]).T
        else:
            a_tile = a_desc.load([row, k])
        if B_T:
            b_tile = b_desc.load([k, column])
        else:
            b_tile = b_desc.load([column, k]).T
        if SWAP:
            acc = tl.dot(b_tile.T, a_tile.T, acc)
        else:
            acc = tl.dot(a_tile, b_tile, acc)
        if step == leaf_steps - 1:
            if stamps is not None:
                tl.store(stamps + 3, now())
                tl.store(stamps + 8 + unit % 8, now())
            done = leaf + 1
            to = out
            if not TREE:
                to = out + leaf.to(tl.int64) * stride_out_leaf  # type: ignore[attr-defined]
            # the counter's digits: a level with a finished sub-tree passes it up, an empty one takes the new one
            if TREE and HELD > 0:
                if done % 2 == 0:
                    acc = held0 + acc
                else:
                    held0 = acc
            if LEVELS > 1 and HELD > 1:
                if done % 2 == 0:
                    if done % 4 == 0:
                        acc = held1 + acc
                    else:
                        held1 = acc
            if LEVELS > 2 and HELD > 2:
                if done % 4 == 0:
                    if done % 8 == 0:
                        acc = held2 + acc
                    else:
                        held2 = acc
            root = acc.T if SWAP else acc
            if STASHED > 0:
                if done % (1 << HELD) == 0:
                    _stash_or_store(
                        root, done >> HELD, stash, bias, to, row, column, 0, M, N, stride_om,
                        LEAVES >> HELD, STASHED, BLOCK_M, BLOCK_N, BLOCK_N, SLICES, HAS_BIAS,
                    )  # fmt: skip
            elif TREE:
                if done == LEAVES:
                    _stash_or_store(
                        root, 1, stash, bias, to, row, column, 0, M, N, stride_om,
                        1, 0, BLOCK_M, BLOCK_N, BLOCK_N, SLICES, HAS_BIAS,
                    )  # fmt: skip
            else:
                _stash_or_store(
                    root, 1, stash, bias, to, row, column, 0, M, N, stride_om,
                    1, 0, BLOCK_M, BLOCK_N, BLOCK_N, SLICES, HAS_BIAS,
                )  # fmt: skip
            acc = tl.zeros_like(acc)
    if stamps is not None:
        tl.store(stamps + 4, now())


@triton.jit
def _stash_or_store(
    acc, done, stash, bias, out, row, column, at, M, N, stride_om,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    SLICES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """After sub-tree number ``done`` of PARTS: join it with those in the stash, youngest first, then stash it or
    store the root.

    Works on SLICES column slices in turn, so that one slice of a finished sub-tree is live beside the accumulator.
    """
    if SLICES > 1:
        HALF: tl.constexpr = WIDTH // 2
        low, high = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _stash_or_store(
            low, done, stash, bias, out, row, column, at, M, N, stride_om,
            PARTS, LEVELS, BLOCK_M, BLOCK_N, HALF, SLICES // 2, HAS_BIAS,
        )  # fmt: skip
        _stash_or_store(
            high, done, stash, bias, out, row, column, at + HALF, M, N, stride_om,
            PARTS, LEVELS, BLOCK_M, BLOCK_N, HALF, SLICES // 2, HAS_BIAS,
        )  # fmt: skip
    elif PARTS == 1:
        _store(acc, bias, out, row, column + at, M, N, stride_om, BLOCK_M, WIDTH, HAS_BIAS)
    else:
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + (at + tl.arange(0, WIDTH))[None, :]
        level = 0
        for below in tl.static_range(LEVELS):
            if done % (2 << below) == 0:
                acc = tl.load(stash + below * (BLOCK_M * BLOCK_N) + inner) + acc
                level = below + 1
        if done < PARTS:
            tl.store(stash + level * (BLOCK_M * BLOCK_N) + inner, acc)
        else:
            _store(acc, bias, out, row, column + at, M, N, stride_om, BLOCK_M, WIDTH, HAS_BIAS)


@triton.jit
def _store(
    acc, bias, out, row, column, M, N, stride_om, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr
):
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    ptrs = out + rows.to(tl.int64)[:, None] * stride_om + columns[None, :]
    tl.store(ptrs, acc.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def pinned(hip: bool) -> dict[str, int]:
    """Compiler options that would permute or regroup K on CDNA: fixed here, and no field of a plan."""
    return {"kpack": 1, "matrix_instr_nonkdim": 16} if hip else {}


def prepared(
    kernel: Kernel, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, leaves: int, fused: int, processors: int,
    stamps: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], None]:  # fmt: skip
    """``launch`` on any tensors of these shapes, strides, types and device that lie as these do, by 16 bytes."""
    (m, k), n = a.shape, b.shape[0]
    leaf_grid, device = out.dim() == 3, out.device
    tiles = triton.cdiv(m, kernel.block_m) * triton.cdiv(n, kernel.block_n)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, **pinned(torch.version.hip is not None)}
    fixed: dict[str, Any] = {
        "M": m, "N": n, "K": k, "stride_out_leaf": out.stride(0) if leaf_grid else 0, "stride_om": out.stride(-2),
        "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "GROUP_M": kernel.group_m,
        "FUSED": fused, "SWAP": kernel.swap, "HAS_BIAS": bias is not None,
    }  # fmt: skip
    if kernel.kind == "leaf":
        leaf_k = k // leaves
        fixed |= {"leaf_k": leaf_k, "EVEN_K": leaf_k % kernel.block_k == 0}
        fixed |= dict(zip(("stride_am", "stride_ak", "stride_bn", "stride_bk"), (*a.stride(), *b.stride())))
        return Prepared(gemm_leaf_kernel, (tiles, leaves), fixed, **options)
    programs = min(processors * kernel.per_sm, tiles * leaves if leaf_grid else tiles)
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    stashed = max(0, leaves.bit_length() - 1 - kernel.held) if not leaf_grid else 0
    room = programs * stashed * kernel.block_m * kernel.block_n
    fixed |= {
        "LEAVES": leaves, "LEAF_GRID": leaf_grid, "A_T": a_t, "B_T": b_t, "HELD": kernel.held, "SLICES": kernel.slices,
        "EARLY": can_start_early(), "stamps": stamps,
    }  # fmt: skip
    go = Prepared(gemm_tma_kernel, (programs,), fixed, **options)
    a_desc = without_base(_descriptor(a, a_t, kernel.block_m, kernel.block_k))
    b_desc = without_base(_descriptor(b, b_t, kernel.block_n, kernel.block_k))

    def run(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        scratch = torch.empty(room, dtype=torch.float32, device=device) if room else out
        go(moved_to(a_desc, a), moved_to(b_desc, b), bias, out, scratch)

    return run


def launch(
    kernel: Kernel, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, leaves: int, fused: int, processors: int,
    stamps: Tensor | None = None,
) -> None:  # fmt: skip
    """Run ``kernel`` on a [M, K] and b [N, K]. ``out`` is [M, N], or fp32 [leaves, M, N] for partial sums.

    ``stamps`` int64 [programs, STAMPS] takes the times of a profile; kernels of kind ``leaf`` note none.
    """
    prepared(kernel, a, b, bias, out, leaves, fused, processors, stamps)(a, b, bias, out)


def _descriptor(x: Tensor, transposed: bool, block_row: int, block_k: int) -> TensorDescriptor:
    if transposed:
        return TensorDescriptor.from_tensor(x.t(), [block_k, block_row])
    return TensorDescriptor.from_tensor(x, [block_row, block_k])
