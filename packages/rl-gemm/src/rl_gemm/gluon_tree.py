"""Hopper kernel for tree(G), contracts gemm.row and gemm.column (input gradient); CUDA sm90 only.

Order: as in ``triton_gemm``: each leaf a chain from +0 with k ascending in steps of 16; leaves joined by the balanced
binary tree in fp32, lower k on the left; bias added to the root in fp32, one rounding. What differs is where finished
sub-trees wait: the two lowest levels in registers, a third there or in shared memory, so that a join costs neither a
spill nor a trip to the L2. With PARTS > 1 a program takes one of PARTS aligned sub-trees and leaves its fp32 root in a
workspace; the upper levels of the same tree join them afterwards.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_contract.triton_launch import Prepared, without_base
from rl_contract.triton_launch import at as moved_to
from rl_gemm.plans import Kernel
from rl_gemm.triton_stamps import STAMPS

# what a block may have on sm90
SHARED_BYTES = 232448


@gluon.constexpr_function
def deep(block_m, block_n, warps, leaves):
    """Whether the third level of finished sub-trees waits in shared memory: there is one, and registers are short."""
    return leaves > 4 and block_m * block_n > 32 * 32 * warps


@gluon.jit
def _tile_origin(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first + within % height, within // height


@gluon.jit
def _k_of(leaf, within, leaf_k, K, FUSED: gl.constexpr):
    """Index in K of a leaf's element; with FUSED=2 a leaf is its part of the first half, then of the second."""
    if FUSED == 1:
        return leaf * leaf_k + within
    half = leaf_k // 2
    return gl.where(within < half, leaf * half + within, K // 2 + leaf * half + (within - half))


@gluon.jit
def _now():
    """Nanoseconds since some start, the same on every multiprocessor; ticks coarsely."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _cycles():
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _processor():
    return gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_tiles(
    a_desc, b_desc, a_ring, b_ring, full, empty, M, N, K,
    GROUP_M: gl.constexpr, LEAVES: gl.constexpr, PARTS: gl.constexpr, FUSED: gl.constexpr, A_T: gl.constexpr,
    B_T: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The loading warp: every step of every unit of this program, as far ahead as the ring allows."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    leaf_k = K // LEAVES
    leaf_steps = leaf_k // BLOCK_K
    slot = 0
    # the first round through the ring finds every slot empty
    phase = 1
    tiles = tiles_m * tiles_n
    for unit in range(gl.program_id(0), tiles * PARTS, gl.num_programs(0)):
        tile_m, tile_n = _tile_origin(unit % tiles, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        first = unit // tiles * (LEAVES // PARTS)
        for leaf in range(LEAVES // PARTS):
            for step in range(leaf_steps):
                k = _k_of(first + leaf, step * BLOCK_K, leaf_k, K, FUSED)
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                if A_T:
                    tma.async_copy_global_to_shared(a_desc, [k, row], bar, a_ring.index(slot))
                else:
                    tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_ring.index(slot))
                if B_T:
                    tma.async_copy_global_to_shared(b_desc, [k, column], bar, b_ring.index(slot))
                else:
                    tma.async_copy_global_to_shared(b_desc, [column, k], bar, b_ring.index(slot))
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase = phase ^ 1


@gluon.jit
def _multiply_tiles(
    a_ring, b_ring, full, empty, stash, out_desc, bias, stamps, M, N, K,
    GROUP_M: gl.constexpr, LEAVES: gl.constexpr, PARTS: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
    HAS_BIAS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The other warps: the leaves of each unit in turn, joined as a binary counter carries, and the tile's way out."""
    WARPS_M: gl.constexpr = WARPS if 16 * WARPS <= BLOCK_M else BLOCK_M // 16
    WARPS_N: gl.constexpr = WARPS // WARPS_M
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS_M, WARPS_N], [16, BLOCK_N // WARPS_N, 16])
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    leaf_steps = K // LEAVES // BLOCK_K
    tiles = tiles_m * tiles_n
    mine: gl.constexpr = LEAVES // PARTS
    DEEP: gl.constexpr = deep(BLOCK_M, BLOCK_N, WARPS, mine)
    slot, phase, before, started = 0, 0, 0, False
    if stamps is not None:
        stamps += gl.program_id(0) * STAMPS
        gl.store(stamps + 1, _now())
        blocked = gl.to_tensor(0).to(gl.int64)
        began = _cycles()
    for unit in range(gl.program_id(0), tiles * PARTS, gl.num_programs(0)):
        held0 = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, acc_layout)
        held1 = held0
        held2 = held0
        root = held0
        for leaf in gl.static_range(mine):
            acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, acc_layout)
            for _step in range(leaf_steps):
                if stamps is not None:
                    blocked -= _cycles()
                mbarrier.wait(full.index(slot), phase)
                if stamps is not None:
                    blocked += _cycles()
                    if not started:
                        gl.store(stamps + 2, _now())
                if A_T:
                    a_tile = a_ring.index(slot).permute((1, 0))
                else:
                    a_tile = a_ring.index(slot)
                if B_T:
                    b_tile = b_ring.index(slot)
                else:
                    b_tile = b_ring.index(slot).permute((1, 0))
                acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
                # the step before is complete here, so its slot may take the next load
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                mbarrier.arrive(empty.index(before), count=1, pred=started)
                started = True
                before = slot
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase = phase ^ 1
            node = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            if stamps is not None:
                gl.store(stamps + 8 + leaf, _now())
            # a binary counter: its digits 0 and 1 are held in registers, digit 2 in shared memory
            if leaf % 2 == 0:
                held0 = node
            else:
                node = held0 + node
                if mine > 2:
                    if leaf % 4 == 1:
                        held1 = node
                    else:
                        node = held1 + node
                        if mine > 4:
                            if not DEEP:
                                if leaf % 8 == 3:
                                    held2 = node
                                else:
                                    node = held2 + node
                            elif leaf % 8 == 3:
                                # the last tile's output may still be on its way out of here
                                tma.store_wait(pendings=0)
                                stash.store(node)
                            else:
                                node = stash.load(acc_layout) + node
            root = node
        if stamps is not None:
            gl.store(stamps + 3, _now())
        tile_m, tile_n = _tile_origin(unit % tiles, tiles_m, tiles_n, GROUP_M)
        # a workspace holds whole tiles, part after part
        tile_m += unit // tiles * tiles_m
        if HAS_BIAS:
            columns = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc_layout))
            root = root + gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        # the stash is free by now; the copy engine takes the tile from there while the next one is multiplied
        staged = stash._reinterpret(out_desc.dtype, [BLOCK_M, BLOCK_N], out_desc.layout)
        tma.store_wait(pendings=0)
        staged.store(root.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [tile_m * BLOCK_M, tile_n * BLOCK_N], staged)
    tma.store_wait(pendings=0)
    if stamps is not None:
        gl.store(stamps + 4, _now())
        gl.store(stamps + 5, blocked)
        gl.store(stamps + 6, _cycles() - began)


