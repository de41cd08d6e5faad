"""CPU GEMM: contracts gemm.column (chain) and gemm.row (tree(G)), and the weight gradient's token blocks.

Order: each output has one fp32 accumulator per leaf, starting at +0; k ascends; multiply, then add, two roundings.
Leaves are joined by the balanced tree, lower k left, or folded left (token blocks). Bias and output type come in ops.
Tiles of 64 columns and up to 4 rows and blocks of 128 k only decide when a running sum rests in memory.
"""

import numba as nb
import numpy as np

from rl_contract.jit import kernel
from rl_gemm.simd import (
    COLUMNS,
    read_bf16,
    read_f32,
    tile1,
    tile2,
    tile3,
    tile4,
    transpose16_bf16,
    transpose16_f32,
    widen64_bf16,
    widen64_f32,
    write_f32,
)

DEPTH = 128  # k per panel: 128 x 64 fp32 stays in a 48 KiB L1
ROWS = 256  # rows per unit of work
TREE, FOLD = 0, 1


@nb.njit
def _fill(b, b_col, b_k, bf16, width, depth, panel):
    """panel[0:depth, 0:width] = b as fp32; the other columns keep what they held, since no one reads their sums."""
    size = 2 if bf16 else 4
    col, step = b_col * size, b_k * size
    if b_col == 1 and width == COLUMNS:
        for k in range(depth):
            if bf16:
                widen64_bf16(b + k * step, panel + k * (4 * COLUMNS))
            else:
                widen64_f32(b + k * step, panel + k * (4 * COLUMNS))
        return
    done_k, done_columns = 0, 0
    if b_k == 1:
        done_k, done_columns = depth // 16 * 16, width // 16 * 16
        for n in range(0, done_columns, 16):
            for k in range(0, done_k, 16):
                to = panel + 4 * (k * COLUMNS + n)
                if bf16:
                    transpose16_bf16(b + n * col + k * step, b_col, to)
                else:
                    transpose16_f32(b + n * col + k * step, b_col, to)
    for k in range(depth):
        for n in range(done_columns if k < done_k else 0, width):
            at = b + n * col + k * step
            write_f32(panel + 4 * (k * COLUMNS + n), read_bf16(at) if bf16 else read_f32(at))


@nb.njit
def _accumulate(acc, a, a_row, a_k, panel, rows, depth):
    m = 0
    while rows - m >= 4:
        tile4(acc + m * (4 * COLUMNS), a + m * a_row * 4, a_row, a_k, panel, depth)
        m += 4
    at, a_at = acc + m * (4 * COLUMNS), a + m * a_row * 4
    if rows - m == 1:
        tile1(at, a_at, a_row, a_k, panel, depth)
    elif rows - m == 2:
        tile2(at, a_at, a_row, a_k, panel, depth)
    elif rows - m == 3:
        tile3(at, a_at, a_row, a_k, panel, depth)


@kernel
def gemm(a, a_row, a_k, b, b_col, b_k, bf16, out, m, n, k, leaves, fused, merge, first, last):
    """out[m, n] = sum over k of a[m, k] * b[n, k], for the units ``first`` to ``last`` of 256 rows x 64 columns.

    ``a`` is the address of fp32 values with strides (a_row, a_k); ``b`` of bf16 bits or fp32 with strides (b_col, b_k);
    ``out`` is contiguous fp32. TREE: leaf g is the g-th part of each of the ``fused`` equal sections
    of k, in their order. FOLD: ``leaves`` is the length of a block, the last block may be short.
    """
    row_units = (m + ROWS - 1) // ROWS
    height = min(m, ROWS)
    count = leaves if merge == TREE else (k + leaves - 1) // leaves
    levels = 1
    while merge == TREE and (1 << (levels - 1)) < count:
        levels += 1
    if merge == FOLD:
        levels = 2
    panel = np.zeros((DEPTH, COLUMNS), np.float32)
    sums = np.empty((levels, height, COLUMNS), np.float32)
    size = 2 if bf16 else 4
    section = k // fused
    part = section // leaves if merge == TREE else leaves
    for unit in range(first, last):
        row0, col0 = unit % row_units * ROWS, unit // row_units * COLUMNS
        rows, width = min(ROWS, m - row0), min(COLUMNS, n - col0)
        a_unit, b_unit = a + row0 * a_row * 4, b + col0 * b_col * size
        if merge == FOLD:
            sums[1, :rows] = np.float32(0.0)
        for leaf in range(count):
            # the leaf grows in the lowest level free: bit l of ``leaf`` says that level l holds a finished sub-tree
            level = 0
            while merge == TREE and (leaf >> level) & 1:
                level += 1
            sums[level, :rows] = np.float32(0.0)
            acc = sums[level:].ctypes.data
            for s in range(fused):
                begin = s * section + leaf * part
                end = min(begin + part, k)
                for k0 in range(begin, end, DEPTH):
                    depth = min(DEPTH, end - k0)
                    _fill(b_unit + k0 * b_k * size, b_col, b_k, bf16, width, depth, panel.ctypes.data)
                    _accumulate(acc, a_unit + k0 * a_k * 4, a_row, a_k, panel.ctypes.data, rows, depth)
            if merge == FOLD:
                for i in range(rows):
                    for j in range(COLUMNS):
                        sums[1, i, j] = sums[1, i, j] + sums[0, i, j]
            else:
                for below in range(level):
                    # finished sub-trees join from the youngest to the oldest: the older one has the lower k
                    for i in range(rows):
                        for j in range(COLUMNS):
                            sums[level, i, j] = sums[below, i, j] + sums[level, i, j]
        root = sums[levels - 1]
        for i in range(rows):
            for j in range(width):
                write_f32(out + 4 * ((row0 + i) * n + col0 + j), root[i, j])
