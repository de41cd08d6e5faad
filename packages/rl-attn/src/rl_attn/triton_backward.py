"""Backward attention on a GPU, contract ``attention``: two passes over recomputed probabilities, memory linear in rows.

delta: products of dO and O, rounded, added by a balanced tree over head_dim, neighbours first. Queries pass: dQ adds
its keys in ascending order through the matrix unit. Keys pass: dV and dK of a key add query rows in ascending position,
heads of the group ascending, in steps of the matrix unit that start at the sequence's first row.
p = exp2(fma(s, c, -lse * log2(e))), dS = p * (dP - delta); both are rounded to the model's type before their dots. dQ
and dK are multiplied by scale, every gradient is rounded once. Tiles, warps and stages are free: rows and keys that a
causal mask hides add exact zeros.
"""

import triton
import triton.language as tl

from rl_attn.triton_tiles import LOG2E, find_sequence, neighbour_tree


@triton.jit(do_not_specialize=["rows"])
def attn_delta_kernel(
    grad, out, delta, rows, heads, sg_t, sg_h, so_t, so_h, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """delta fp32 [T, H] contiguous."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = at < rows * heads
    token = (at // heads).to(tl.int64)[:, None]
    head = (at % heads).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = ok[:, None] & (d < D)
    x = tl.load(grad + token * sg_t + head * sg_h + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(out + token * so_t + head * so_h + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + at, neighbour_tree(x * y, ROWS, BLOCK_D), mask=ok)


@triton.jit(do_not_specialize=["sequences"])
def attn_grad_queries_kernel(
    grad, q, k, v, dq, lse, delta, cu_q, cu_k, positions, c, scale, sequences, heads,
    sg_t, sg_h, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads); dq [Tq, Hq, D] contiguous, lse and delta fp32 [Tq, Hq] contiguous."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(tile, cu_q, sequences, TOKENS)
    q_begin = tl.load(cu_q + sequence).to(tl.int32)
    q_len = tl.load(cu_q + sequence + 1).to(tl.int32) - q_begin
    token0 = (tile - q_begin // TOKENS - sequence) * TOKENS
    if token0 >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    token = token0 + rows // GROUP
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    row_ok = (token < q_len) & (rows < TOKENS * GROUP)
    row = (q_begin + token).to(tl.int64)
    position = tl.load(positions + row, mask=row_ok, other=-1).to(tl.int32)
    limit = tl.max(position, 0) + 1
    all_see = tl.min(tl.where(row_ok, position, 2147483646), 0) + 1
    k_begin = tl.load(cu_k + sequence).to(tl.int64)
    k_base = k + k_begin * sk_t + kv_head.to(tl.int64) * sk_h
    v_base = v + k_begin * sv_t + kv_head.to(tl.int64) * sv_h

    d = tl.arange(0, BLOCK_D)
    wide = row_ok[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + row[:, None] * sq_t + head[:, None] * sq_h + d[None, :], mask=wide, other=0.0)
    grad_tile = tl.load(grad + row[:, None] * sg_t + head[:, None] * sg_h + d[None, :], mask=wide, other=0.0)
    lse2 = tl.load(lse + row * heads + head, mask=row_ok, other=float("-inf")) * LOG2E
    # a row without any weight has p = 0 everywhere
    lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    row_delta = tl.load(delta + row * heads + head, mask=row_ok, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, limit, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        inside = (keys < limit)[:, None]
        if BLOCK_D != D:
            inside = inside & (d < D)[None, :]
        k_tile = tl.load(k_base + keys.to(tl.int64)[:, None] * sk_t + d[None, :], mask=inside, other=0.0)
        v_tile = tl.load(v_base + keys.to(tl.int64)[:, None] * sv_t + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q_tile, k_tile.T)
        if first + BLOCK_N > all_see:
            s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        dp = tl.dot(grad_tile, v_tile.T)
        p = tl.math.exp2(tl.fma(s, c, -lse2[:, None]))
        ds = p * (dp - row_delta[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc)
    tl.store(dq + (row * heads + head)[:, None] * D + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=wide)


@triton.jit
def _first_query(positions, begin, end, key):
    """First row in [begin, end) whose position is ``key`` or more; positions ascend."""
    low = begin
    high = end
    while low < high:
        middle = (low + high) // 2
        if tl.load(positions + middle) < key:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["sequences"])
def attn_grad_keys_kernel(
    grad, q, k, v, dk, dv, lse, delta, cu_q, cu_k, positions, key_positions, c, scale, sequences, kv_heads,
    sg_t, sg_h, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles of keys), longest first; dk, dv [Tk, Hkv, D] contiguous; positions ascend in a sequence."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    sequence = find_sequence(tile, cu_k, sequences, BLOCK_N)
    k_begin = tl.load(cu_k + sequence).to(tl.int32)
    k_len = tl.load(cu_k + sequence + 1).to(tl.int32) - k_begin
    key0 = (tile - k_begin // BLOCK_N - sequence) * BLOCK_N
    if key0 >= k_len:
        return
    q_begin = tl.load(cu_q + sequence).to(tl.int32)
    q_end = tl.load(cu_q + sequence + 1).to(tl.int32)

    keys = key0 + tl.arange(0, BLOCK_N)
    key_ok = keys < k_len
    key = (k_begin + keys).to(tl.int64)
    key_position = tl.load(key_positions + key, mask=key_ok, other=2147483647).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    wide = key_ok[:, None] & (d < D)[None, :]
    k_tile = tl.load(k + key[:, None] * sk_t + kv_head.to(tl.int64) * sk_h + d[None, :], mask=wide, other=0.0)
    v_tile = tl.load(v + key[:, None] * sv_t + kv_head.to(tl.int64) * sv_h + d[None, :], mask=wide, other=0.0)
    first_position = tl.min(key_position, 0)
    last_position = tl.max(tl.where(key_ok, key_position, -1), 0)
    # rows are (token, head of the group); tiles start at multiples of BLOCK_M from the sequence's first row
    total = (q_end - q_begin) * GROUP
    start = (_first_query(positions, q_begin, q_end, first_position) - q_begin) * GROUP
    start = start // BLOCK_M * BLOCK_M
    # from this row on every key of the tile is seen
    open_from = (_first_query(positions, q_begin, q_end, last_position) - q_begin) * GROUP

    k_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    heads = kv_heads * GROUP
    for first in range(start, total, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        row_ok = rows < total
        row = (q_begin + rows // GROUP).to(tl.int64)
        head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
        inside = row_ok[:, None]
        if BLOCK_D != D:
            inside = inside & (d < D)[None, :]
        q_tile = tl.load(q + row[:, None] * sq_t + head[:, None] * sq_h + d[None, :], mask=inside, other=0.0)
        grad_tile = tl.load(grad + row[:, None] * sg_t + head[:, None] * sg_h + d[None, :], mask=inside, other=0.0)
        lse2 = tl.load(lse + row * heads + head, mask=row_ok, other=float("-inf")) * LOG2E
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
        row_delta = tl.load(delta + row * heads + head, mask=row_ok, other=0.0)
        s = tl.dot(k_tile, q_tile.T)
        if first < open_from:
            position = tl.load(positions + row, mask=row_ok, other=-1).to(tl.int32)
            s = tl.where(key_position[:, None] <= position[None, :], s, float("-inf"))
        p = tl.math.exp2(tl.fma(s, c, -lse2[None, :]))
        v_acc = tl.dot(p.to(grad_tile.dtype), grad_tile, v_acc)
        dp = tl.dot(v_tile, grad_tile.T)
        ds = p * (dp - row_delta[None, :])
        k_acc = tl.dot(ds.to(q_tile.dtype), q_tile, k_acc)
    at = (key * kv_heads + kv_head)[:, None] * D + d[None, :]
    tl.store(dk + at, (k_acc * scale).to(dk.dtype.element_ty), mask=wide)
    tl.store(dv + at, v_acc.to(dv.dtype.element_ty), mask=wide)