@gluon.jit(do_not_specialize=["M"])
def gemm_tree_kernel(
    a_desc, b_desc, out_desc, bias, stamps, M, N, K,
    GROUP_M: gl.constexpr, LEAVES: gl.constexpr, PARTS: gl.constexpr, FUSED: gl.constexpr, A_T: gl.constexpr,
    B_T: gl.constexpr, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Persistent: one warp loads, WARPS warps multiply.

    ``stamps``: None, or int64 [programs, STAMPS] for a profile: multiprocessor; nanoseconds at the start, at the first
    loaded step, after the last sub-tree, at the end; cycles spent waiting for loads, and in all; from place 8 on,
    nanoseconds after each leaf.
    """
    if stamps is not None:
        gl.store(stamps + gl.program_id(0) * STAMPS, _processor().to(gl.int64))
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stash_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    if deep(BLOCK_M, BLOCK_N, WARPS, LEAVES // PARTS):
        stash = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_N], stash_layout)
    else:
        stash = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M, BLOCK_N], out_desc.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    # one warp loads, with the fewest registers that a warp may have, which leaves the rest to those that multiply
    gl.warp_specialize(
        [
            (_multiply_tiles, (a_ring, b_ring, full, empty, stash, out_desc, bias, stamps, M, N, K,
                               GROUP_M, LEAVES, PARTS, A_T, B_T, HAS_BIAS, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, WARPS)),
            (_load_tiles, (a_desc, b_desc, a_ring, b_ring, full, empty, M, N, K,
                           GROUP_M, LEAVES, PARTS, FUSED, A_T, B_T, STAGES, BLOCK_M, BLOCK_N, BLOCK_K)),
        ],
        [1],
        [24],
    )  # fmt: skip


def _descriptor(x: Tensor, transposed: bool, block_row: int, block_k: int) -> TensorDescriptor:
    shape = [block_k, block_row] if transposed else [block_row, block_k]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    return TensorDescriptor.from_tensor(x.t() if transposed else x, shape, layout)


def _out_descriptor(kernel: Kernel, out: Tensor) -> TensorDescriptor:
    kind = gl.float32 if out.dtype == torch.float32 else gl.bfloat16
    shape = [kernel.block_m, kernel.block_n]
    return TensorDescriptor.from_tensor(out, shape, gl.NVMMASharedLayout.get_default_for(shape, kind))


def stages_that_fit(kernel: Kernel, leaves: int, out_dtype: torch.dtype) -> int:
    """The kernel's stages, or as many as there is room for beside the stash of a part with ``leaves``."""
    in_stash = deep(kernel.block_m, kernel.block_n, kernel.warps, leaves)
    stash = kernel.block_m * kernel.block_n * (4 if in_stash else out_dtype.itemsize)
    # two barriers a stage, and the compiler's own few bytes for the hand-over between warps
    return min(kernel.stages, (SHARED_BYTES - stash - 256) // (2 * kernel.block_k * (kernel.block_m + kernel.block_n)))


def workspace(kernel: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """fp32 [parts, M in whole tiles, N]: where ``launch`` leaves the roots of ``kernel.parts`` sub-trees."""
    rows = triton.cdiv(a.shape[0], kernel.block_m) * kernel.block_m
    return torch.empty((kernel.parts, rows, b.shape[0]), dtype=torch.float32, device=a.device)


def prepared(
    kernel: Kernel, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, leaves: int, fused: int, processors: int,
    stamps: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], None]:  # fmt: skip
    """``launch`` on any tensors of these shapes, strides, types and device that lie as these do, by 16 bytes."""
    (m, k), n = a.shape, b.shape[0]
    units = triton.cdiv(m, kernel.block_m) * triton.cdiv(n, kernel.block_n) * kernel.parts
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    fixed = {
        "stamps": stamps, "M": m, "N": n, "K": k, "GROUP_M": kernel.group_m, "LEAVES": leaves, "PARTS": kernel.parts,
        "FUSED": fused, "A_T": a_t, "B_T": b_t, "HAS_BIAS": bias is not None,
        "STAGES": stages_that_fit(kernel, leaves // kernel.parts, out.dtype), "BLOCK_M": kernel.block_m,
        "BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "WARPS": kernel.warps,
    }  # fmt: skip
    go = Prepared(gemm_tree_kernel, (min(processors * kernel.per_sm, units),), fixed, num_warps=kernel.warps)
    a_desc = without_base(_descriptor(a, a_t, kernel.block_m, kernel.block_k))
    b_desc = without_base(_descriptor(b, b_t, kernel.block_n, kernel.block_k))
    out_desc = without_base(_out_descriptor(kernel, out.view(-1, n)))
    return lambda a, b, bias, out: go(moved_to(a_desc, a), moved_to(b_desc, b), moved_to(out_desc, out), bias)


def launch(kernel: Kernel, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, leaves: int, fused: int,
           processors: int, stamps: Tensor | None = None) -> None:  # fmt: skip
    """a [M, K], b [N, K] -> out [M, N], or the ``workspace`` of ``kernel.parts`` sub-trees.

    K is a multiple of block_k * leaves * fused; 1, 2, 4 or 8 leaves a part. ``stamps`` int64 [programs, STAMPS]
    takes the times of a profile.
    """
    prepared(kernel, a, b, bias, out, leaves, fused, processors, stamps)(a, b, bias, out)
