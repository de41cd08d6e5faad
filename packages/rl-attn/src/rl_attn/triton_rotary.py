"""Rotary positions and cache writes on a GPU, contract ``rotary``: the bits of the CPU kernels.

y1 = x1 * cos - x2 * sin, y2 = x2 * cos + x1 * sin: each product and their sum or difference rounded to fp32,
contraction off, the result rounded once to the model's type. Writing to the cache moves bytes. The norm in front, where
there is one, is contract ``norm``: squares joined neighbours first, mean by IEEE division, rsqrt through fp64, x * rstd
and times weight each rounded to fp32, then once to the model's type.
"""

import triton
import triton.language as tl

from rl_attn.triton_tiles import neighbour_tree


@triton.jit
def _rotate(
    x_at, out_at, c, s, ok,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rows at pointers x_at [HEADS, 1] to out_at [HEADS, 1]; c, s [1, BLOCK_HALF]; ok [HEADS, 1]."""
    TYPE: tl.constexpr = out_at.dtype.element_ty
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = ok & (i < HALF)
    x1 = tl.load(x_at + i, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + HALF + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at + i, (x1 * c - x2 * s).to(TYPE), mask=mask)
    tl.store(out_at + HALF + i, (x2 * c + x1 * s).to(TYPE), mask=mask)
    if REST > 0:
        j = tl.arange(0, BLOCK_REST)[None, :]
        rest = ok & (j < REST)
        tl.store(out_at + 2 * HALF + j, tl.load(x_at + 2 * HALF + j, mask=rest), mask=rest)


@triton.jit(do_not_specialize=["table_rows", "sign"])
def rotary_kernel(
    q, k, q_out, k_out, positions, cos, sin, sign, table_rows, heads, kv_heads,
    sq_t, sq_h, sk_t, sk_h, sqo_t, sqo_h, sko_t, sko_h,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of HEADS query heads, then of kv heads). A position outside the table gives NaN; nothing
    outside it is read."""
    token = tl.program_id(0).to(tl.int64)
    q_blocks = (heads + HEADS - 1) // HEADS
    is_q = tl.program_id(1) < q_blocks
    block = tl.where(is_q, tl.program_id(1), tl.program_id(1) - q_blocks)
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    i = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token).to(tl.int64) + tl.zeros((BLOCK_HALF,), tl.int64)
    known = (position >= 0) & (position < table_rows)
    c = tl.load(cos + position * HALF + i, mask=known & (i < HALF), other=float("nan"))[None, :]
    s = tl.load(sin + position * HALF + i, mask=known & (i < HALF), other=float("nan"))[None, :] * sign
    if is_q:
        _rotate(
            q + token * sq_t + head * sq_h, q_out + token * sqo_t + head * sqo_h, c, s, head < heads,
            HALF, BLOCK_HALF, REST, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate(
            k + token * sk_t + head * sk_h, k_out + token * sko_t + head * sko_h, c, s, head < kv_heads,
            HALF, BLOCK_HALF, REST, BLOCK_REST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["room"])
def write_slots_kernel(
    k, v, k_cache, v_cache, slots, room, heads, sk_t, sk_h, sv_t, sv_h,
    ck_b, ck_h, ck_t, cv_b, cv_h, cv_t,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of HEADS heads). A slot outside the cache, below 0 or beyond its room, is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token + tl.zeros((1, 1), tl.int64)).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (d < D) & (slot >= 0) & (slot < room)
    block = slot // PAGE
    inner = slot % PAGE
    k_row = tl.load(k + token * sk_t + head * sk_h + d, mask=mask)
    v_row = tl.load(v + token * sv_t + head * sv_h + d, mask=mask)
    tl.store(k_cache + block * ck_b + head * ck_h + inner * ck_t + d, k_row, mask=mask)
    tl.store(v_cache + block * cv_b + head * cv_h + inner * cv_t + d, v_row, mask=mask)


@triton.jit
def _rsqrt(x):
    """1/sqrt(x) of normal positive x in fp64, rounded once to fp32: a quick fp32 value, corrected to third order."""
    guess = tl.rsqrt(x).to(tl.float64)
    left = 1.0 - x.to(tl.float64) * guess * guess
    better = guess + guess * left * (0.5 + 0.375 * left)
    return tl.where(x == float("inf"), 0.0, better.to(tl.float32))


@triton.jit
def _normed(x, weight, scale, NORM: tl.constexpr):
    """fp32 of what the norm leaves in the model's type."""
    if NORM:
        return (x.to(tl.float32) * scale * weight.to(tl.float32)).to(x.dtype).to(tl.float32)
    return x.to(tl.float32)


