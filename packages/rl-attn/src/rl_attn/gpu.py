"""Forward launches on a GPU: which kernels serve a call, by shapes and the frozen plan. No value is looked at.

Order and rounding are those of ``triton_tiles``; which kernel evaluates a call (one walk over all keys, or segments in
parallel and a fold) never shows in the bits. A call is decided once, and launched again where an equal one comes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_attn import counting, plans
from rl_attn.calls import traits
from rl_attn.gpu_device import (
    ARCHS,
    DTYPES,
    LOG2E,
    arch,
    block_rows,
    check,
    check_key_tile,
    current_plans,
    direct,
    exponent_factor,
    hopper,
    kernels,
    options,
    padded,
    record,
    ring_for,
    stages_for,
    unit_last,
)
from rl_attn.gpu_launch import WIDE_REGISTERS, Segments, Walk, page_steps
from rl_contract.gpu import processors_of
from rl_contract.triton_launch import keep

__all__ = [
    "ARCHS", "DTYPES", "LOG2E", "WIDE_REGISTERS", "arch", "block_rows", "check", "current_plans", "direct",
    "exponent_factor", "hopper", "kernels", "options", "packed", "padded", "page_steps", "paged", "record", "ring_for",
    "stages_for", "unit_last",
]  # fmt: skip

# sequences of one call whose segments may run in parallel; more than this fill the processors by themselves
MOST_SPLIT_SEQUENCES = 1024
MOST_SPLIT_PROGRAMS = 1024
# sequences up to which a table of one segment goes through the kernel for decode; 0: through the walk
MOST_SHORT_SEQUENCES = 1024
# query rows of a kv head and sequence up to which ``triton_hopper_few`` decodes; 0: never
MOST_NARROW_ROWS = 16
# rows a processor up to which the fold of sm90 takes them
FOLD_PROGRAMS = 2


class _Call(NamedTuple):
    """A decided call: its launches, their plans as evidence names them, and what the decision was made from."""

    own: plans.Plans
    segments: Segments | None
    segments_plan: str
    walk: Walk | None
    walk_plan: str


_packed: dict[Any, _Call] = {}
_paged: dict[Any, _Call] = {}


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, positions: Tensor, scale: float, key_tile: int,
    segment: int, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [Tq, Hq, D] and lse fp32 [Tq, Hq]; ``out_dtype`` float32 shows the value before its rounding."""
    own = current_plans(q)
    counts = counting.places(q)
    misaligned = (k.data_ptr() | v.data_ptr()) & 15
    given = (cu_q.shape, cu_q.dtype, cu_k.dtype, positions.dtype, scale, key_tile, segment, out_dtype)
    key = (id(own), counts[0] is None, misaligned, given, traits(q, k, v))
    call = _packed.get(key)
    if call is None:
        check("attention_packed", q, k, v)
        check_key_tile("attention_packed", key_tile)
        q, k, v = unit_last(q), unit_last(k), unit_last(v)
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if call is None:
        walk, plan = _packed_walk(own, q, k, v, cu_q.numel() - 1, scale, key_tile, segment, out, lse)
        call = _Call(own, None, "", walk, plan)
        # a copy with other strides has been made of what lay otherwise: the next call makes one too, or decides anew
        if key[-1] == traits(q, k, v):
            keep(_packed, key, call)
    assert call.walk is not None
    call.walk(q, k, v, out, lse, counts, cu_q, cu_k, cu_k, positions, cu_q)
    record("attention", call.walk.kernel, call.walk_plan, "packed")
    return out, lse


def _packed_walk(
    own: plans.Plans, q: Tensor, k: Tensor, v: Tensor, sequences: int, scale: float, key_tile: int, segment: int,
    out: Tensor, lse: Tensor,
) -> tuple[Walk, str]:  # fmt: skip
    group = q.shape[1] // k.shape[1]
    may = _may_specialise(q, k, v, k.shape[1], key_tile) and _may_fetch_rows(k) and _may_fetch_rows(v)
    row = own.choose("forward", q.shape[2], q.shape[0] * group // max(1, sequences), specialised=may)
    walk = Walk(row, q, k, v, sequences, None, 0, scale, key_tile, segment, out, lse)
    return walk, f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}"


def paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor,
    scale: float, key_tile: int, segment: int, max_keys: int = 0, out_dtype: torch.dtype | None = None,
    most_rows: int | None = None, out: Tensor | None = None, least_rows: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``packed``, keys on pages. ``max_keys``: a bound on seq_lens, where one below the table's width is known.
    ``most_rows``, ``least_rows``: bounds on the queries of a sequence. ``out``: where the result goes, last stride 1.
    """
    own = current_plans(q)
    counts = counting.places(q)
    misaligned = (k_cache.data_ptr() | v_cache.data_ptr()) & 15
    limits = (MOST_SPLIT_SEQUENCES, MOST_SPLIT_PROGRAMS, MOST_SHORT_SEQUENCES, MOST_NARROW_ROWS, FOLD_PROGRAMS)
    given = (scale, key_tile, segment, max_keys, most_rows, least_rows,
             None if out is None else (out.stride(), out.dtype), out_dtype)  # fmt: skip
    tensors = traits(q, k_cache, v_cache, query_start_loc, seq_lens, block_table)
    key = (id(own), counts[0] is None, misaligned, limits, given, tensors)
    call = _paged.get(key)
    if call is None:
        check("attention_paged", q, k_cache, v_cache)
        check_key_tile("attention_paged", key_tile)
        # kernels read what lies one behind the other
        q, query_start_loc, seq_lens, block_table = map(unit_last, (q, query_start_loc, seq_lens, block_table))
    if out is None:
        out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if call is None:
        call = _decide_paged(
            own, q, k_cache, v_cache, seq_lens, block_table, scale, key_tile, segment, max_keys, most_rows, least_rows,
            out, lse,
        )  # fmt: skip
        if tensors == traits(q, k_cache, v_cache, query_start_loc, seq_lens, block_table):
            keep(_paged, key, call)
    if call.segments is not None:
        call.segments(q, k_cache, v_cache, out, lse, counts, query_start_loc, seq_lens, block_table)
        record("attention", call.segments.kernel, call.segments_plan, "paged")
    if call.walk is not None:
        starts = query_start_loc
        call.walk(q, k_cache, v_cache, out, lse, counts, starts, starts, seq_lens, seq_lens, block_table)
        record("attention", call.walk.kernel, call.walk_plan, "paged")
    return out, lse


def _decide_paged(
    own: plans.Plans, q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float,
    key_tile: int, segment: int, max_keys: int, most_rows: int | None, least_rows: int, out: Tensor, lse: Tensor,
) -> _Call:  # fmt: skip
    tokens, heads, head_dim = q.shape
    _, kv_heads, page, _ = k_cache.shape
    sequences, group = seq_lens.numel(), heads // kv_heads
    may = (
        _may_specialise(q, k_cache, v_cache, kv_heads, key_tile)
        and _may_fetch_pages(k_cache)
        and _may_fetch_pages(v_cache)
    )
    bound = block_table.shape[1] * page
    most = -(-(min(bound, max_keys) if max_keys else bound) // segment)
    split = own.choose("segments", head_dim, sequences * kv_heads * most, specialised=may)
    room = block_rows(split, group) // group
    few = tokens <= sequences * room
    if most > 1:
        splits = sequences <= MOST_SPLIT_SEQUENCES and sequences * kv_heads <= MOST_SPLIT_PROGRAMS
        # of one sequence that is not short the segments have nothing to do
        splits = splits and (few or sequences > 1)
    else:
        # nothing runs in parallel that the walk would not; what pays is the kernel that needs no fold
        splits = split.specialised and few and sequences <= MOST_SHORT_SEQUENCES
    # where no sequence is short its kernels would find nothing to do; the walk takes what is not theirs
    splits = splits and least_rows <= (room if few else 1)
    short = (room if few else 1) if splits else 0
    narrow = 0
    if splits and split.specialised and most_rows is not None and most_rows <= short:
        # 8 or 16, where no sequence has more
        narrow = padded(group * most_rows) if group * most_rows > 8 else 8
        narrow = narrow if narrow <= MOST_NARROW_ROWS else 0
        short = narrow // group if narrow else short
    segments, segments_plan = None, ""
    if splits:
        # one thread a column leaves processors idle unless rows are few
        few_rows = tokens * heads <= FOLD_PROGRAMS * (processors_of(q.device.index or 0) if q.is_cuda else 1)
        fold_row = own.choose("fold", head_dim, most, specialised=split.specialised and few_rows) if most > 1 else None
        names = split.name if fold_row is None else f"{split.name}+{fold_row.name}"
        segments = Segments(
            split, fold_row, q, k_cache, v_cache, seq_lens, block_table, scale, key_tile, segment, most, short, narrow,
            out, lse,
        )  # fmt: skip
        segments_plan = f"{own.arch}:{names}:tile{key_tile}-segment{segment}-most{most}"
    walk, walk_plan = None, ""
    # where every sequence is short the walk has nothing to do; without a bound only the device knows
    if short < (tokens if most_rows is None else min(tokens, most_rows)):
        row = own.choose("paged", head_dim, tokens * group // max(1, sequences), specialised=may)
        walk = Walk(row, q, k_cache, v_cache, sequences, block_table, short, scale, key_tile, segment, out, lse)
        walk_plan = f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}"
    return _Call(own, segments, segments_plan, walk, walk_plan)


def _may_specialise(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, key_tile: int) -> bool:
    """What groups of 64 rows and the copy engine ask, on any cache or packed rows."""
    tokens, heads, head_dim = q.shape
    return (
        head_dim in (64, 128)
        and key_tile in (64, 128)
        and heads // kv_heads <= 64
        and tokens > 0
        and all(x.numel() and x.data_ptr() % 16 == 0 for x in (k, v))
    )


def _may_fetch_rows(x: Tensor) -> bool:
    return x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[2] and x.shape[0] < 2**31


def _may_fetch_pages(x: Tensor) -> bool:
    """A power of two of rows a page, in a cache that is a table of rows."""
    page = x.shape[2]
    return page >= 8 and page & (page - 1) == 0 and page_steps(x) is not None
