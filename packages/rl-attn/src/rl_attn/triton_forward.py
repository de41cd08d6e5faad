"""Forward attention on a GPU, contract ``attention``: one program walks all keys of a tile of queries.

Serves packed rows, chunks and paged prefill, and decode when there are programs enough. Order and rounding are those of
``triton_tiles``: key tiles ascending inside a segment, a new empty state at each segment, segments folded left, one
division, the output rounded once. A tile holds ``BLOCK_M // GROUP`` tokens with all query heads of one kv head.
"""

import triton
import triton.language as tl

from rl_attn.triton_tiles import (
    NEG_INF,
    add_keys,
    divide,
    empty_state,
    find_sequence,
    first_column,
    fold,
    key_rows,
    log_sum,
    weigh,
)


@triton.jit(do_not_specialize=["sequences", "blocks"])
def attn_fwd_kernel(
    q, k, v, out, lse, begun, folded, cu_q, cu_k, seq_lens, positions, table, c, sequences, blocks,
    sq_t, sq_h, sk_b, sk_h, sk_t, sv_b, sv_h, sv_t, so_t, so_h, s_lse, s_table,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KEY_TILE: tl.constexpr,
    SEGMENT: tl.constexpr, PAGE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads). Sequences of up to SHORT queries are left to ``triton_decode``.

    begun, folded: int32, laid out as lse, or None; what ``counting`` says.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # the longest rows first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(tile, cu_q, sequences, TOKENS)
    q_begin = tl.load(cu_q + sequence).to(tl.int32)
    q_len = tl.load(cu_q + sequence + 1).to(tl.int32) - q_begin
    token0 = (tile - q_begin // TOKENS - sequence) * TOKENS
    if token0 >= q_len or q_len <= SHORT:
        return

    rows = tl.arange(0, BLOCK_M)
    token = token0 + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = (token < q_len) & (rows < TOKENS * GROUP)
    row = (q_begin + token).to(tl.int64)
    if PAGE == 0:
        position = tl.load(positions + row, mask=row_ok, other=-1).to(tl.int32)
        k_base = k + tl.load(cu_k + sequence).to(tl.int64) * sk_t + kv_head.to(tl.int64) * sk_h
        v_base = v + tl.load(cu_k + sequence).to(tl.int64) * sv_t + kv_head.to(tl.int64) * sv_h
    else:
        position = tl.load(seq_lens + sequence).to(tl.int32) - q_len + token
        k_base, v_base = k, v
    position = tl.where(row_ok, position, -1)
    # keys below ``all_see`` are seen by every row, keys from ``limit`` on by none
    limit = tl.max(position, 0) + 1
    all_see = tl.min(tl.where(row_ok, position, 2147483646), 0) + 1
    table_row = table + sequence.to(tl.int64) * s_table

    d = tl.arange(0, BLOCK_D)
    q_at = q + row[:, None] * sq_t + head.to(tl.int64)[:, None] * sq_h + d[None, :]
    q_tile = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    m, w, o = empty_state(BLOCK_M, BLOCK_D)
    total_m, total_w, total_o = empty_state(BLOCK_M, BLOCK_D)
    unknown = tl.zeros((KEY_TILE,), tl.int1)
    if begun is not None:
        row_begun = tl.zeros((BLOCK_M,), tl.int32)
        row_folded = tl.zeros((BLOCK_M,), tl.int32)
    for first in range(0, limit, KEY_TILE):
        keys = first + tl.arange(0, KEY_TILE)
        inside = keys < limit
        k_row, known = key_rows(k_base, table_row, keys, inside, kv_head, sk_b, sk_h, sk_t, blocks, PAGE)
        v_row, _ = key_rows(v_base, table_row, keys, inside, kv_head, sv_b, sv_h, sv_t, blocks, PAGE)
        if BLOCK_D == D:
            k_tile = tl.load(k_row[:, None] + d[None, :], mask=known[:, None], other=0.0)
            v_tile = tl.load(v_row[:, None] + d[None, :], mask=known[:, None], other=0.0)
        else:
            k_tile = tl.load(k_row[:, None] + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
            v_tile = tl.load(v_row[:, None] + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        if PAGE != 0:
            unknown = unknown | (inside & (known == 0))
        s = tl.dot(q_tile, k_tile.T)
        if first + KEY_TILE > all_see:
            s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        starts = first % SEGMENT == 0
        if begun is not None:
            row_begun += (starts & (first <= position)).to(tl.int32)
            row_folded += (starts & (m != NEG_INF)).to(tl.int32)
        m_new, alpha, p = weigh(s, m, c, starts, v_tile.dtype)
        # the state is touched here first: a use inside the branch would make every tile wait for its own P * V
        w = w * alpha[:, None]
        o = o * alpha[:, None]
        if starts:
            total_m, total_w, total_o = fold(total_m, total_w, total_o, m, w, o)
            w = tl.zeros_like(w)
            o = tl.zeros_like(o)
        m = m_new
        w, o = add_keys(p, v_tile, w, o)
    total_m, total_w, total_o = fold(total_m, total_w, total_o, m, w, o)

    row_sum = first_column(total_w)
    live = row_ok[:, None] & (d < D)[None, :]
    result = divide(total_o, row_sum[:, None], live)
    row_lse = log_sum(total_m, row_sum)
    if PAGE != 0:
        # rows that needed a page outside the cache become NaN
        bad = tl.max(unknown.to(tl.int32), 0) != 0
        result = tl.where(bad, float("nan"), result)
        row_lse = tl.where(bad, float("nan"), row_lse)
    out_at = out + row[:, None] * so_t + head.to(tl.int64)[:, None] * so_h + d[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=live)
    tl.store(lse + row * s_lse + head, row_lse, mask=row_ok)
    if begun is not None:
        tl.store(begun + row * s_lse + head, row_begun, mask=row_ok)
        tl.store(folded + row * s_lse + head, row_folded + (m != NEG_INF).to(tl.int32), mask=row_ok)
