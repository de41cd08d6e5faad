"""IEEE-defined elementary functions as Numba functions: the same bits on every CPU, in every loop, at every width.

Only rounded additions, multiplications and divisions, comparisons and exact scalings by powers of two are used, none
of them contracted, so a compiler has no freedom: vectorised, unrolled and scalar forms agree. libm and SVML are never
called.

Each function works in fp64 and rounds once to fp32, which leaves an error below 0.500001 ulp of fp32.
NaN in gives NaN out.
"""

import math

import numba as nb
import numpy as np

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# Taylor coefficients of exp(r ln 2): at |r| <= 0.5 the first omitted term is below 2**-60
_C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13 = (LN2**k / math.factorial(k) for k in range(1, 14))
_SQRT2 = 1.4142135623730951


@nb.njit(inline="always")
def _pow2(n: int) -> float:
    """2**n exactly, for n in [-1022, 1023]."""
    return np.int64((n + 1023) << 52).view(np.float64)


@nb.njit(inline="always")
def exp2_f64(x: float) -> float:
    """2**x in fp64; x is clamped to [-1000, 1000], which fp32 callers never see."""
    x = min(max(x, -1000.0), 1000.0) if x == x else x
    n = np.floor(x + 0.5)
    r = x - n
    p = _C13 * r + _C12
    p = p * r + _C11
    p = p * r + _C10
    p = p * r + _C9
    p = p * r + _C8
    p = p * r + _C7
    p = p * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _C1
    p = p * r + 1.0
    # a NaN must not reach the integer conversion, whose result would be undefined
    return p * _pow2(np.int64(n if n == n else 0.0))


@nb.njit(inline="always")
def exp2_f32(x: float) -> np.float32:
    """2**x rounded to fp32; 0 for -inf, inf at 128 and above."""
    return np.float32(exp2_f64(np.float64(x)))


@nb.njit(inline="always")
def exp_f32(x: float) -> np.float32:
    """e**x rounded to fp32."""
    return np.float32(exp2_f64(np.float64(x) * LOG2E))


@nb.njit(inline="always")
def log_f64(x: float) -> float:
    """ln(x) in fp64 for normal positive x; -inf at 0, NaN below, inf at inf."""
    if x == 0.0:
        return -np.inf
    if not x > 0.0:
        return np.nan
    if x == np.inf:
        return x
    b = np.float64(x).view(np.int64)
    e = (b >> 52) - 1023
    m = np.int64((b & 0x000FFFFFFFFFFFFF) | (1023 << 52)).view(np.float64)
    if m > _SQRT2:
        m = m * 0.5
        e = e + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # atanh series, |s| <= 0.1716: the term in s**23 is below 2**-60
    p = z * (1.0 / 21.0) + 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    p = p * z
    return np.float64(e) * LN2 + (2.0 * s + 2.0 * s * p)


@nb.njit(inline="always")
def log_f32(x: float) -> np.float32:
    """ln(x) rounded to fp32; every fp32 denormal is normal in fp64."""
    return np.float32(log_f64(np.float64(x)))


@nb.njit(inline="always")
def rsqrt_f32(x: float) -> np.float32:
    """1/sqrt(x) through fp64, rounded once to fp32."""
    return np.float32(1.0 / np.sqrt(np.float64(x)))


@nb.njit(inline="always")
def bf16_to_f32(u: int) -> np.float32:
    """The fp32 value of a bf16 bit pattern held in a uint16."""
    return np.uint32(np.uint32(u) << np.uint32(16)).view(np.float32)


@nb.njit(inline="always")
def f32_to_bf16(x: float) -> np.uint16:
    """The bf16 bit pattern nearest to ``x``, ties to even, as uint16; every NaN becomes the quiet NaN 0x7fc0."""
    b = np.float32(x).view(np.uint32)
    rounded = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
    return np.uint16((rounded if x == x else np.uint32(0x7FC00000)) >> np.uint32(16))
