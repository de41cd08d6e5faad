"""What the decodes of sm90 share, contract ``attention``: the runs of segments, the warp that fetches them, the launch.

Nothing here adds or rounds. A team of programs, one for each kv head, goes through the same segments: memory sees whole
tokens, not single heads. One warp fetches the pages of its program's segments ahead of time, across the borders of
segments; four warps attend.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rl_attn.triton_hopper_tiles import barrier, fetch_tile, short_sequences


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def describe(cu_q, seq_lens, sequence, SEGMENT: gl.constexpr, SHORT: gl.constexpr, ONE: gl.constexpr):
    """Of one sequence: first query row, queries, keys, segments that this kernel computes.

    ONE: a sequence is one segment, without queries where it is not this kernel's, so that none has to be counted."""
    begin = gl.load(cu_q + sequence).to(gl.int32)
    queries = gl.load(cu_q + sequence + 1).to(gl.int32) - begin
    keys = gl.load(seq_lens + sequence).to(gl.int32)
    if ONE:
        queries = gl.where(queries <= SHORT, queries, 0)
        keys = gl.where(queries > 0, gl.minimum(keys, SEGMENT), 0)
        count = begin * 0 + 1
    else:
        count = gl.where((queries > 0) & (queries <= SHORT), (keys + SEGMENT - 1) // SEGMENT, 0)
    return begin, queries, keys, count


@gluon.jit
def _share(cu_q, seq_lens, sequences, kv_heads, SEGMENT: gl.constexpr, SHORT: gl.constexpr, WARPS: gl.constexpr):
    """This team's run of (sequence, segment): begin, end, the sequence of the first one, and how many runs and partial
    slots lie before that sequence."""
    line: gl.constexpr = gl.BlockedLayout([4 // WARPS], [32], [WARPS], [0])
    team = gl.program_id(0) // kv_heads
    teams = gl.num_programs(0) // kv_heads
    work = 0
    for start in range(0, sequences, 128):
        b = start + gl.arange(0, 128, line)
        _, segments = short_sequences(b, b < sequences, cu_q, seq_lens, SEGMENT, SHORT)
        work += gl.sum(segments, 0)
    whole = work.to(gl.int64)  # type: ignore[attr-defined]
    begin = (whole * team // teams).to(gl.int32)
    end = (whole * (team + 1) // teams).to(gl.int32)
    sequence = 0
    first_item = 0
    slots = 0
    passed = 0
    # of one sequence nothing lies before it
    if sequences > 1:
        for start in range(0, sequences, 128):
            b = start + gl.arange(0, 128, line)
            live = b < sequences
            queries, segments = short_sequences(b, live, cu_q, seq_lens, SEGMENT, SHORT)
            ends = passed + gl.associative_scan(segments, 0, _sum)
            before = live & (ends <= begin)
            sequence += gl.sum(before.to(gl.int32), 0)
            first_item = gl.maximum(first_item, gl.max(gl.where(before, ends, 0), 0))
            slots += gl.sum(gl.where(before, segments * queries, 0), 0)
            passed += gl.sum(segments, 0)
    return begin, end, sequence, first_item, slots


@gluon.jit
def run_of_team(
    cu_q, seq_lens, sequences, kv_heads, SEGMENT: gl.constexpr, SHORT: gl.constexpr, WARPS: gl.constexpr,
    ONE: gl.constexpr,
):  # fmt: skip
    """As ``_share``; with one segment a sequence, no length is looked at."""
    if ONE:
        team = gl.program_id(0) // kv_heads
        teams = gl.num_programs(0) // kv_heads
        begin = sequences * team // teams
        return begin, sequences * (team + 1) // teams, begin, begin, begin * 0
    else:
        return _share(cu_q, seq_lens, sequences, kv_heads, SEGMENT, SHORT, WARPS)


@gluon.jit
def fetch_segments(
    k_desc, v_desc, tiles, ready, empty, cu_q, seq_lens, table, sequences, kv_heads, blocks, k_page_rows, k_head_rows,
    k_head_columns, v_page_rows, v_head_rows, v_head_columns, s_table,
    KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, SHORT: gl.constexpr,
    ONE: gl.constexpr,
):  # fmt: skip
    """The fetching warp: a ring of STAGES tiles, keys and values in turn."""
    begin, end, sequence, first_item, _ = run_of_team(cu_q, seq_lens, sequences, kv_heads, SEGMENT, SHORT, 1, ONE)
    kv_head = gl.program_id(0) % kv_heads
    taken = 0
    if begin < end:
        _, _, length, count = describe(cu_q, seq_lens, sequence, SEGMENT, SHORT, ONE)
        for item in range(begin, end):
            while item >= first_item + count:
                first_item += count
                sequence += 1
                _, _, length, count = describe(cu_q, seq_lens, sequence, SEGMENT, SHORT, ONE)
            start = (item - first_item) * SEGMENT
            table_row = table + sequence.to(gl.int64) * s_table
            stop = gl.minimum(start + SEGMENT, length)
            for first in range(start, stop, KEY_TILE):
                slot = taken % STAGES
                mbarrier.wait(empty.index(slot), ((taken // STAGES) & 1) ^ 1)
                fetch_tile(k_desc, ready.index(slot), tiles.index(slot), 0, kv_head * k_head_columns, table_row, first,
                           (stop - 1) // PAGE, blocks, k_page_rows, kv_head * k_head_rows, KEY_TILE, PAGE)  # fmt: skip
                slot = (taken + 1) % STAGES
                mbarrier.wait(empty.index(slot), (((taken + 1) // STAGES) & 1) ^ 1)
                fetch_tile(v_desc, ready.index(slot), tiles.index(slot), 0, kv_head * v_head_columns, table_row, first,
                           (stop - 1) // PAGE, blocks, v_page_rows, kv_head * v_head_rows, KEY_TILE, PAGE)  # fmt: skip
                taken += 2


def with_fetching(attend: Any) -> Any:
    """A function of a kernel that runs ``attend`` on four warps and ``fetch_segments`` on one, a ring of tiles between.

    Its arguments: ``tiles`` [STAGES, KEY_TILE, D]; ``ones`` [any, KEY_TILE], filled here; ``first_room`` and
    ``second_room``, shared memory that only ``attend`` knows; ROWS, query rows of a kv head that ``attend`` holds.
    """

    @gluon.jit
    def launch(
        q, k_desc, v_desc, tiles, ones, first_room, second_room, part_m, part_w, part_o, out, lse, begun, folded, cu_q,
        seq_lens, table, c, sequences, kv_heads, blocks, sq_t, sq_h, so_t, so_h, s_lse, k_page_rows, k_head_rows,
        k_head_columns, v_page_rows, v_head_rows, v_head_columns, s_table,
        GROUP: gl.constexpr, D: gl.constexpr, KEY_TILE: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
        PAGE: gl.constexpr, SHORT: gl.constexpr, ROWS: gl.constexpr,
    ):  # fmt: skip
        ONE: gl.constexpr = part_m is None
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        ones.store(gl.full(ones.shape, 1.0, ones.dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        fence_async_shared()
        barrier()
        # the fold may be brought up meanwhile; it waits for the partial states itself
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.warp_specialize(
            [
                (
                    attend,
                    (
                        q, tiles, ones, first_room, second_room, ready, empty, part_m, part_w, part_o, out, lse, begun,
                        folded, cu_q, seq_lens, table, c, sequences, kv_heads, blocks, sq_t, sq_h, so_t, so_h, s_lse,
                        s_table, GROUP, D, KEY_TILE, SEGMENT, STAGES, PAGE, SHORT, ONE, ROWS,
                    ),
                ),
                (
                    fetch_segments,
                    (
                        k_desc, v_desc, tiles, ready, empty, cu_q, seq_lens, table, sequences, kv_heads, blocks,
                        k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows, v_head_columns, s_table,
                        KEY_TILE, SEGMENT, STAGES, PAGE, SHORT, ONE,
                    ),
                ),
            ],
            [1],
            [40],
        )  # fmt: skip

    return launch
