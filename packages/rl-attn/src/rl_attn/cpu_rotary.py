"""Rotation and the cos/sin table on the CPU, contract ``rotary``, and the norm in front of it, contract ``norm``.

Rotation: two fp32 products, then one sum or difference, one rounding to the model's type. Table: pi/2 reduction in
three parts and Taylor series in fp64, rounded once to fp32; no libm, so that every machine builds the same table.
Norm: squares in 16 strided lanes, each a chain, joined 8, 4, 2, 1 apart; every fp32 operation rounded, then once.
"""

import math

import numpy as np

from rl_contract.arrays import narrow, widen
from rl_contract.jit import kernel
from rl_contract.primitives import rsqrt_f32

# pi/2 = A + B + C; A and B have 33 bits, so that their products with a quotient below 2**20 are exact
_PIO2_A = 1.57079632673412561417e00
_PIO2_B = 6.07710050630396597660e-11
_PIO2_C = 2.02226624879595063154e-21
_TWO_OVER_PI = 0.63661977236758134308
_S3, _S5, _S7, _S9, _S11, _S13, _S15, _S17 = ((-1.0) ** k / math.factorial(2 * k + 1) for k in range(1, 9))
_C2, _C4, _C6, _C8, _C10, _C12, _C14, _C16 = ((-1.0) ** k / math.factorial(2 * k) for k in range(1, 9))


@kernel
def fill_table(inv_freq, factor, cos, sin):
    """cos, sin fp32 [P, F] of position * inv_freq[f] (fp64, angle below 2**20), both times ``factor`` in fp64."""
    for p in range(cos.shape[0]):
        for f in range(cos.shape[1]):
            angle = np.float64(p) * inv_freq[f]
            n = np.floor(angle * _TWO_OVER_PI + 0.5)
            r = ((angle - n * _PIO2_A) - n * _PIO2_B) - n * _PIO2_C
            z = r * r
            s = _S17 * z + _S15
            s = s * z + _S13
            s = s * z + _S11
            s = s * z + _S9
            s = s * z + _S7
            s = s * z + _S5
            s = s * z + _S3
            s = r + r * (z * s)
            c = _C16 * z + _C14
            c = c * z + _C12
            c = c * z + _C10
            c = c * z + _C8
            c = c * z + _C6
            c = c * z + _C4
            c = c * z + _C2
            c = 1.0 + z * c
            quadrant = np.int64(n) & 3
            big_c = s if quadrant & 1 else c
            big_s = c if quadrant & 1 else s
            cos[p, f] = np.float32((-big_c if quadrant == 1 or quadrant == 2 else big_c) * factor)
            sin[p, f] = np.float32((-big_s if quadrant >= 2 else big_s) * factor)


@kernel
def rotate(x, strides, positions, cos, sin, sign, out):
    """out [T, heads, D]; x flat storage with strides int64 [2] (token, head); sign +1 rotates, -1 rotates back."""
    half = cos.shape[1]
    for t in range(out.shape[0]):
        cos_row, sin_row = cos[positions[t]], sin[positions[t]]
        for h in range(out.shape[1]):
            at = t * strides[0] + h * strides[1]
            row = x[at : at + out.shape[2]]
            y = out[t, h]
            low, high, y_low, y_high = row[:half], row[half : 2 * half], y[:half], y[half : 2 * half]
            for i in range(half):
                x1, x2 = widen(low[i]), widen(high[i])
                s = sin_row[i] * sign
                y_low[i] = narrow(x1 * cos_row[i] - x2 * s, y_low[i])
                y_high[i] = narrow(x2 * cos_row[i] + x1 * s, y_high[i])
            for i in range(2 * half, out.shape[2]):
                y[i] = row[i]
    return 0


@kernel
def norm(x, strides, weight, eps, out):
    """out [T, heads, D] = x * rsqrt(mean(x * x) + eps) * weight; x flat storage with strides int64 [2]."""
    width = out.shape[2]
    lanes = np.empty(16, np.float32)
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            at = t * strides[0] + h * strides[1]
            row = x[at : at + width]
            lanes[:] = np.float32(0.0)
            for i in range(width):
                value = widen(row[i])
                lanes[i % 16] = lanes[i % 16] + value * value
            apart = 8
            while apart:
                for j in range(apart):
                    lanes[j] = lanes[j] + lanes[j + apart]
                apart //= 2
            scale = rsqrt_f32(lanes[0] / np.float32(width) + np.float32(eps))
            for i in range(width):
                out[t, h, i] = narrow(widen(row[i]) * scale * widen(weight[i]), out[t, h, i])
    return 0
