"""Decode of few query rows on sm90, contract ``attention``: ``triton_hopper_decode`` with its dots the other way round.

Same order and same rounding: a segment starts from the empty state and takes its key tiles ascending, a score is a
chain over head_dim, P is rounded to the value type, the row sum is a dot with ones. Keys, then head columns, lie along
the 64 rows of the matrix unit, query rows along its narrow side: four warps weigh 8 rows of 128 keys instead of 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_attn.triton_hopper_segments import describe, run_of_team, with_fetching
from rl_attn.triton_hopper_tiles import LN2, NEG_INF, barrier, drop_rows, finite, fold_factors

SUM_ROWS = gl.constexpr(64)  # rows of ones: the narrowest left operand of the matrix unit


@gluon.jit
def _weigh(s, m, c, starts, dtype: gl.constexpr):
    """As ``triton_tiles.weigh``, of scores ``[KEY_TILE, ROWS]``."""
    before = gl.where(starts, NEG_INF, m)
    m_new = gl.maximum(before, gl.max(s, 0) * c)
    shift = finite(m_new)
    p = gl.exp2(gl.fma(s, c, gl.expand_dims(-shift, 0))).to(dtype)
    alpha = gl.where(starts, 1.0, gl.exp2(before - shift))
    return m_new, alpha, p


@gluon.jit
def _attend_few(
    q, tiles, ones, q_tile, p_tiles, ready, empty, part_m, part_w, part_o, out, lse, begun, folded, cu_q, seq_lens,
    table, c, sequences, kv_heads, blocks, sq_t, sq_h, so_t, so_h, s_lse, s_table,
    GROUP: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, SHORT: gl.constexpr, ONE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = tiles.dtype
    # scores [KEY_TILE, ROWS], O [D, ROWS] and sums [SUM_ROWS, ROWS] lie alike, so that a row's values never move
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row_line: gl.constexpr = gl.SliceLayout(0, layout)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16] if D == 128 else [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PARTS: gl.constexpr = (SEGMENT // PAGE + 128) // 128

    begin, end, sequence, first_item, slots = run_of_team(cu_q, seq_lens, sequences, kv_heads, SEGMENT, SHORT, 4, ONE)
    heads = kv_heads * GROUP
    kv_head = gl.program_id(0) % kv_heads
    head = kv_head * GROUP
    key = gl.arange(0, KEY_TILE, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(1, layout))
    rows = gl.arange(0, ROWS, row_line)
    q_rows = gl.arange(0, ROWS, gl.SliceLayout(1, plain))
    q_d = gl.arange(0, D, gl.SliceLayout(0, plain))
    no_scores = gl.zeros([KEY_TILE, ROWS], gl.float32, layout)
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
            at = (q_begin + q_rows // GROUP).to(gl.int64) * sq_t + (head + q_rows % GROUP).to(gl.int64) * sq_h
            q_values = gl.load(
                q + gl.expand_dims(at, 1) + gl.expand_dims(q_d, 0), mask=gl.expand_dims(q_rows // GROUP < q_len, 1),
                other=0.0,
            )  # fmt: skip
            bad = 0
            for part in gl.static_range(PARTS):
                entry = start // PAGE + part * 128 + gl.arange(0, 128, line)
                page = gl.load(table + sequence.to(gl.int64) * s_table + entry, mask=entry * PAGE < stop, other=0)
                bad = gl.maximum(bad, gl.max(((page < 0) | (page >= blocks)).to(gl.int32), 0))
            row_ok = rows // GROUP < q_len
            position = gl.where(row_ok, length - q_len + rows // GROUP, -1)
            row_at = (q_begin + rows // GROUP).to(gl.int64) * s_lse + head + rows % GROUP
            if begun is not None:
                gl.atomic_add(begun + row_at, gl.full([ROWS], 1, gl.int32, row_line), mask=start <= position)
            m = gl.full([ROWS], NEG_INF, gl.float32, row_line)
            w = gl.zeros([SUM_ROWS, ROWS], gl.float32, layout)
            o = gl.zeros([D, ROWS], gl.float32, layout)
            s = no_scores
            # the matrix unit is done with the last item's queries in every warp
            barrier()
            q_tile.store(q_values)
            fence_async_shared()
            barrier()
            if start < stop:
                slot = taken % STAGES
                mbarrier.wait(ready.index(slot), (taken // STAGES) & 1)
                s_first = warpgroup_mma(
                    tiles.index(slot), q_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(0, deps=(s_first,))
                mbarrier.arrive(empty.index(slot), count=1)
            for first in range(start, stop, KEY_TILE):
                # the next scores run beside this tile's weighing; behind the last tile they are nobody's
                more = first + KEY_TILE < stop
                slot = (taken + 2) % STAGES
                mbarrier.wait(ready.index(slot), ((taken + 2) // STAGES) & 1, pred=more)
                s_next = warpgroup_mma(
                    tiles.index(slot), q_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                if first + KEY_TILE > length - q_len + 1:
                    s = gl.where(gl.expand_dims(first + key, 1) <= gl.expand_dims(position, 0), s, NEG_INF)
                m, alpha, p = _weigh(s, m, c, first == start, dtype)
                # two of them: a warp may still add the one before
                p_tile = p_tiles.index((taken // 2) % 2)
                p_tile.permute((1, 0)).store(p)
                fence_async_shared()
                barrier()
                o = o * gl.expand_dims(alpha, 0)
                w = w * gl.expand_dims(alpha, 0)
                value = (taken + 1) % STAGES
                mbarrier.wait(ready.index(value), ((taken + 1) // STAGES) & 1)
                if first + KEY_TILE > length:
                    drop_rows(tiles.index(value), length - first, dtype, KEY_TILE, D)
                o = warpgroup_mma(tiles.index(value).permute((1, 0)), p_tile.permute((1, 0)), o, is_async=True)
                w = warpgroup_mma(ones, p_tile.permute((1, 0)), w, is_async=True)
                s, o, w = warpgroup_mma_wait(0, deps=(s_next, o, w))
                mbarrier.arrive(empty.index(slot), count=1, pred=more)
                mbarrier.arrive(empty.index(value), count=1)
                taken += 2
            # a page outside the cache turns the rows that needed it into NaN
            row_sum = gl.where(bad != 0, float("nan"), gl.max(w, 0))
            if ONE:
                _finish_few(m, row_sum, o, out, lse, folded, row_at, row_ok, rows, d, q_begin, head, so_t, so_h,
                            GROUP, D, ROWS, row_line)  # fmt: skip
            elif count == 1:
                _finish_few(m, row_sum, o, out, lse, folded, row_at, row_ok, rows, d, q_begin, head, so_t, so_h,
                            GROUP, D, ROWS, row_line)  # fmt: skip
            else:
                # partial states of slot (sequence, segment, query)
                to = (slots + segment * q_len + rows // GROUP).to(gl.int64) * heads + head + rows % GROUP
                gl.store(part_m + to, m, mask=row_ok)
                gl.store(part_w + to, row_sum, mask=row_ok)
                gl.store(part_o + gl.expand_dims(to * D, 0) + gl.expand_dims(d, 1), o, mask=gl.expand_dims(row_ok, 0))


@gluon.jit
def _finish_few(
    m, w, o, out, lse, folded, row_at, row_ok, rows, d, q_begin, head, so_t, so_h,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, row_line: gl.constexpr,
):  # fmt: skip
    """Fold the only segment of a sequence into the empty state, divide and store."""
    total_m, a, b = fold_factors(gl.full([ROWS], NEG_INF, gl.float32, row_line), m)
    total_w = gl.fma(gl.zeros([ROWS], gl.float32, row_line), a, w * b)
    total_o = gl.fma(gl.zeros_like(o), gl.expand_dims(a, 0) + gl.zeros_like(o), o * gl.expand_dims(b, 0))
    some = total_w != 0.0
    row_lse = gl.where(some, (total_m + gl.log2(gl.where(some, total_w, 1.0))) * LN2, NEG_INF)
    gl.store(lse + row_at, row_lse, mask=row_ok)
    if folded is not None:
        gl.store(folded + row_at, (m != NEG_INF).to(gl.int32), mask=row_ok)
    live = gl.expand_dims(row_ok, 0)
    divisor = gl.expand_dims(gl.where(row_ok & some, total_w, 1.0), 0)
    result = gl.div_rn(gl.where(live, total_o, 1.0), divisor + gl.zeros_like(o))
    to = (q_begin + rows // GROUP).to(gl.int64) * so_t + (head + rows % GROUP).to(gl.int64) * so_h
    gl.store(out + gl.expand_dims(to, 0) + gl.expand_dims(d, 1), result.to(out.dtype.element_ty), mask=live)


_launch = with_fetching(_attend_few)


@gluon.jit(do_not_specialize=["sequences", "blocks"])
def attn_few_sm90_kernel(
    q, k_desc, v_desc, part_m, part_w, part_o, out, lse, begun, folded, cu_q, seq_lens, table, so_t, so_h, s_lse, c,
    sequences, kv_heads, blocks, sq_t, sq_h, k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows,
    v_head_columns, s_table,
    GROUP: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, SHORT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """As ``triton_hopper_decode.attn_segments_sm90_kernel``, for sequences of up to SHORT <= ROWS // GROUP queries."""
    dtype: gl.constexpr = k_desc.dtype
    ones_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SUM_ROWS, KEY_TILE], dtype)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEY_TILE], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, D], k_desc.layout)
    ones = gl.allocate_shared_memory(dtype, [SUM_ROWS, KEY_TILE], ones_shared)
    p_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, KEY_TILE], p_shared)
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, D], q_shared)
    _launch(
        q, k_desc, v_desc, tiles, ones, q_tile, p_tiles, part_m, part_w, part_o, out, lse, begun, folded,
        cu_q, seq_lens, table, c, sequences, kv_heads, blocks, sq_t, sq_h, so_t, so_h, s_lse, k_page_rows, k_head_rows,
        k_head_columns, v_page_rows, v_head_rows, v_head_columns, s_table,
        GROUP, D, KEY_TILE, SEGMENT, STAGES, PAGE, SHORT, ROWS,
    )  # fmt: skip
