"""Decode on sm90, contract ``attention``: the segments of ``triton_decode`` on specialised warps.

Same order and same rounding, hence the same bits: a segment starts from the empty state and takes its key tiles
ascending; ``triton_decode.attn_fold_kernel`` then folds a row's segments left. A sequence of one segment is folded
into the empty state at once, and done. Four warps hold the query rows of one kv head; ``triton_hopper_segments`` shares
out the segments and fetches their pages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_attn.triton_hopper_segments import describe, run_of_team, with_fetching
from rl_attn.triton_hopper_tiles import (
    GROUP_ROWS,
    LN2,
    NEG_INF,
    SUM_COLUMNS,
    barrier,
    columns,
    divide,
    drop_rows,
    flat,
    fold_factors,
    weigh,
)

DONE_ROWS = gl.constexpr(8)  # rows of a finished sequence that four warps divide at a time
ROWS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SUMS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _finish(
    m, w, o, rows_done, sums_done, out, lse, folded, q_begin, q_len, head, so_t, so_h, s_lse,
    GROUP: gl.constexpr, D: gl.constexpr, rows_layout: gl.constexpr, layout_o: gl.constexpr,
):  # fmt: skip
    """Fold the only segment of a sequence into the empty state, divide and store; rows change threads, so that all of
    them divide rows that somebody asked for."""
    plain: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32] if D == 128 else [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, GROUP_ROWS, rows_layout)
    total_m, a, b = fold_factors(gl.full([GROUP_ROWS], NEG_INF, gl.float32, rows_layout), m)
    total_w = gl.fma(gl.zeros([GROUP_ROWS], gl.float32, rows_layout), a, w * b)
    total_o = gl.fma(gl.zeros([GROUP_ROWS, D], gl.float32, layout_o), columns(a, layout_o), o * columns(b, layout_o))
    some = total_w != 0.0
    row_lse = gl.where(some, (total_m + gl.log2(gl.where(some, total_w, 1.0))) * LN2, NEG_INF)
    at = (q_begin + rows // GROUP).to(gl.int64) * s_lse + head + rows % GROUP
    gl.store(lse + at, row_lse, mask=rows // GROUP < q_len)
    if folded is not None:
        gl.store(folded + at, (m != NEG_INF).to(gl.int32), mask=rows // GROUP < q_len)
    flat(rows_done, [GROUP_ROWS, D], ROWS_SHARED).store(total_o)
    flat(sums_done, [GROUP_ROWS], SUMS_SHARED).store(total_w)
    barrier()
    d = gl.arange(0, D, gl.SliceLayout(0, plain))
    for first in range(0, q_len * GROUP, DONE_ROWS):
        row = first + gl.arange(0, DONE_ROWS, gl.SliceLayout(1, plain))
        live = row // GROUP < q_len
        sums = sums_done.index(first // DONE_ROWS).load(gl.SliceLayout(1, plain))
        result = divide(rows_done.index(first // DONE_ROWS).load(plain), sums, live, plain)
        to = (q_begin + row // GROUP).to(gl.int64) * so_t + (head + row % GROUP).to(gl.int64) * so_h
        gl.store(
            out + gl.expand_dims(to, 1) + gl.expand_dims(d, 0), result.to(out.dtype.element_ty),
            mask=gl.expand_dims(live, 1),
        )  # fmt: skip
    barrier()


@gluon.jit
def _attend_segments(
    q, tiles, ones, rows_done, sums_done, ready, empty, part_m, part_w, part_o, out, lse, begun, folded, cu_q, seq_lens,
    table, c, sequences, kv_heads, blocks, sq_t, sq_h, so_t, so_h, s_lse, s_table,
    GROUP: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, SHORT: gl.constexpr, ONE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The weighing warps; ROWS is GROUP_ROWS."""
    dtype: gl.constexpr = tiles.dtype
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_TILE, 16])
    layout_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    layout_w: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout_s)
    left_q: gl.constexpr = gl.DotOperandLayout(0, layout_s, 2)
    left_o: gl.constexpr = gl.DotOperandLayout(0, layout_o, 2)
    left_w: gl.constexpr = gl.DotOperandLayout(0, layout_w, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # a segment's pages, 128 table entries at a time; one more where it begins inside a page
    PARTS: gl.constexpr = (SEGMENT // PAGE + 128) // 128

    begin, end, sequence, first_item, slots = run_of_team(cu_q, seq_lens, sequences, kv_heads, SEGMENT, SHORT, 4, ONE)
    heads = kv_heads * GROUP
    kv_head = gl.program_id(0) % kv_heads
    key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, layout_s))
    rows = gl.arange(0, GROUP_ROWS, rows_layout)
    q_rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, left_q))
    q_d = gl.arange(0, D, gl.SliceLayout(0, left_q))
    w_rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout_w))
    o_rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout_o))
    o_d = gl.arange(0, D, gl.SliceLayout(0, layout_o))
    no_scores = gl.zeros([GROUP_ROWS, KEY_TILE], gl.float32, layout_s)
    taken = 0
    if begin < end:
        q_begin, q_len, length, count = describe(cu_q, seq_lens, sequence, SEGMENT, SHORT, ONE)
        for item in range(begin, end):
            while item >= first_item + count:
                first_item += count
                slots += count * q_len
                sequence += 1
                q_begin, q_len, length, count = describe(cu_q, seq_lens, sequence, SEGMENT, SHORT, ONE)
            segment = item - first_item
            start = segment * SEGMENT
            stop = gl.minimum(start + SEGMENT, length)
            at = (q_begin + q_rows // GROUP).to(gl.int64) * sq_t + (kv_head * GROUP + q_rows % GROUP).to(
                gl.int64
            ) * sq_h
            q_ok = gl.expand_dims(q_rows // GROUP < q_len, 1)
            bad = 0
            for part in gl.static_range(PARTS):
                entry = start // PAGE + part * 128 + gl.arange(0, 128, line)
                page = gl.load(table + sequence.to(gl.int64) * s_table + entry, mask=entry * PAGE < stop, other=0)
                bad = gl.maximum(bad, gl.max(((page < 0) | (page >= blocks)).to(gl.int32), 0))
            position = gl.where(rows // GROUP < q_len, length - q_len + rows // GROUP, -1)
            if begun is not None:
                counted = (q_begin + rows // GROUP).to(gl.int64) * s_lse + kv_head * GROUP + rows % GROUP
                one = gl.full([GROUP_ROWS], 1, gl.int32, rows_layout)
                gl.atomic_add(begun + counted, one, mask=start <= position)
            m = gl.full([GROUP_ROWS], NEG_INF, gl.float32, rows_layout)
            w = gl.zeros([GROUP_ROWS, SUM_COLUMNS], gl.float32, layout_w)
            o = gl.zeros([GROUP_ROWS, D], gl.float32, layout_o)
            for first in range(start, stop, KEY_TILE):
                slot = taken % STAGES
                # read for every tile, from the L1: kept over a tile's weighing it would not fit in the registers
                q_tile = gl.load(q + gl.expand_dims(at, 1) + gl.expand_dims(q_d, 0), mask=q_ok, other=0.0)
                mbarrier.wait(ready.index(slot), (taken // STAGES) & 1)
                s = warpgroup_mma(q_tile, tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                s, q_tile = warpgroup_mma_wait(0, deps=(s, q_tile))
                mbarrier.arrive(empty.index(slot), count=1)
                if first + KEY_TILE > length - q_len + 1:
                    s = gl.where(gl.expand_dims(first + key, 0) <= gl.expand_dims(position, 1), s, NEG_INF)
                m, alpha, p = weigh(s, m, c, first == start, dtype)
                o = o * columns(alpha, layout_o)
                w = w * columns(alpha, layout_w)
                slot = (taken + 1) % STAGES
                mbarrier.wait(ready.index(slot), ((taken + 1) // STAGES) & 1)
                taken += 2
                if first + KEY_TILE > length:
                    drop_rows(tiles.index(slot), length - first, dtype, KEY_TILE, D)
                left = gl.convert_layout(p, left_o)
                left_sum = gl.convert_layout(p, left_w)
                o = warpgroup_mma(left, tiles.index(slot), o, is_async=True)
                w = warpgroup_mma(left_sum, ones.permute((1, 0)), w, is_async=True)
                o, w, left, left_sum = warpgroup_mma_wait(0, deps=(o, w, left, left_sum))
                mbarrier.arrive(empty.index(slot), count=1)
            # a page outside the cache turns the rows that needed it into NaN
            row_sum = gl.where(bad != 0, float("nan"), gl.max(w, 1))
            head = kv_head * GROUP
            if ONE:
                _finish(m, gl.convert_layout(row_sum, rows_layout), o, rows_done, sums_done, out, lse, folded,
                        q_begin, q_len, head, so_t, so_h, s_lse, GROUP, D, rows_layout, layout_o)  # fmt: skip
            elif count == 1:
                _finish(m, gl.convert_layout(row_sum, rows_layout), o, rows_done, sums_done, out, lse, folded,
                        q_begin, q_len, head, so_t, so_h, s_lse, GROUP, D, rows_layout, layout_o)  # fmt: skip
            else:
                # partial states of slot (sequence, segment, query)
                first_slot = slots + segment * q_len
                at_m = (first_slot + rows // GROUP).to(gl.int64) * heads + head + rows % GROUP
                gl.store(part_m + at_m, m, mask=rows // GROUP < q_len)
                at_w = (first_slot + w_rows // GROUP).to(gl.int64) * heads + head + w_rows % GROUP
                gl.store(part_w + at_w, row_sum, mask=w_rows // GROUP < q_len)
                at_o = (first_slot + o_rows // GROUP).to(gl.int64) * heads + head + o_rows % GROUP
                gl.store(
                    part_o + gl.expand_dims(at_o * D, 1) + gl.expand_dims(o_d, 0), o,
                    mask=gl.expand_dims(o_rows // GROUP < q_len, 1),
                )  # fmt: skip


_launch = with_fetching(_attend_segments)


@gluon.jit(do_not_specialize=["sequences", "blocks"])
def attn_segments_sm90_kernel(
    q, k_desc, v_desc, part_m, part_w, part_o, out, lse, begun, folded, cu_q, seq_lens, table, so_t, so_h, s_lse, c,
    sequences, kv_heads, blocks, sq_t, sq_h, k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows,
    v_head_columns, s_table,
    GROUP: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """As ``triton_decode.attn_segments_kernel``; the grid is a multiple of kv_heads, and each team of kv_heads programs
    takes an equal run of (sequence, segment). begun, folded: int32, laid out as lse, or None.

    part_m, part_w, part_o: None where no sequence has more keys than a segment; then nothing is left to fold."""
    dtype: gl.constexpr = k_desc.dtype
    ones_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SUM_COLUMNS, KEY_TILE], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, D], k_desc.layout)
    ones = gl.allocate_shared_memory(dtype, [SUM_COLUMNS, KEY_TILE], ones_shared)
    rows_done = gl.allocate_shared_memory(gl.float32, [GROUP_ROWS // DONE_ROWS, DONE_ROWS, D], ROWS_SHARED)
    sums_done = gl.allocate_shared_memory(gl.float32, [GROUP_ROWS // DONE_ROWS, DONE_ROWS], SUMS_SHARED)
    _launch(
        q, k_desc, v_desc, tiles, ones, rows_done, sums_done, part_m, part_w, part_o, out, lse, begun, folded,
        cu_q, seq_lens, table, c, sequences, kv_heads, blocks, sq_t, sq_h, so_t, so_h, s_lse, k_page_rows, k_head_rows,
        k_head_columns, v_page_rows, v_head_rows, v_head_columns, s_table,
        GROUP, D, KEY_TILE, SEGMENT, STAGES, PAGE, SHORT, GROUP_ROWS,
    )  # fmt: skip
