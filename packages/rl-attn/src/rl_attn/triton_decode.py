"""Decode on a GPU, contract ``attention``: segments of few-query sequences on their own programs, then a fold.

Order and rounding are those of ``triton_tiles``: a segment starts from the empty state and takes its key tiles
ascending; the second kernel folds a row's segments left, ascending, from the empty state, then divides once and rounds
once. Partial states stay fp32. How many programs share the segments never shows in the bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from rl_attn.triton_tiles import (
    add_keys,
    divide,
    empty_state,
    finite,
    first_column,
    key_rows,
    log_sum,
    weigh,
)


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
    q, k, v, part_m, part_w, part_o, begun, cu_q, seq_lens, table, c, sequences, kv_heads, blocks,
    sq_t, sq_h, sk_b, sk_h, sk_t, sv_b, sv_h, sv_t, s_table,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KEY_TILE: tl.constexpr,
    SEGMENT: tl.constexpr, PAGE: tl.constexpr, SHORT: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes an equal run of (sequence, kv head, segment). part_m, part_w fp32 [slots, Hq], part_o fp32
    [slots, Hq, D]; a slot is (sequence, segment, query). One flat loop over key tiles, so that loads never run dry.
    begun: int32 [Tq, Hq] or None, what ``counting`` says."""
    b, begins, queries, lengths, segments, ends, slot_ends = _segment_plan(cu_q, seq_lens, sequences, B, SEGMENT, SHORT)
    work = (tl.sum(segments, 0) * kv_heads).to(tl.int64)
    begin = (work * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    end = (work * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    TILES: tl.constexpr = SEGMENT // KEY_TILE
    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    d = tl.arange(0, BLOCK_D)
    heads = kv_heads * GROUP
    sequence, kv_head, segment, q_begin, q_len, length, slot = begin, begin, begin, begin, begin, begin, begin
    m, w, o = empty_state(BLOCK_M, BLOCK_D)
    unknown = tl.zeros((KEY_TILE,), tl.int1)
    for step in tl.range(0, (end - begin) * TILES, num_stages=STAGES):
        tile = step % TILES
        if tile == 0:
            item = begin + step // TILES
            sequence = tl.sum((ends * kv_heads <= item).to(tl.int32), 0)
            count = _pick(segments, b, sequence)
            inner = item - (_pick(ends, b, sequence) - count) * kv_heads
            kv_head = inner // count
            segment = inner % count
            q_begin = _pick(begins, b, sequence)
            q_len = _pick(queries, b, sequence)
            length = _pick(lengths, b, sequence)
            slot = _pick(slot_ends, b, sequence) - (count - segment) * q_len
            if begun is not None:
                counted = begun + (q_begin + token).to(tl.int64) * heads + kv_head * GROUP + rows % GROUP
                tl.atomic_add(counted, 1, mask=(token < q_len) & (segment * SEGMENT <= length - q_len + token))
        first = segment * SEGMENT + tile * KEY_TILE
        row_ok = token < q_len
        head = kv_head * GROUP + rows % GROUP
        q_row = q + (q_begin + token).to(tl.int64) * sq_t + head.to(tl.int64) * sq_h
        q_tile = tl.load(q_row[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
        keys = first + tl.arange(0, KEY_TILE)
        inside = keys < length
        table_row = table + sequence.to(tl.int64) * s_table
        k_row, known = key_rows(k, table_row, keys, inside, kv_head, sk_b, sk_h, sk_t, blocks, PAGE)
        v_row, _ = key_rows(v, table_row, keys, inside, kv_head, sv_b, sv_h, sv_t, blocks, PAGE)
        k_tile = tl.load(k_row[:, None] + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        v_tile = tl.load(v_row[:, None] + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        starts = tile == 0
        unknown = (unknown & (tile != 0)) | (inside & (known == 0))
        s = tl.dot(q_tile, k_tile.T)
        if first + KEY_TILE > length - q_len + 1:
            position = tl.where(row_ok, length - q_len + token, -1)
            s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        m, alpha, p = weigh(s, m, c, starts, v_tile.dtype)
        w, o = add_keys(p, v_tile, tl.where(starts, 0.0, w * alpha[:, None]), tl.where(starts, 0.0, o * alpha[:, None]))
        if tile == TILES - 1:
            # a page outside the cache turns the rows that needed it into NaN
            column = tl.where(tl.max(unknown.to(tl.int32), 0) != 0, float("nan"), first_column(w))
            at = (slot + token).to(tl.int64) * heads + head
            tl.store(part_m + at, m, mask=row_ok)
            tl.store(part_w + at, column, mask=row_ok)
            tl.store(part_o + at[:, None] * D + d[None, :], o, mask=row_ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["sequences"])
def attn_fold_kernel(
    part_m, part_w, part_o, out, lse, folded, cu_q, seq_lens, sequences, heads, so_t, so_h, s_lse,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr, SHORT: tl.constexpr, B: tl.constexpr,
    UNROLL: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (query rows, heads): one row's segments, folded in ascending order; UNROLL partial states in flight.

    OVERLAPPED: brought up while the segments of the specialised kernel still run, so that it waits for them before it
    reads a partial state. That kernel is done with sequences of one segment. folded: int32, laid out as lse, or None.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    b, begins, queries, lengths, segments, _, slot_ends = _segment_plan(cu_q, seq_lens, sequences, B, SEGMENT, SHORT)
    # the last sequence that begins at or before the row; empty ones in between begin there too, but end there
    sequence = tl.max(tl.where((begins <= row) & (b < sequences) & (queries > 0), b, -1), 0)
    q_len = _pick(queries, b, sequence)
    if q_len > SHORT:
        return
    token = row - _pick(begins, b, sequence)
    slot = _pick(slot_ends - segments * queries, b, sequence) + token
    seen = _pick(lengths, b, sequence) - q_len + token + 1
    count = (seen + SEGMENT - 1) // SEGMENT
    d = tl.arange(0, BLOCK_D)
    if OVERLAPPED:
        gdc_wait()
        if _pick(segments, b, sequence) == 1:
            return
    # every column holds the maximum and the row sum
    total_m = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    total_w = tl.zeros((BLOCK_D,), tl.float32)
    total_o = tl.zeros((BLOCK_D,), tl.float32)
    # what is added behind the last segment: -0 leaves every value alone, a -0 too (a literal would become +0)
    nothing = tl.full((BLOCK_D,), -2147483648, tl.int32).to(tl.float32, bitcast=True)
    if folded is not None:
        row_folded = tl.zeros((BLOCK_D,), tl.int32)
    for start in range(0, count, UNROLL):
        ms = ()
        ws = ()
        os = ()
        for i in tl.static_range(UNROLL):
            number = start + i + d * 0
            live = number < count
            at = (slot + number * q_len).to(tl.int64) * heads + head
            ms = ms + (tl.load(part_m + at, mask=live, other=float("-inf")),)  # type: ignore[assignment]
            ws = ws + (tl.load(part_w + at, mask=live, other=nothing),)  # type: ignore[assignment]
            os = os + (tl.load(part_o + at * D + d, mask=live & (d < D), other=nothing),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            m = tl.maximum(total_m, ms[i])
            shift = finite(m)
            a = tl.math.exp2(total_m - shift)
            factor = tl.math.exp2(ms[i] - shift)
            total_w = tl.fma(total_w, a, ws[i] * factor)
            total_o = tl.fma(total_o, a, os[i] * factor)
            total_m = m
            if folded is not None:
                row_folded += (ms[i] != float("-inf")).to(tl.int32)
    result = divide(total_o, total_w, d < D).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * so_t + head.to(tl.int64) * so_h + d, result, mask=d < D)
    tl.store(lse + row.to(tl.int64) * s_lse + head + d * 0, log_sum(total_m, total_w), mask=d == 0)
    if folded is not None:
        tl.store(folded + row.to(tl.int64) * s_lse + head + d * 0, row_folded, mask=d == 0)
