"""Tile primitives shared by the attention kernels: loads, rounding, dots. Serves the contract ``attention``.

Every accumulator is one chain: products rounded, then added, in ascending index. Loops run over independent outputs, so
that vector width and unrolling leave the bits alone.
"""

import numpy as np

from rl_contract.arrays import widen
from rl_contract.jit import kernel

LOG2E_F32 = np.float32(1.4426950408889634)
LN2_F32 = np.float32(0.6931471805599453)
NEG_INF = np.float32(-np.inf)
# columns behind head_dim in the value tile and in O: the first holds the row sum, the rest fill a vector
SUM_COLUMNS = 16


@kernel
def load_row(source, start, out, width):
    """out[0:width] = the stored elements from ``start`` on, as fp32."""
    row = source[start : start + width]
    for d in range(width):
        out[d] = widen(row[d])


@kernel
def dot_tile(x, columns, out):
    """out[j] = chain over d ascending of x[d] * columns[d, j]; len(x) a multiple of 8."""
    width = out.shape[0]
    for j in range(width):
        out[j] = np.float32(0.0)
    for d in range(0, x.shape[0], 8):
        x0, x1, x2, x3 = x[d], x[d + 1], x[d + 2], x[d + 3]
        x4, x5, x6, x7 = x[d + 4], x[d + 5], x[d + 6], x[d + 7]
        c0, c1, c2, c3 = columns[d], columns[d + 1], columns[d + 2], columns[d + 3]
        c4, c5, c6, c7 = columns[d + 4], columns[d + 5], columns[d + 6], columns[d + 7]
        for j in range(width):
            a = out[j]
            a = a + x0 * c0[j]
            a = a + x1 * c1[j]
            a = a + x2 * c2[j]
            a = a + x3 * c3[j]
            a = a + x4 * c4[j]
            a = a + x5 * c5[j]
            a = a + x6 * c6[j]
            a = a + x7 * c7[j]
            out[j] = a


@kernel
def add_rows(weights, rows, first, last, out):
    """out[d] += weights[j] * rows[j, d] for j in [first, last) ascending."""
    width = out.shape[0]
    j = first
    while j + 8 <= last:
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        w4, w5, w6, w7 = weights[j + 4], weights[j + 5], weights[j + 6], weights[j + 7]
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        r4, r5, r6, r7 = rows[j + 4], rows[j + 5], rows[j + 6], rows[j + 7]
        for d in range(width):
            a = out[d]
            a = a + w0 * r0[d]
            a = a + w1 * r1[d]
            a = a + w2 * r2[d]
            a = a + w3 * r3[d]
            a = a + w4 * r4[d]
            a = a + w5 * r5[d]
            a = a + w6 * r6[d]
            a = a + w7 * r7[d]
            out[d] = a
        j += 8
    while j < last:
        w = weights[j]
        r = rows[j]
        for d in range(width):
            out[d] = out[d] + w * r[d]
        j += 1
