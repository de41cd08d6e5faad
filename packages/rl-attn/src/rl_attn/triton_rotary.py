"""Rotary positions and cache writes on a GPU, contract ``rotary``: the bits of the CPU kernels.

y1 = x1 * cos - x2 * sin, y2 = x2 * cos + x1 * sin: each product and their sum or difference rounded to fp32,
contraction off, the result rounded once to the model's type. Writing to the cache moves bytes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_rows", "tokens", "sign"])
def rotary_kernel(
    x, out, positions, cos, sin, sign, table_rows, tokens, heads, sx_t, sx_h, so_t, so_h,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of HEADS heads). A position outside the table gives NaN; nothing outside it is read."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    i = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token).to(tl.int64)
    known = (position >= 0) & (position < table_rows)
    c = tl.load(cos + position * HALF + i, mask=known & (i < HALF), other=float("nan"))[None, :]
    s = tl.load(sin + position * HALF + i, mask=known & (i < HALF), other=float("nan"))[None, :] * sign
    mask = (head < heads) & (i < HALF)[None, :]
    x_at = x + token * sx_t + head * sx_h
    out_at = out + token * so_t + head * so_h
    x1 = tl.load(x_at + i[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + HALF + i[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at + i[None, :], (x1 * c - x2 * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out_at + HALF + i[None, :], (x2 * c + x1 * s).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        j = tl.arange(0, BLOCK_REST)[None, :]
        rest = (head < heads) & (j < REST)
        tl.store(out_at + 2 * HALF + j, tl.load(x_at + 2 * HALF + j, mask=rest), mask=rest)


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
