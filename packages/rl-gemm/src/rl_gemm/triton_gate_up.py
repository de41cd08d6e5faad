"""GPU gate_up followed by SwiGLU in one kernel, contracts gemm.column (chain) and swiglu; CUDA only.

Order: two fp32 accumulators, gate and up, each a chain from +0 with k ascending in the matrix unit's steps, as in
``triton_gemm``. Both are rounded to bf16, as the unfused layer stores them, and widened again; then SwiGLU as in
``triton_swiglu``, rounded once. So the bits are those of the two kernels in turn, and gate_up is never stored.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from rl_contract.triton_launch import Prepared, without_base
from rl_contract.triton_launch import at as moved_to
from rl_gemm.plans import Kernel
from rl_gemm.triton_gemm import _descriptor, _tile_origin
from rl_gemm.triton_swiglu import silu_times


@triton.jit(do_not_specialize=["M"])
def gate_up_swiglu_kernel(
    a_desc, b_desc, out, M, F, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Persistent: a [M, K], b [2F, K] = [gate; up] -> out [M, F], BLOCK_N columns of each a tile."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(F, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    # one flat loop over all steps of all tiles, so that loads of the next tile are in flight during an epilogue
    tile = program - programs
    step = steps - 1
    row, column = 0, 0
    if SWAP:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for _ in tl.range(0, tl.cdiv(tiles_m * tiles_n - program, programs) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            tile_m, tile_n = _tile_origin(tile, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        k = step * BLOCK_K
        a_tile = a_desc.load([row, k])
        # where the last tile of gate hangs over into up, its surplus columns are not stored
        gate_tile = b_desc.load([column, k])
        up_tile = b_desc.load([F + column, k])
        if SWAP:
            gate = tl.dot(gate_tile, a_tile.T, gate)
            up = tl.dot(up_tile, a_tile.T, up)
        else:
            gate = tl.dot(a_tile, gate_tile.T, gate)
            up = tl.dot(a_tile, up_tile.T, up)
        if step == steps - 1:
            kind: tl.constexpr = out.dtype.element_ty
            y = silu_times(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)).to(kind)
            if SWAP:
                y = y.T
            rows = row + tl.arange(0, BLOCK_M)
            columns = column + tl.arange(0, BLOCK_N)
            ptrs = out + rows.to(tl.int64)[:, None] * F + columns[None, :]
            tl.store(ptrs, y, mask=(rows < M)[:, None] & (columns < F)[None, :])
            gate = tl.zeros_like(gate)
            up = tl.zeros_like(up)


def prepared(
    kernel: Kernel, x: Tensor, weight: Tensor, out: Tensor, processors: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """``launch`` on any tensors of these shapes, strides, types and device that lie as these do, by 16 bytes."""
    (m, k), f = x.shape, out.shape[1]
    tiles = triton.cdiv(m, kernel.block_m) * triton.cdiv(f, kernel.block_n)
    fixed = {
        "M": m, "F": f, "K": k, "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k,
        "GROUP_M": kernel.group_m, "SWAP": kernel.swap,
    }  # fmt: skip
    go = Prepared(
        gate_up_swiglu_kernel, (min(processors * kernel.per_sm, tiles),), fixed, num_warps=kernel.warps,
        num_stages=kernel.stages, enable_fp_fusion=False,
    )  # fmt: skip
    x_desc = without_base(_descriptor(x, False, kernel.block_m, kernel.block_k))
    weight_desc = without_base(_descriptor(weight, False, kernel.block_n, kernel.block_k))
    return lambda x, weight, out: go(moved_to(x_desc, x), moved_to(weight_desc, weight), out)


def launch(kernel: Kernel, x: Tensor, weight: Tensor, out: Tensor, processors: int) -> None:
    """x [M, K], weight [2F, K] = [gate; up], rows dense and aligned for the copy engine -> out [M, F]."""
    prepared(kernel, x, weight, out, processors)(x, weight, out)
