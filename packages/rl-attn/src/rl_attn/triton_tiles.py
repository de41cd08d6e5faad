"""Pieces shared by the GPU attention kernels, contract ``attention`` of sm90, gfx942 and gfx950.

Order: a score is a matrix-unit chain over head_dim ascending, padded with zeros; a tile rescales the state, then adds
its keys in ascending order through the matrix unit, the row sum as one more dot of the same P with ones. Segments are
folded left. Rounded: the maximum's product with c, P to the value type, and each product and explicit fma; contraction
is off. Query tile, warps and stages are free, because no reduction here crosses lanes in an order of the compiler's.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# the narrowest right operand that every matrix unit takes
SUM_COLUMNS = tl.constexpr(16)


@triton.jit
def finite(m):
    """``m``, or 0 for the maximum of the empty state, so that differences never are inf - inf."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    w = tl.zeros((BLOCK_M, SUM_COLUMNS), tl.float32)  # every column holds the row sum
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    return m, w, o


@triton.jit
def weigh(s, m, c, starts, dtype: tl.constexpr):
    """Of one tile of raw scores ``s [BLOCK_M, KEY_TILE]`` (-inf where masked): new maximum, old state's factor, P.

    ``starts``: the tile opens a segment; the old state then does not count, and its factor is 1, so that it can still
    be folded.
    """
    before = tl.where(starts, NEG_INF, m)
    m_new = tl.maximum(before, tl.max(s, 1) * c)
    shift = finite(m_new)
    p = tl.math.exp2(tl.fma(s, c, -shift[:, None])).to(dtype)
    alpha = tl.where(starts, 1.0, tl.math.exp2(before - shift))
    return m_new, alpha, p


@triton.jit
def add_keys(p, v, w, o):
    """Add one tile to the rescaled state; the row sum is the same dot, with ones for values."""
    ones = tl.full((p.shape[1], SUM_COLUMNS), 1.0, v.dtype)
    return tl.dot(p, ones, w), tl.dot(p, v, o)


@triton.jit
def fold(m, w, o, part_m, part_w, part_o):
    """State (+) the state of the next segment. An empty part is an exact identity."""
    m_new = tl.maximum(m, part_m)
    shift = finite(m_new)
    a = tl.math.exp2(m - shift)[:, None]
    b = tl.math.exp2(part_m - shift)[:, None]
    w = tl.fma(w, a, part_w * b)
    o = tl.fma(o, a, part_o * b)
    return m_new, w, o


@triton.jit
def divide(o, w, live):
    """O / row sum; ``w`` in a shape that fits O. A row without any weight gives 0.

    What is not ``live`` divides 1 by 1: division on NVIDIA takes a slow path wherever a numerator is zero.
    """
    return tl.div_rn(tl.where(live, o, 1.0), tl.where(live & (w != 0.0), w, 1.0))


@triton.jit
def log_sum(m, w):
    """Natural LSE of (m, row sum), -inf for a row without any weight."""
    return tl.where(w != 0.0, (m + tl.math.log2(tl.where(w != 0.0, w, 1.0))) * LN2, NEG_INF)


@triton.jit
def first_column(x):
    """Column 0 of ``x [M, N]``; an exact selection, since a sum with zeros rounds nothing."""
    columns = tl.arange(0, x.shape[1])[None, :]
    return tl.sum(tl.where(columns == 0, x, 0.0), 1)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def neighbour_tree(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Row sums ``[ROWS]`` of x [ROWS, WIDTH]: neighbours added first, then neighbours of the results.

    Each level reduces pairs, where no layout leaves a choice of order, and none has to be changed for it.
    """
    if WIDTH == 1:
        return x.reshape(ROWS)
    else:
        pairs = tl.reduce(x.reshape(ROWS, WIDTH // 2, 2), 2, _sum)
        return neighbour_tree(pairs, ROWS, WIDTH // 2)


@triton.jit
def find_sequence(tile, cu, sequences, TOKENS: tl.constexpr):
    """The sequence that query tile ``tile`` belongs to: the tiles of sequence b begin at number cu[b] // TOKENS + b."""
    CHUNK: tl.constexpr = 128
    count = 0
    for start in range(0, sequences, CHUNK):
        b = start + tl.arange(0, CHUNK)
        begin = tl.load(cu + b, mask=b < sequences, other=0).to(tl.int32)
        count += tl.sum(((begin // TOKENS + b <= tile) & (b < sequences)).to(tl.int32), 0)
    return count - 1


@triton.jit
def key_rows(base, table_row, keys, inside, kv_head, stride_b, stride_h, stride_t, blocks, PAGE: tl.constexpr):
    """(pointer to each key's row, which rows may be read). PAGE 0: packed, ``base`` is the sequence's first row.

    Page ids behind the last needed key are never read; a page id outside the cache is never followed.
    """
    if PAGE == 0:
        return base + keys.to(tl.int64) * stride_t, inside
    page = tl.load(table_row + keys // PAGE, mask=inside, other=0).to(tl.int64)
    known = inside & (page >= 0) & (page < blocks)
    at = page * stride_b + (keys % PAGE).to(tl.int64) * stride_t + kv_head.to(tl.int64) * stride_h
    return base + at, known
