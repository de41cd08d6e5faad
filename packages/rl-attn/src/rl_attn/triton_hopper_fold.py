"""The fold of a decode on sm90, contract ``attention``: that of ``triton_decode`` with many partial states in flight.

Same order and same rounding, hence the same bits: a row's segments are folded left, ascending, from the empty state,
then divided once and rounded once. The factors of a fold depend on maxima alone, which have no order, so they are made
for all segments at once; the sums then take one multiplication and one fma a segment, one thread a column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from rl_attn.triton_hopper_tiles import LN2, NEG_INF, barrier, copy, finite, flat, short_sequences

CHUNK = gl.constexpr(64)  # segments on their way at once, twice


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _start(part_o, tiles, slot, q_len, heads, head, first, count, D: gl.constexpr):
    """Start copying O of segments ``first ...``; what lies behind the last one becomes +0."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32] if D == 128 else [2, 16], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, rows))
    for i in gl.static_range(CHUNK // 32):
        number = first + i * 32 + gl.arange(0, 32, gl.SliceLayout(1, rows))
        at = ((slot + number * q_len).to(gl.int64) * heads + head) * D
        copy(
            tiles.slice(i * 32, 32, 0), part_o + gl.expand_dims(at, 1) + gl.expand_dims(d, 0),
            mask=gl.expand_dims(number < count, 1) & gl.expand_dims(d < D, 0),
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["sequences"])
def attn_fold_sm90_kernel(
    part_m, part_w, part_o, out, lse, folded, cu_q, seq_lens, sequences, heads, so_t, so_h, s_lse,
    D: gl.constexpr, SEGMENT: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Grid (query rows, heads). Brought up while the segments still run: waits before it reads a partial state.

    folded: int32, laid out as lse, or None; what ``counting`` says.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.program_id(0)
    head = gl.program_id(1)
    # the last sequence that begins at or before the row; empty ones in between begin there too, but end there
    sequence = 0
    slot = 0
    for start in range(0, sequences, 128):
        b = start + gl.arange(0, 128, line)
        live = b < sequences
        begins = gl.load(cu_q + b, mask=live, other=0).to(gl.int32)
        queries = gl.load(cu_q + b + 1, mask=live, other=0).to(gl.int32) - begins
        sequence = gl.maximum(sequence, gl.max(gl.where(live & (begins <= row) & (queries > 0), b, 0), 0))
    for start in range(0, sequence, 128):
        b = start + gl.arange(0, 128, line)
        queries, segments = short_sequences(b, b < sequence, cu_q, seq_lens, SEGMENT, SHORT)
        slot += gl.sum(segments * queries, 0)
    q_begin = gl.load(cu_q + sequence).to(gl.int32)
    q_len = gl.load(cu_q + sequence + 1).to(gl.int32) - q_begin
    if q_len > SHORT:
        return
    token = row - q_begin
    slot += token
    length = gl.load(seq_lens + sequence).to(gl.int32)
    seen = length - q_len + token + 1
    count = (seen + SEGMENT - 1) // SEGMENT

    tile_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.float32, [2, CHUNK, D], tile_shared)
    old_factors = gl.allocate_shared_memory(gl.float32, [CHUNK, 1], line_shared)
    new_factors = gl.allocate_shared_memory(gl.float32, [CHUNK, 1], line_shared)
    new_sums = gl.allocate_shared_memory(gl.float32, [CHUNK, 1], line_shared)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # the segments kernel is done with sequences of one segment
    if length <= SEGMENT:
        return
    _start(part_o, tiles.index(0), slot, q_len, heads, head, 0, count, D)
    _start(part_o, tiles.index(1), slot, q_len, heads, head, CHUNK, count, D)
    i = gl.arange(0, CHUNK, line)
    d = gl.arange(0, D, line)
    total_m = NEG_INF
    total_w = gl.zeros([D], gl.float32, line)  # every column holds the row sum
    total_o = gl.zeros([D], gl.float32, line)
    if folded is not None:
        row_folded = 0
    for first in range(0, count, CHUNK):
        buffer = (first // CHUNK) % 2
        number = first + i
        at = (slot + number * q_len).to(gl.int64) * heads + head
        m = gl.load(part_m + at, mask=number < count, other=NEG_INF)
        w = gl.load(part_w + at, mask=number < count, other=0.0)
        if folded is not None:
            row_folded += gl.sum((m != NEG_INF).to(gl.int32), 0)
        # the maximum before each segment: of all up to it, shifted by one
        earlier = gl.load(part_m + at - q_len * heads, mask=(i > 0) & (number <= count), other=NEG_INF)
        before = gl.maximum(total_m, gl.associative_scan(earlier, 0, _larger))
        after = gl.maximum(before, m)
        a = gl.exp2(before - finite(after))
        b = gl.exp2(m - finite(after))
        # behind the last segment a factor of -0, so that -0 is added, which leaves every value alone, a -0 too
        b = gl.where(number < count, b, gl.full([CHUNK], -2147483648, gl.int32, line).to(gl.float32, bitcast=True))
        barrier()
        flat(old_factors, [CHUNK], line_shared).store(a)
        flat(new_factors, [CHUNK], line_shared).store(b)
        flat(new_sums, [CHUNK], line_shared).store(w * b)
        async_copy.wait_group(1)
        barrier()
        rows = flat(tiles.index(buffer), [CHUNK, D], line_shared)
        for step in range(0, gl.minimum(count - first, CHUNK), 16):
            for j in gl.static_range(16):
                a_j = old_factors.index(step + j).load(line)
                b_j = new_factors.index(step + j).load(line)
                w_j = new_sums.index(step + j).load(line)
                o_j = rows.index(step + j).load(line)
                total_w = gl.fma(total_w, a_j + gl.zeros_like(total_w), w_j + gl.zeros_like(total_w))
                total_o = gl.fma(total_o, a_j + gl.zeros_like(total_o), o_j * b_j)
        total_m = gl.max(after, 0)
        barrier()
        _start(part_o, tiles.index(buffer), slot, q_len, heads, head, first + 2 * CHUNK, count, D)
    some = total_w != 0.0
    divisor = gl.where(some, total_w, 1.0)
    result = gl.div_rn(total_o, divisor).to(out.dtype.element_ty)
    gl.store(out + row.to(gl.int64) * so_t + head.to(gl.int64) * so_h + d, result)
    row_lse = gl.where(some, (total_m + gl.log2(divisor)) * LN2, NEG_INF)
    gl.store(lse + row.to(gl.int64) * s_lse + head + d * 0, row_lse, mask=d == 0)
    if folded is not None:
        gl.store(folded + row.to(gl.int64) * s_lse + head + d * 0, row_folded + d * 0, mask=d == 0)