@triton.jit
def _norm_rotate(
    x_at, out_at, weight, c, s, eps, ok,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rows at pointers x_at [HEADS, 1] to out_at [HEADS, 1]; c, s [1, BLOCK_HALF]; ok [HEADS, 1]."""
    TYPE: tl.constexpr = out_at.dtype.element_ty
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = ok & (i < HALF)
    low, high = tl.load(x_at + i, mask=mask, other=0.0), tl.load(x_at + HALF + i, mask=mask, other=0.0)
    scale = 0.0
    if NORM:
        if D == 2 * HALF and HALF == BLOCK_HALF:
            # the halves are the two subtrees of the root
            a, b = low.to(tl.float32), high.to(tl.float32)
            total = neighbour_tree(a * a, HEADS, BLOCK_HALF) + neighbour_tree(b * b, HEADS, BLOCK_HALF)
        else:
            d = tl.arange(0, BLOCK_D)[None, :]
            x = tl.load(x_at + d, mask=ok & (d < D), other=0.0).to(tl.float32)
            total = neighbour_tree(x * x, HEADS, BLOCK_D)
        if D & (D - 1) == 0:
            scale = _rsqrt(total * (1.0 / D) + eps)[:, None]
        else:
            scale = _rsqrt(tl.div_rn(total, D * 1.0) + eps)[:, None]
    w_low = tl.load(weight + i, mask=i < HALF, other=0.0)
    w_high = tl.load(weight + HALF + i, mask=i < HALF, other=0.0)
    x1, x2 = _normed(low, w_low, scale, NORM), _normed(high, w_high, scale, NORM)
    tl.store(out_at + i, (x1 * c - x2 * s).to(TYPE), mask=mask)
    tl.store(out_at + HALF + i, (x2 * c + x1 * s).to(TYPE), mask=mask)
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(x_at + j, mask=ok & (j < D), other=0.0)
        w_rest = tl.load(weight + j, mask=j < D, other=0.0)
        tl.store(out_at + j, _normed(rest, w_rest, scale, NORM).to(TYPE), mask=ok & (j < D))


@triton.jit(do_not_specialize=["table_rows", "room"])
def norm_rotary_write_kernel(
    q, k, v, out, q_weight, k_weight, k_cache, v_cache, positions, slots, cos, sin, eps, table_rows, room, heads,
    kv_heads, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, ck_b, ck_h, ck_t, cv_b, cv_h, cv_t,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of HEADS query heads, then of KV_HEADS kv heads): queries to ``out``, the rest to its slot.

    A slot outside the cache is skipped; a position outside the table gives NaN; nothing outside is read or written.
    """
    token = tl.program_id(0).to(tl.int64)
    q_blocks = (heads + HEADS - 1) // HEADS
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token).to(tl.int64)
    known = (position >= 0) & (position < table_rows)
    c = tl.load(cos + position * HALF + i, mask=known & (i < HALF), other=float("nan"))[None, :]
    s = tl.load(sin + position * HALF + i, mask=known & (i < HALF), other=float("nan"))[None, :]
    if block < q_blocks:
        head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        _norm_rotate(
            q + token * sq_t + head * sq_h, out + token * so_t + head * so_h, q_weight, c, s, eps, head < heads,
            D, BLOCK_D, HALF, BLOCK_HALF, BLOCK_REST, HEADS, NORM,
        )  # fmt: skip
    else:
        kv_head = ((block - q_blocks) * KV_HEADS + tl.arange(0, KV_HEADS)).to(tl.int64)[:, None]
        slot = tl.load(slots + token).to(tl.int64)
        ok = (kv_head < kv_heads) & (slot >= 0) & (slot < room)
        page, inner = slot // PAGE, slot % PAGE
        _norm_rotate(
            k + token * sk_t + kv_head * sk_h, k_cache + page * ck_b + kv_head * ck_h + inner * ck_t, k_weight, c, s,
            eps, ok, D, BLOCK_D, HALF, BLOCK_HALF, BLOCK_REST, KV_HEADS, NORM,
        )  # fmt: skip
        d = tl.arange(0, BLOCK_D)[None, :]
        value = tl.load(v + token * sv_t + kv_head * sv_h + d, mask=ok & (d < D))
        tl.store(v_cache + page * cv_b + kv_head * cv_h + inner * cv_t + d, value, mask=ok & (d < D))
