"""Pieces shared by the attention kernels of sm90 with specialised warps, contract ``attention``.

Order and rounding are those of ``triton_tiles``, hence the same bits. One warp fetches key and value tiles with the
copy engine, packed rows or pages alike; groups of four warps hold 64 query rows each.
"""

from functools import cache

from torch import Tensor, bfloat16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NEG_INF = gl.constexpr(float("-inf"))
LN2 = gl.constexpr(0.6931471805599453)
GROUP_ROWS = gl.constexpr(64)  # query rows of a group of four warps
SUM_COLUMNS = gl.constexpr(8)  # the narrowest right operand of the matrix unit
# their names in Triton 3.6 and after it
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def finite(m):
    """As ``triton_tiles.finite``."""
    return gl.where(m == NEG_INF, 0.0, m)


@gluon.jit
def weigh(s, m, c, starts, dtype: gl.constexpr):
    """As ``triton_tiles.weigh``."""
    before = gl.where(starts, NEG_INF, m)
    m_new = gl.maximum(before, gl.max(s, 1) * c)
    shift = finite(m_new)
    p = gl.exp2(gl.fma(s, c, gl.expand_dims(-shift, 1))).to(dtype)
    alpha = gl.where(starts, 1.0, gl.exp2(before - shift))
    return m_new, alpha, p


@gluon.jit
def columns(x, like: gl.constexpr):
    """Row values as ``[rows, 1]`` beside a tile of layout ``like``."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like)), 1)


@gluon.jit
def fold_factors(m, part_m):
    """As ``triton_tiles.fold``: the joint maximum and the factors of both sides."""
    m_new = gl.maximum(m, part_m)
    shift = finite(m_new)
    return m_new, gl.exp2(m - shift), gl.exp2(part_m - shift)


@gluon.jit
def divide(o, w, live, like: gl.constexpr):
    """As ``triton_tiles.divide``: O of layout ``like``, a row sum a row, and which rows are live, of O's rows."""
    live = gl.expand_dims(live, 1)
    w = columns(w, like)
    divisor = gl.where(live & (w != 0.0), w, 1.0)
    return gl.div_rn(gl.where(live, o, 1.0), divisor + gl.zeros_like(o))


@gluon.jit
def flat(x, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared fp32 memory seen in another shape."""
    if RENAMED:
        return x.reinterpret(gl.float32, SHAPE, LAYOUT)
    else:
        return x._reinterpret(gl.float32, SHAPE, LAYOUT)


@gluon.jit
def fetch_tile(desc, ready, tile, row0, column, table_row, first, last_entry, blocks, page_rows, head_rows,
               KEY_TILE: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start fetching keys ``first ...``; PAGE 0: packed rows from ``row0``. ``ready`` completes when all have arrived.

    A page id outside the cache is replaced by 0; entries behind ``last_entry`` are not read. Whoever adds the tile
    masks what that brings in.
    """
    mbarrier.expect(ready, KEY_TILE * desc.block_type.shape[1] * 2)
    if PAGE == 0:
        fetch(desc, [row0 + first, column], ready, tile)
    else:
        BOX: gl.constexpr = PAGE if PAGE < KEY_TILE else KEY_TILE
        for i in gl.static_range(KEY_TILE // BOX):
            key = first + i * BOX
            page = gl.load(table_row + gl.minimum(key // PAGE, last_entry)).to(gl.int32)
            page = gl.where((page >= 0) & (page < blocks), page, 0)
            row = page * page_rows + head_rows + key % PAGE
            fetch(desc, [row, column], ready, tile.slice(i * BOX, BOX, 0))


@gluon.jit
def drop_rows(tile, kept, dtype: gl.constexpr, KEY_TILE: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a value tile from ``kept`` on, as a masked load gives: they belong to nobody."""
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16] if D == 128 else [4, 8], [4, 1], [1, 0])
    inside = gl.arange(0, KEY_TILE, gl.SliceLayout(1, plain)) < kept
    values = gl.where(gl.expand_dims(inside, 1), tile.load(plain), 0.0)
    tile.store(values.to(dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def short_sequences(b, live, cu_q, seq_lens, SEGMENT: gl.constexpr, SHORT: gl.constexpr):
    """Of the live ones of sequences ``b``: queries, and the segments that decode computes."""
    begins = gl.load(cu_q + b, mask=live, other=0).to(gl.int32)
    queries = gl.load(cu_q + b + 1, mask=live, other=0).to(gl.int32) - begins
    keys = gl.load(seq_lens + b, mask=live, other=0).to(gl.int32)
    return queries, gl.where(live & (queries > 0) & (queries <= SHORT), (keys + SEGMENT - 1) // SEGMENT, 0)


def _shared(rows: int, x: Tensor) -> gl.NVMMASharedLayout:
    return _layout(rows, x.shape[-1], x.dtype == bfloat16)


@cache
def _layout(rows: int, columns: int, brain: bool) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if brain else gl.float16)


def rows_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x [T, H, D] as [T, all heads], fetched in blocks of ``rows`` times D; any strides whose last one is 1."""
    tokens, heads, head_dim = x.shape
    width = (heads - 1) * x.stride(1) + head_dim
    return TensorDescriptor(x, [tokens, width], [x.stride(0), 1], [rows, head_dim], _shared(rows, x))


def pages_descriptor(x: Tensor, steps: tuple[int, int, int], key_tile: int) -> TensorDescriptor:
    """A cache [blocks, Hkv, page, D] as a table of rows (``gpu.page_steps``), in blocks of a page, or of a key tile."""
    blocks, heads, page, head_dim = x.shape
    block_rows, head_rows, head_columns = steps
    rows = (blocks - 1) * block_rows + (heads - 1) * head_rows + page
    box = min(page, key_tile)
    return TensorDescriptor(
        x, [rows, (heads - 1) * head_columns + head_dim], [x.stride(2), 1], [box, head_dim], _shared(box, x)
    )
