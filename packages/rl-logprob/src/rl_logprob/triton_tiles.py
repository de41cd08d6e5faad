"""Contract `logprob` on a GPU: the one function of a vocabulary tile, and the elementary functions it is made of.

A tile is 128 ids. Its maximum is exact and its sums are exact integers: every term is rounded to a multiple of 2**-40
on its own and split into two int32 parts, so register layout, warps and tile shape cannot show. The elementary
functions are IEEE additions, multiplications and explicit fma only: the same bits on every GPU. Launch everything here
with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

# ids in a tile: a constant of the contract, and what one block of columns holds
STAT_TILE = 128
# the smallest temperature: fp32 has not all bits of what is smaller
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum_along(x, axis: tl.constexpr):
    """Exact maximum; NaN if there is one."""
    return tl.reduce(x, axis, _larger)


@triton.jit
def exp_f32(x):
    """e**x for x in [-87, 1]; within 1.1 ulp; a NaN must be caught elsewhere.

    n = nearest integer to x*log2(e) by one fma with 1.5*2**23; r = x - n*ln2 in two fmas; degree 6 by fmas; times 2**n
    exactly.
    """
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    scale = ((shifted.to(tl.int32, bitcast=True) + (127 - 0x4B400000)) << 23).to(tl.float32, bitcast=True)
    return p * scale


@triton.jit
def exp2_f64(x):
    """2**x in fp64 for x in [-1000, 0], the operations of ``rl_contract.primitives.exp2_f64``."""
    n = tl.floor(x + 0.5)
    r = x - n
    p = r * 1.3691488853904124e-12 + 2.5678435993488196e-11
    p = p * r + 4.44553827187081e-10
    p = p * r + 7.054911620801121e-09
    p = p * r + 1.0178086009239696e-07
    p = p * r + 1.3215486790144305e-06
    p = p * r + 1.5252733804059838e-05
    p = p * r + 0.00015403530393381606
    p = p * r + 0.0013333558146428441
    p = p * r + 0.009618129107628477
    p = p * r + 0.055504108664821576
    p = p * r + 0.2402265069591007
    p = p * r + 0.6931471805599453
    p = p * r + 1.0
    scale = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return p * scale


@triton.jit
def log_f64(x):
    """ln(x) in fp64 for normal positive x, the operations of ``rl_contract.primitives.log_f64``."""
    b = x.to(tl.int64, bitcast=True)
    e = (b >> 52) - 1023
    m = ((b & 0x000FFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True)
    large = m > 1.4142135623730951
    m = tl.where(large, m * 0.5, m)
    e = tl.where(large, e + 1, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * 0.047619047619047616 + 0.05263157894736842
    p = p * z + 0.058823529411764705
    p = p * z + 0.06666666666666667
    p = p * z + 0.07692307692307693
    p = p * z + 0.09090909090909091
    p = p * z + 0.1111111111111111
    p = p * z + 0.14285714285714285
    p = p * z + 0.2
    p = p * z + 0.3333333333333333
    p = p * z
    return e.to(tl.float64) * 0.6931471805599453 + (2.0 * s + 2.0 * s * p)


@triton.jit
def row_temperature(temperature, rows, row_mask, UNIT: tl.constexpr):
    """fp32 temperature of each row; NaN where it is not positive, finite and normal, which makes the row NaN."""
    if UNIT:
        return tl.full(rows.shape, 1.0, tl.float32)
    t = tl.load(temperature + rows, mask=row_mask, other=1.0)
    return tl.where((t >= TINY) & (t < float("inf")), t, float("nan"))


@triton.jit
def scaled(logits, temperature, UNIT: tl.constexpr):
    """x = logit / temperature, IEEE."""
    if UNIT:
        return logits
    return tl.div_rn(logits, temperature)


# A term e <= 1 is hi * 2**-20 + lo * 2**-40, both rounded to nearest even: adding 12 leaves e from 2**-20 up in the
# last places of the significand, adding 1.5 * 2**-17 the exact rest from 2**-40 up. Sums of such bit patterns wrap;
# once the patterns of the two constants are taken off again, what remains fits an int32.
@triton.jit
def term_parts(e):
    """Bit patterns int32 whose sums over a tile ``whole_sum`` turns into the fixed point sum of ``e``."""
    high = e + 12.0
    low = (e - (high - 12.0)) + 1.1444091796875e-05
    return high.to(tl.int32, bitcast=True), low.to(tl.int32, bitcast=True)


@triton.jit
def whole_sum(high, low):
    """Sums int32 of the 128 patterns of a tile -> int64 in units of 2**-40."""
    # 128 * 0x41400000 and 128 * 0x37400000 are both -0x60000000 modulo 2**32
    return (high + 0x60000000).to(tl.int64) * 1048576 + (low + 0x60000000).to(tl.int64)


@triton.jit
def below(x, top):
    """x - top, at least -30, whose exponential is 0 in the fixed point; so are -inf, and every x of a tile that has no
    finite top.
    """
    return tl.maximum(x - top, -30.0)


@triton.jit
def supported(x, ids, threshold, last_id, goal):
    """-inf for ids outside a row's support, but for its goal; a NaN or +inf stays, so that it shows."""
    outside = (x < threshold) | ((x == threshold) & (ids > last_id))
    return tl.where(outside & (ids != goal), float("-inf"), x)


@triton.jit
def load_support(threshold, last_id, goal, rows, row_mask):
    """fp32, int32, int32 of each row."""
    value = tl.load(threshold + rows, mask=row_mask, other=0.0)
    last = tl.load(last_id + rows, mask=row_mask, other=0).to(tl.int32)
    return value, last, tl.load(goal + rows, mask=row_mask, other=-1).to(tl.int32)


@triton.jit
def weighted_term(e, d):
    """exp * (m - x), 0 where d is at its floor: such an id takes no part."""
    return tl.where(d > -30.0, e * -d, 0.0)


@triton.jit
def tile_sums(x, axis: tl.constexpr, ENTROPY: tl.constexpr):
    """x fp32 of one tile along ``axis`` -> m fp32, s and u int64: maximum, sum of exp(x - m), sum of exp(x - m) * (m -
    x).

    m is NaN for a tile with a NaN. u is s without ENTROPY.
    """
    m = maximum_along(x, axis)
    d = below(x, tl.expand_dims(m, axis))
    e = exp_f32(d)
    high, low = term_parts(e)
    s = whole_sum(tl.sum(high, axis), tl.sum(low, axis))
    u = s
    if ENTROPY:
        high, low = term_parts(weighted_term(e, d))
        u = whole_sum(tl.sum(high, axis), tl.sum(low, axis))
    return m, s, u


@triton.jit
def logit_gradient(
    x, top, log_total, entropy, dlogp, dentropy, hit, temperature, ENTROPY: tl.constexpr, UNIT: tl.constexpr
):
    """(dlogp * (hit - p) - dentropy * p * (log p + entropy)) / temperature with p = exp(log p), every step fp32."""
    d = (x - top) - log_total
    p = exp_f32(tl.maximum(d, -87.0))
    g = dlogp * (tl.where(hit, 1.0, 0.0) - p)
    if ENTROPY:
        g = g - dentropy * (p * (tl.maximum(d, -87.0) + entropy))
    return scaled(g, temperature, UNIT)
