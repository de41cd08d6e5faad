"""CPU RMSNorm: contract norm.

Order: x + residual rounded to the model's type first; 16 strided lanes over the row, each a chain, joined 8, 4, 2, 1
apart. Rounds after every fp32 operation (mean by division, rsqrt through fp64, x * rstd, times weight), then to the
type. The weight gradient adds rows in order, blocks of 64 rows, blocks folded left.
"""

import numba as nb
import numpy as np

from rl_contract.arrays import narrow, widen
from rl_contract.jit import kernel
from rl_contract.primitives import rsqrt_f32
from rl_norm.contract import LANES, ROW_BLOCK

_ZERO = np.float32(0.0)


@nb.njit
def _lane_dot(a, b, lanes):
    """sum of a[h] * b[h] over one row."""
    width = len(a)
    full = width // LANES * LANES
    for j in range(LANES):
        lanes[j] = _ZERO
    for h in range(0, full, LANES):
        for j in range(LANES):
            lanes[j] = lanes[j] + a[h + j] * b[h + j]
    for j in range(width - full):
        lanes[j] = lanes[j] + a[full + j] * b[full + j]
    apart = LANES // 2
    while apart:
        for j in range(apart):
            lanes[j] = lanes[j] + lanes[j + apart]
        apart //= 2
    return lanes[0]


@kernel
def forward(x, residual, weight, eps, add, stream, y, rstd, first, last):
    """Rows ``first`` to ``last`` of x [M, H]; with ``add`` also writes stream = x + residual, else reads x alone."""
    width = x.shape[1]
    row, lanes = np.empty(width, np.float32), np.empty(LANES, np.float32)
    for i in range(first, last):
        if add:
            for h in range(width):
                s = narrow(widen(x[i, h]) + widen(residual[i, h]), x[i, h])
                stream[i, h] = s
                row[h] = widen(s)
        else:
            for h in range(width):
                row[h] = widen(x[i, h])
        mean = _lane_dot(row, row, lanes) / np.float32(width)
        r = rsqrt_f32(mean + np.float32(eps))
        rstd[i] = r
        for h in range(width):
            y[i, h] = narrow(row[h] * r * widen(weight[h]), y[i, h])


@kernel
def grad_input(dy, stream, weight, rstd, dstream, add, dx, first, last):
    """dx = rstd * (g - xhat * mean(g * xhat)) (+ dstream), rounded once; g = dy * weight, xhat = stream * rstd."""
    width = dy.shape[1]
    g, xhat = np.empty(width, np.float32), np.empty(width, np.float32)
    lanes = np.empty(LANES, np.float32)
    for i in range(first, last):
        r = rstd[i]
        for h in range(width):
            g[h] = widen(dy[i, h]) * widen(weight[h])
            xhat[h] = widen(stream[i, h]) * r
        c = _lane_dot(g, xhat, lanes) / np.float32(width)
        for h in range(width):
            d = r * (g[h] - xhat[h] * c)
            if add:
                d = d + widen(dstream[i, h])
            dx[i, h] = narrow(d, dx[i, h])


@kernel
def grad_weight(dy, stream, rstd, heads, out, first, last):
    """out[leaf, h] = sum of dy * (stream * rstd) over the leaf's rows, for columns ``first`` to ``last``.

    Row i is head i % heads of its token; the heads are cut into len(out) equal leaves.
    """
    leaves, rows = len(out), len(dy)
    mine = heads // leaves
    part = np.empty(last - first, np.float32)
    for leaf in range(leaves):
        out[leaf, first:last] = _ZERO
        count = rows // heads * mine
        for start in range(0, count, ROW_BLOCK):
            part[:] = _ZERO
            for n in range(start, min(start + ROW_BLOCK, count)):
                i = n // mine * heads + leaf * mine + n % mine
                r = rstd[i]
                for h in range(first, last):
                    part[h - first] = part[h - first] + widen(dy[i, h]) * (widen(stream[i, h]) * r)
            for h in range(first, last):
                out[leaf, h] = out[leaf, h] + part[h - first]
