"""Forward attention on sm90, contract ``attention``: the walk of ``triton_forward`` on specialised warps.

Same order and same rounding, hence the same bits: key tiles ascending inside a segment, a new empty state at each
segment, segments folded left, one division, the output rounded once. One warp fetches key and value tiles with the copy
engine, from packed rows or page by page; two groups of four warps hold 64 query rows each, and weigh tile j + 1 while
the matrix unit still adds tile j. The folded state of a row waits in shared memory while its next segment runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_attn.triton_hopper_tiles import (
    GROUP_ROWS,
    LN2,
    NEG_INF,
    SUM_COLUMNS,
    barrier,
    columns,
    divide,
    drop_rows,
    fetch_tile,
    fold_factors,
    weigh,
)


@gluon.jit
def _fetch(
    k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_empty, v_empty, k_begin, k_column, v_column, tiles,
    table_row, last_entry, blocks, k_page_rows, k_head_rows, v_page_rows, v_head_rows,
    KEY_TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The fetching warp."""
    for j in range(tiles):
        slot = j % STAGES
        free = ((j // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), free)
        fetch_tile(k_desc, k_ready.index(slot), k_tiles.index(slot), k_begin, k_column, table_row, j * KEY_TILE,
                   last_entry, blocks, k_page_rows, k_head_rows, KEY_TILE, PAGE)  # fmt: skip
        mbarrier.wait(v_empty.index(slot), free)
        fetch_tile(v_desc, v_ready.index(slot), v_tiles.index(slot), k_begin, v_column, table_row, j * KEY_TILE,
                   last_entry, blocks, v_page_rows, v_head_rows, KEY_TILE, PAGE)  # fmt: skip


@gluon.jit
def _attend(
    which, q, q_tiles, k_tiles, v_tiles, ones, totals, k_ready, v_ready, k_empty, v_empty, out, lse, begun, folded,
    positions, c, q_begin, q_len, k_len, token0, kv_head, tiles, bad, sq_t, sq_h, so_t, so_h, s_lse,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Four warps with query rows ``which * 64 ...``."""
    dtype: gl.constexpr = k_tiles.dtype
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_TILE, 16])
    layout_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    layout_w: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout_s)
    left_o: gl.constexpr = gl.DotOperandLayout(0, layout_o, 2)
    left_w: gl.constexpr = gl.DotOperandLayout(0, layout_w, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16] if D == 128 else [4, 8], [4, 1], [1, 0])

    # on its way while positions are read and the first keys arrive
    q_rows = which * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, plain))
    q_token = token0 + q_rows // GROUP
    q_at = (q_begin + q_token).to(gl.int64) * sq_t + (kv_head * GROUP + q_rows % GROUP).to(gl.int64) * sq_h
    q_values = gl.load(
        q + gl.expand_dims(q_at, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, plain)), 0),
        mask=gl.expand_dims((q_token < q_len) & (q_rows < TOKENS * GROUP), 1), other=0.0,
    )  # fmt: skip
    rows = which * GROUP_ROWS + gl.arange(0, GROUP_ROWS, rows_layout)
    token = token0 + rows // GROUP
    row_ok = (token < q_len) & (rows < TOKENS * GROUP)
    if PAGE == 0:
        position = gl.load(positions + (q_begin + token).to(gl.int64), mask=row_ok, other=-1).to(gl.int32)
    else:
        position = gl.where(row_ok, k_len - q_len + token, -1)
    all_see = gl.min(gl.where(row_ok, position, 2147483646), 0) + 1
    key = gl.arange(0, KEY_TILE, gl.SliceLayout(0, layout_s))

    q_tile = q_tiles.index(which)
    total = totals.index(which)
    m = gl.full([GROUP_ROWS], NEG_INF, gl.float32, rows_layout)
    w = gl.zeros([GROUP_ROWS, SUM_COLUMNS], gl.float32, layout_w)
    o = gl.zeros([GROUP_ROWS, D], gl.float32, layout_o)
    total_m = gl.full([GROUP_ROWS], NEG_INF, gl.float32, rows_layout)
    total_w = gl.zeros([GROUP_ROWS, SUM_COLUMNS], gl.float32, layout_w)
    total.store(o)
    q_tile.store(q_values)
    fence_async_shared()
    barrier()
    empty = gl.zeros([GROUP_ROWS, KEY_TILE], gl.float32, layout_s)

    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    s = gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(position, 1), s, NEG_INF)
    m, alpha, p = weigh(s, m, c, True, dtype)
    if begun is not None:
        row_begun = (position >= 0).to(gl.int32)
        row_folded = gl.zeros([GROUP_ROWS], gl.int32, rows_layout)
    mbarrier.wait(k_ready.index(1 % STAGES), 1 // STAGES, pred=tiles > 1)
    for j in range(1, tiles):
        slot = j % STAGES
        last = (j - 1) % STAGES
        last_phase = ((j - 1) // STAGES) & 1
        s_next = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(last), last_phase)
        left = gl.convert_layout(p, left_o)
        left_sum = gl.convert_layout(p, left_w)
        o_next = warpgroup_mma(left, v_tiles.index(last), o, is_async=True)
        w_next = warpgroup_mma(left_sum, ones.permute((1, 0)), w, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s_next,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        first = j * KEY_TILE
        if first + KEY_TILE > all_see:
            s = gl.where(gl.expand_dims(first + key, 0) <= gl.expand_dims(position, 1), s, NEG_INF)
        starts = first % SEGMENT == 0
        m_new, alpha, p = weigh(s, m, c, starts, dtype)
        # without a wait of another kind here, and p passing through, the exponentials would be moved behind the adding
        mbarrier.wait(k_ready.index((j + 1) % STAGES), ((j + 1) // STAGES) & 1, pred=j + 1 < tiles)
        o, w, left, left_sum, p = warpgroup_mma_wait(0, deps=(o_next, w_next, left, left_sum, p))
        mbarrier.arrive(v_empty.index(last), count=1)
        o = o * columns(alpha, layout_o)
        w = w * columns(alpha, layout_w)
        if starts:
            if begun is not None:
                row_begun += (first <= position).to(gl.int32)
                row_folded += (m != NEG_INF).to(gl.int32)
            total_m, a, b = fold_factors(total_m, m)
            total_w = gl.fma(total_w, columns(a, layout_w), w * columns(b, layout_w))
            total.store(gl.fma(total.load(layout_o), columns(a, layout_o), o * columns(b, layout_o)))
            o = gl.zeros([GROUP_ROWS, D], gl.float32, layout_o)
            w = gl.zeros([GROUP_ROWS, SUM_COLUMNS], gl.float32, layout_w)
        m = m_new

    final = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(final), ((tiles - 1) // STAGES) & 1)
    v_tile = v_tiles.index(final)
    if tiles * KEY_TILE > k_len:
        drop_rows(v_tile, k_len - (tiles - 1) * KEY_TILE, dtype, KEY_TILE, D)
    o = warpgroup_mma(gl.convert_layout(p, left_o), v_tile, o, is_async=True)
    w = warpgroup_mma(gl.convert_layout(p, left_w), ones.permute((1, 0)), w, is_async=True)
    o, w = warpgroup_mma_wait(0, deps=(o, w))
    total_m, a, b = fold_factors(total_m, m)
    total_w = gl.fma(total_w, columns(a, layout_w), w * columns(b, layout_w))
    total_o = gl.fma(total.load(layout_o), columns(a, layout_o), o * columns(b, layout_o))

    out_rows = which * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout_o))
    out_token = token0 + out_rows // GROUP
    out_ok = (out_token < q_len) & (out_rows < TOKENS * GROUP)
    row_sum = gl.max(total_w, 1)
    result = divide(total_o, row_sum, out_ok, layout_o)
    row_sum = gl.convert_layout(row_sum, rows_layout)
    some = row_sum != 0.0
    row_lse = gl.where(some, (total_m + gl.log2(gl.where(some, row_sum, 1.0))) * LN2, NEG_INF)
    if PAGE != 0:
        # rows that needed a page outside the cache become NaN
        result = gl.where(bad != 0, float("nan"), result)
        row_lse = gl.where(bad != 0, float("nan"), row_lse)
    head = kv_head * GROUP + rows % GROUP
    gl.store(lse + (q_begin + token).to(gl.int64) * s_lse + head, row_lse, mask=row_ok)
    if begun is not None:
        counted = (q_begin + token).to(gl.int64) * s_lse + head
        gl.store(begun + counted, row_begun, mask=row_ok)
        gl.store(folded + counted, row_folded + (m != NEG_INF).to(gl.int32), mask=row_ok)
    out_head = (kv_head * GROUP + out_rows % GROUP).to(gl.int64)
    at = (q_begin + out_token).to(gl.int64) * so_t + out_head * so_h
    d = gl.arange(0, D, gl.SliceLayout(0, layout_o))
    gl.store(
        out + gl.expand_dims(at, 1) + gl.expand_dims(d, 0), result.to(out.dtype.element_ty),
        mask=gl.expand_dims(out_ok, 1),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["sequences", "blocks"])
def attn_fwd_sm90_kernel(
    q, k_desc, v_desc, out, lse, begun, folded, cu_q, cu_k, seq_lens, positions, table, c, sequences, blocks,
    sq_t, sq_h, k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows, v_head_columns,
    so_t, so_h, s_lse, s_table,
    GROUP: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads); 128 query rows a program. K and V as tables of rows behind their descriptors.

    PAGE 0: packed, a row holds all heads. Sequences of up to SHORT queries are left to ``triton_hopper_decode``.
    begun, folded: int32, laid out as lse, or None; what ``counting`` says.
    """
    TOKENS: gl.constexpr = 2 * GROUP_ROWS // GROUP
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = k_desc.dtype
    # the longest rows first
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    sequence = 0
    if sequences > 1:
        for start in range(0, sequences, 128):
            b = start + gl.arange(0, 128, line)
            begin = gl.load(cu_q + b, mask=b < sequences, other=0).to(gl.int32)
            sequence += gl.sum(((begin // TOKENS + b <= tile) & (b < sequences)).to(gl.int32), 0)
        sequence -= 1
    q_begin = gl.load(cu_q + sequence).to(gl.int32)
    q_len = gl.load(cu_q + sequence + 1).to(gl.int32) - q_begin
    token0 = (tile - q_begin // TOKENS - sequence) * TOKENS
    if token0 >= q_len or q_len <= SHORT:
        return
    if PAGE == 0:
        k_begin = gl.load(cu_k + sequence).to(gl.int32)
        k_len = gl.load(cu_k + sequence + 1).to(gl.int32) - k_begin
    else:
        k_begin = 0
        k_len = gl.load(seq_lens + sequence).to(gl.int32)
    table_row = table + sequence.to(gl.int64) * s_table  # type: ignore[attr-defined]

    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_ROWS, D], dtype)
    ones_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SUM_COLUMNS, KEY_TILE], dtype)
    total_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_tiles = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, D], q_shared)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, D], v_desc.layout)
    ones = gl.allocate_shared_memory(dtype, [SUM_COLUMNS, KEY_TILE], ones_shared)
    totals = gl.allocate_shared_memory(gl.float32, [2, GROUP_ROWS, D], total_shared)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)

    ones.store(gl.full([SUM_COLUMNS, KEY_TILE], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    # positions ascend: the tile's last row sees the most keys
    last_token = gl.minimum(token0 + TOKENS, q_len) - 1
    bad = 0
    last_entry = 0
    if PAGE == 0:
        limit = gl.load(positions + (q_begin + last_token).to(gl.int64)).to(gl.int32) + 1
    else:
        limit = gl.maximum(k_len - q_len + last_token + 1, 0)
        last_entry = gl.maximum((limit - 1) // PAGE, 0)
        for start in range(0, (limit + PAGE - 1) // PAGE, 1024):
            entry = start + gl.arange(0, 1024, line)
            page = gl.load(table_row + entry, mask=entry * PAGE < limit, other=0).to(gl.int32)
            bad = gl.maximum(bad, gl.max(((page < 0) | (page >= blocks)).to(gl.int32), 0))
    fence_async_shared()
    barrier()
    # a tile without rows still takes one step, whose keys are all masked
    tiles = gl.maximum((limit + KEY_TILE - 1) // KEY_TILE, 1)

    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, q, q_tiles, k_tiles, v_tiles, ones, totals, k_ready, v_ready, k_empty, v_empty, out, lse,
                    begun, folded, positions, c, q_begin, q_len, k_len, token0, kv_head, tiles, bad, sq_t, sq_h, so_t,
                    so_h, s_lse, GROUP, TOKENS, D, KEY_TILE, SEGMENT, STAGES, PAGE,
                ),
            ),
            (
                _attend,
                (
                    1, q, q_tiles, k_tiles, v_tiles, ones, totals, k_ready, v_ready, k_empty, v_empty, out, lse,
                    begun, folded, positions, c, q_begin, q_len, k_len, token0, kv_head, tiles, bad, sq_t, sq_h, so_t,
                    so_h, s_lse, GROUP, TOKENS, D, KEY_TILE, SEGMENT, STAGES, PAGE,
                ),
            ),
            (
                _fetch,
                (
                    k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_empty, v_empty, k_begin,
                    kv_head * k_head_columns, kv_head * v_head_columns, tiles, table_row, last_entry, blocks,
                    k_page_rows, kv_head * k_head_rows, v_page_rows, kv_head * v_head_rows,
                    KEY_TILE, STAGES, PAGE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
