"""Decode on a GPU, contract ``attention``: segments of few-query sequences on their own programs, then a fold.

Order and rounding are those of ``triton_tiles``: a segment starts from the empty state and takes its key tiles
ascending; the second kernel folds a row's segments left, ascending, from the empty state, then divides once and rounds
once. Partial states stay fp32. How many programs share the segments never shows in the bits.
"""

import triton
import triton.language as tl

from rl_attn.triton_tiles import add_keys, empty_state, finish, first_column, fold, key_rows, weigh


@triton.jit
def _pick(values, index, at):
    """values[at], for a register vector ``values`` with index vector ``index``."""
    return tl.sum(tl.where(index == at, values, 0), 0)


@triton.jit
def _segment_plan(cu_q, seq_lens, sequences, B: tl.constexpr, SEGMENT: tl.constexpr, SHORT: tl.constexpr):
    """Per sequence: index, first query row, queries, keys, segments, running ends of segments and of partial slots."""
    b = tl.arange(0, B)
    live = b < sequences
    begin = tl.load(cu_q + b, mask=live, other=0).to(tl.int32)
    queries = tl.load(cu_q + b + 1, mask=live, other=0).to(tl.int32) - begin
    keys = tl.load(seq_lens + b, mask=live, other=0).to(tl.int32)
    segments = tl.where(live & (queries > 0) & (queries <= SHORT), (keys + SEGMENT - 1) // SEGMENT, 0)
    return b, begin, queries, keys, segments, tl.cumsum(segments, 0), tl.cumsum(segments * queries, 0)


@triton.jit(do_not_specialize=["sequences", "blocks"])
def attn_segments_kernel(
    q, k, v, part_m, part_w, part_o, cu_q, seq_lens, table, c, sequences, kv_heads, blocks,
    sq_t, sq_h, sk_b, sk_h, sk_t, sv_b, sv_h, sv_t, s_table,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KEY_TILE: tl.constexpr,
    SEGMENT: tl.constexpr, PAGE: tl.constexpr, SHORT: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs take (segment, kv head) in turn. part_m, part_w fp32 [slots, Hq], part_o fp32 [slots, Hq, D]; a slot is
    (sequence, segment, query)."""
    b, begins, queries, lengths, segments, ends, slot_ends = _segment_plan(cu_q, seq_lens, sequences, B, SEGMENT, SHORT)
    work = tl.sum(segments, 0) * kv_heads
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    heads = kv_heads * GROUP
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        kv_head = item % kv_heads
        number = item // kv_heads
        sequence = tl.sum((ends <= number).to(tl.int32), 0)
        segment = number - _pick(ends - segments, b, sequence)
        q_begin = _pick(begins, b, sequence)
        q_len = _pick(queries, b, sequence)
        slot = _pick(slot_ends - segments * queries, b, sequence) + segment * q_len

        token = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        row_ok = token < q_len
        position = tl.where(row_ok, _pick(lengths, b, sequence) - q_len + token, -1)
        limit = tl.minimum(tl.max(position, 0) + 1, (segment + 1) * SEGMENT)
        all_see = tl.min(tl.where(row_ok, position, 2147483646), 0) + 1
        table_row = table + sequence.to(tl.int64) * s_table
        row = (q_begin + token).to(tl.int64)
        q_at = q + row[:, None] * sq_t + head.to(tl.int64)[:, None] * sq_h + d[None, :]
        q_tile = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)

        m, w, o = empty_state(BLOCK_M, BLOCK_D)
        unknown = tl.zeros((KEY_TILE,), tl.int1)
        for first in tl.range(segment * SEGMENT, limit, KEY_TILE, num_stages=STAGES):
            keys = first + tl.arange(0, KEY_TILE)
            inside = keys < limit
            k_row, known = key_rows(k, table_row, keys, inside, kv_head, sk_b, sk_h, sk_t, blocks, PAGE)
            v_row, _ = key_rows(v, table_row, keys, inside, kv_head, sv_b, sv_h, sv_t, blocks, PAGE)
            k_tile = tl.load(k_row[:, None] + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
            v_tile = tl.load(v_row[:, None] + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
            unknown = unknown | (inside & (known == 0))
            s = tl.dot(q_tile, k_tile.T)
            if first + KEY_TILE > all_see:
                s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
            m, alpha, p = weigh(s, m, c, False, v_tile.dtype)
            w, o = add_keys(p, v_tile, w * alpha[:, None], o * alpha[:, None])

        w_column = first_column(w)
        # a page outside the cache turns the rows that needed it into NaN
        w_column = tl.where(tl.max(unknown.to(tl.int32), 0) != 0, float("nan"), w_column)
        at = (slot + token).to(tl.int64) * heads + head
        tl.store(part_m + at, m, mask=row_ok)
        tl.store(part_w + at, w_column, mask=row_ok)
        tl.store(part_o + at[:, None] * D + d[None, :], o, mask=row_ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["sequences"])
def attn_fold_kernel(
    part_m, part_w, part_o, out, lse, cu_q, seq_lens, sequences, heads, so_t, so_h, s_lse,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr, SHORT: tl.constexpr, B: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid (query rows, heads): one row's segments, folded in ascending order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    b, begins, queries, lengths, segments, _, slot_ends = _segment_plan(cu_q, seq_lens, sequences, B, SEGMENT, SHORT)
    # the last sequence that begins at or before the row; empty ones in between begin there too, but end there
    sequence = tl.max(tl.where((begins <= row) & (b < sequences) & (queries > 0), b, -1), 0)
    q_len = _pick(queries, b, sequence)
    if q_len > SHORT:
        return
    token = row - _pick(begins, b, sequence)
    slot = _pick(slot_ends - segments * queries, b, sequence)
    seen = _pick(lengths, b, sequence) - q_len + token + 1
    count = (seen + SEGMENT - 1) // SEGMENT
    d = tl.arange(0, BLOCK_D)
    m = tl.full((1,), float("-inf"), tl.float32)
    w = tl.zeros((1, 1), tl.float32)
    o = tl.zeros((1, BLOCK_D), tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            number = start + i + tl.zeros((1,), tl.int32)
            live = number < count
            at = (slot + number * q_len + token).to(tl.int64) * heads + head
            part = tl.load(part_m + at, mask=live, other=float("-inf"))
            part_sum = tl.load(part_w + at, mask=live, other=0.0)
            part_row = tl.load(part_o + at[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
            m, w, o = fold(m, w, o, part, part_sum[:, None], part_row)
    result, row_lse = finish(m, tl.sum(w, 1), o)
    at = out + row.to(tl.int64) * so_t + head.to(tl.int64) * so_h + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(d < D)[None, :])
    tl.store(lse + row.to(tl.int64) * s_lse + head + tl.zeros((1,), tl.int32), row_lse)
