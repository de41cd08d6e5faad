"""Launches of the GPU kernels: shapes, strides and the frozen plan of each call. Nothing here looks at a device value.

Order and rounding are those of ``triton_tiles``, ``triton_backward`` and ``triton_rotary``; which kernel evaluates a
call (one walk over all keys, or segments in parallel and a fold) is decided from shapes and never shows in the bits.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_attn import counting, plans
from rl_contract import ContractError, Launch, MissingSupport, record_launch

LOG2E = 1.4426950408889634
ARCHS = ("sm90", "gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16)
# sequences of one call whose segments may run in parallel; more than this fill the processors by themselves
MOST_SPLIT_SEQUENCES = 1024
MOST_SPLIT_PROGRAMS = 1024
# sequences up to which a table of one segment goes through the kernel for decode; 0: through the walk
MOST_SHORT_SEQUENCES = 1024
# query rows of a kv head and sequence up to which ``triton_hopper_few`` decodes; 0: never
MOST_NARROW_ROWS = 16
# rows a processor up to which the fold of sm90 takes them
FOLD_PROGRAMS = 2
# of a thread, for the specialised kernels where a processor runs one program
WIDE_REGISTERS = 168
Counts = tuple[Tensor, Tensor] | tuple[None, None]


@cache
def kernels() -> Any:
    """The Triton modules, as attributes ``forward``, ``decode``, ``backward``, ``rotary``.

    Raises:
        MissingSupport: Triton is not installed.
    """
    try:
        from rl_attn import triton_backward, triton_decode, triton_forward, triton_rotary
    except ImportError as error:
        raise MissingSupport(f"rl_attn on a GPU needs Triton ({error}); install a PyTorch build with Triton") from error

    class Kernels:
        forward, decode, backward, rotary = triton_forward, triton_decode, triton_backward, triton_rotary

    return Kernels


@cache
def _hopper() -> Any:
    """The kernels of sm90 alone, as attributes ``walk``, ``decode``, ``few``, ``fold``, ``tiles``."""
    from rl_attn import triton_hopper, triton_hopper_decode, triton_hopper_few, triton_hopper_fold, triton_hopper_tiles

    class Kernels:
        walk, decode, few = triton_hopper, triton_hopper_decode, triton_hopper_few
        fold, tiles = triton_hopper_fold, triton_hopper_tiles

    return Kernels


@cache
def arch(device_index: int) -> str:
    """Name of the device's contracts.

    Raises:
        MissingSupport: a GPU without a contract.
    """
    properties = torch.cuda.get_device_properties(device_index)
    hip = torch.version.hip is not None
    name = properties.gcnArchName.split(":")[0] if hip else f"sm{properties.major}{properties.minor}"
    if name not in ARCHS:
        raise MissingSupport(f"rl_attn got a {properties.name} ({name}); supported GPUs: {ARCHS}")
    return name


def current_plans(x: Tensor) -> plans.Plans:
    """The plan file for the device that holds ``x``."""
    return plans.current(arch(x.device.index or 0) if x.is_cuda else "generic")


@cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


# key rows of a stage, as plans count them
STAGE_ROWS = 64


def options(row: plans.Row, key_tile: int = STAGE_ROWS) -> dict[str, Any]:
    """Compiler options of a launch. Contraction is off; on CDNA the two switches that regroup sums are pinned.

    Args:
        key_tile: of the contract, in kernels whose stages hold one each; others have a plan's stages as they are.
    """
    found: dict[str, Any] = {"num_warps": row.warps, "num_stages": stages_for(row, key_tile), "enable_fp_fusion": False}
    if torch.version.hip is not None:
        found |= {"kpack": 1, "matrix_instr_nonkdim": 16}
    elif row.max_registers:
        found["maxnreg"] = row.max_registers
    return found


def stages_for(row: plans.Row, key_tile: int) -> int:
    """Stages in flight: wider key tiles take the room of a plan's with fewer."""
    return max(1, row.stages * STAGE_ROWS // max(STAGE_ROWS, key_tile))


def ring_for(row: plans.Row, key_tile: int) -> int:
    """Tiles of keys or values that a decode on specialised warps has on their way; a plan counts pairs of them."""
    return max(2, 2 * row.stages * 64 // key_tile)


def record(boundary: str, kernel: str, plan: str = "-", layout: str = "-") -> None:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    record_launch(Launch(boundary, kernel, plan, layout, "capture" if capturing else "eager"))


def direct(x: Tensor) -> bool:
    """Whether kernels on ``x`` may be launched without an opaque op around them, which takes longer than they do."""
    return x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling()


def check(where: str, *tensors: Tensor) -> None:
    """Model types of a GPU."""
    for x in tensors:
        if x.dtype not in DTYPES:
            raise ContractError(f"{where} on a GPU got {x.dtype}; supported: {DTYPES}; convert the model")


def padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def exponent_factor(scale: float) -> float:
    """c = fp32(fp64(scale) * log2(e))."""
    return float(np.float32(float(scale) * LOG2E))


def block_rows(row: plans.Row, group: int) -> int:
    """Query rows of a program: the plan's, or more where one token's heads need them."""
    return max(row.block_m, padded(group))


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, positions: Tensor, scale: float, key_tile: int,
    segment: int, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [Tq, Hq, D] and lse fp32 [Tq, Hq]; ``out_dtype`` float32 shows the value before its rounding."""
    check("attention_packed", q, k, v)
    q, k, v = unit_last(q), unit_last(k), unit_last(v)
    strides = (0, k.stride(1), k.stride(0), 0, v.stride(1), v.stride(0))
    own = current_plans(q)
    group = q.shape[1] // k.shape[1]
    may = _may_specialise(q, k, v, k.shape[1], key_tile) and _may_fetch_rows(k) and _may_fetch_rows(v)
    row = own.choose("forward", q.shape[2], q.shape[0] * group // max(1, cu_q.numel() - 1), specialised=may)
    out = q.new_empty(q.shape, dtype=out_dtype or q.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    counts = counting.places(q)
    if row.specialised:
        hopper = _hopper().tiles
        _walk_specialised(
            row, q, hopper.rows_descriptor(k, key_tile), hopper.rows_descriptor(v, key_tile), k.shape[1],
            (0, 0, k.stride(1), 0, 0, v.stride(1)), cu_q, cu_k, cu_k, positions, cu_q, 0, 0, 0, scale, key_tile,
            segment, out, lse, counts,
        )  # fmt: skip
        kernel = "rl_attn.triton_hopper"
    else:
        _walk(
            row, q, k, v, strides, k.shape[1], cu_q, cu_k, cu_q, positions, cu_q, 0, 0, 0, scale, key_tile, segment,
            out, lse, counts,
        )  # fmt: skip
        kernel = "rl_attn.triton_forward"
    record("attention", kernel, f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}", "packed")
    return out, lse


def paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor,
    scale: float, key_tile: int, segment: int, max_keys: int = 0, out_dtype: torch.dtype | None = None,
    most_rows: int | None = None, out: Tensor | None = None, least_rows: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``packed``, keys on pages. ``max_keys``: a bound on seq_lens, where one below the table's width is known.
    ``most_rows``, ``least_rows``: bounds on the queries of a sequence. ``out``: where the result goes, last stride 1.
    """
    check("attention_paged", q, k_cache, v_cache)
    q = unit_last(q)
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k_cache.shape
    sequences, group = seq_lens.numel(), heads // kv_heads
    (a, b, c, _), (d, e, f, _) = k_cache.stride(), v_cache.stride()
    strides = (a, b, c, d, e, f)
    own = current_plans(q)
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
    if out is None:
        out = q.new_empty((tokens, heads, head_dim), dtype=out_dtype or q.dtype)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    counts = counting.places(q)
    if splits:
        # one thread a column leaves processors idle unless rows are few
        few_rows = tokens * heads <= FOLD_PROGRAMS * (_processors(q.device.index or 0) if q.is_cuda else 1)
        fold_row = own.choose("fold", head_dim, most, specialised=split.specialised and few_rows) if most > 1 else None
        names = split.name if fold_row is None else f"{split.name}+{fold_row.name}"
        _segments(
            split, fold_row, q, k_cache, v_cache, strides, query_start_loc, seq_lens, block_table, scale, key_tile,
            segment, most, short, narrow, out, lse, counts,
        )  # fmt: skip
        plan = f"{own.arch}:{names}:tile{key_tile}-segment{segment}-most{most}"
        kernel = "rl_attn.triton_hopper_decode" if split.specialised else "rl_attn.triton_decode"
        kernel = "rl_attn.triton_hopper_few" if narrow else kernel
        record("attention", kernel, plan, "paged")
    # where every sequence is short the walk has nothing to do; without a bound only the device knows
    if short < (tokens if most_rows is None else min(tokens, most_rows)):
        row = own.choose("paged", head_dim, tokens * group // max(1, sequences), specialised=may)
        lengths = (query_start_loc, query_start_loc, seq_lens, seq_lens, block_table, blocks, page, short)
        if row.specialised:
            tiles, k_steps, v_steps = _hopper().tiles, page_steps(k_cache) or (), page_steps(v_cache) or ()
            _walk_specialised(
                row, q, tiles.pages_descriptor(k_cache, k_steps, key_tile),
                tiles.pages_descriptor(v_cache, v_steps, key_tile), kv_heads, (*k_steps, *v_steps), *lengths, scale,
                key_tile, segment, out, lse, counts,
            )  # fmt: skip
            kernel = "rl_attn.triton_hopper"
        else:
            _walk(
                row, q, k_cache, v_cache, strides, kv_heads, *lengths, scale, key_tile, segment, out, lse, counts,
            )  # fmt: skip
            kernel = "rl_attn.triton_forward"
        record("attention", kernel, f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}", "paged")
    return out, lse


def _walk(
    row: plans.Row, q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...], kv_heads: int, cu_q: Tensor,
    cu_k: Tensor, seq_lens: Tensor, positions: Tensor, table: Tensor, blocks: int, page: int, short: int, scale: float,
    key_tile: int, segment: int, out: Tensor, lse: Tensor, counts: Counts,
) -> None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    group, sequences = heads // kv_heads, cu_q.numel() - 1
    if tokens == 0 or sequences == 0:
        return
    block_m = block_rows(row, group)
    grid = (tokens // (block_m // group) + sequences, kv_heads)
    kernels().forward.attn_fwd_kernel[grid](
        q, k, v, out, lse, *counts, cu_q, cu_k, seq_lens, positions, table, exponent_factor(scale), sequences, blocks,
        q.stride(0), q.stride(1), *strides, out.stride(0), out.stride(1), lse.stride(0), table.stride(0) if page else 0,
        GROUP=group, D=head_dim, BLOCK_D=padded(head_dim), BLOCK_M=block_m, KEY_TILE=key_tile, SEGMENT=segment,
        PAGE=page, SHORT=short, **options(row, key_tile),
    )  # fmt: skip


def page_steps(x: Tensor) -> tuple[int, int, int] | None:
    """Of a cache ``[blocks, Hkv, page, D]``: rows a block, rows a head and columns a head takes in a table of rows
    ``stride(2)`` elements apart; None where its strides are no such table."""
    block, head, token, _ = x.stride()
    if token < x.shape[3] or token % 8 or block % token or x.data_ptr() % 16:
        return None
    if x.shape[1] == 1 or head % token == 0:
        return block // token, head // token, 0
    # all heads of a token lie inside one row
    return (block // token, 0, head) if head % 8 == 0 and (x.shape[1] - 1) * head + x.shape[3] <= token else None


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


def _walk_specialised(
    row: plans.Row, q: Tensor, k_desc: Any, v_desc: Any, kv_heads: int, steps: tuple[int, ...], cu_q: Tensor,
    cu_k: Tensor, seq_lens: Tensor, positions: Tensor, table: Tensor, blocks: int, page: int, short: int, scale: float,
    key_tile: int, segment: int, out: Tensor, lse: Tensor, counts: Counts,
) -> None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    group, sequences = heads // kv_heads, cu_q.numel() - 1
    grid = (tokens // (128 // group) + sequences, kv_heads)
    _hopper().walk.attn_fwd_sm90_kernel[grid](
        q, k_desc, v_desc, out, lse, *counts, cu_q, cu_k, seq_lens, positions, table, exponent_factor(scale), sequences,
        blocks, q.stride(0), q.stride(1), *steps, out.stride(0), out.stride(1), lse.stride(0),
        table.stride(0) if page else 0,
        GROUP=group, D=head_dim, KEY_TILE=key_tile, SEGMENT=segment, STAGES=stages_for(row, key_tile), PAGE=page,
        SHORT=short, num_warps=4, maxnreg=WIDE_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


def _segments(
    row: plans.Row, fold_row: plans.Row | None, q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...], cu_q: Tensor,
    seq_lens: Tensor, table: Tensor, scale: float, key_tile: int, segment: int, most: int, short: int,
    narrow: int, out: Tensor, lse: Tensor, counts: Counts,
) -> None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k.shape
    group, sequences = heads // kv_heads, seq_lens.numel()
    if tokens == 0 or sequences == 0:
        return
    parts: tuple[Tensor, ...] | tuple[None, ...] = (None, None, None)
    if fold_row is not None:
        slots = min(tokens, sequences * short) * most
        part_m = torch.empty((2, slots, heads), dtype=torch.float32, device=q.device)
        parts = (*part_m, torch.empty((slots, heads, head_dim), dtype=torch.float32, device=q.device))
    room, block_d = padded(sequences), padded(head_dim)
    programs = row.programs * (_processors(q.device.index or 0) if q.is_cuda else 1)
    decode = kernels().decode
    common = (cu_q, seq_lens, table, exponent_factor(scale), sequences, kv_heads, blocks, q.stride(0), q.stride(1))
    if row.specialised:
        hopper, k_steps, v_steps = _hopper(), page_steps(k) or (), page_steps(v) or ()
        teams = min(sequences * most, max(1, programs // kv_heads))
        kernel = hopper.few.attn_few_sm90_kernel if narrow else hopper.decode.attn_segments_sm90_kernel
        kernel[(teams * kv_heads,)](
            q, hopper.tiles.pages_descriptor(k, k_steps, key_tile),
            hopper.tiles.pages_descriptor(v, v_steps, key_tile), *parts, out, lse, *counts, out.stride(0),
            out.stride(1), lse.stride(0), *common, *k_steps, *v_steps, table.stride(0),
            GROUP=group, D=head_dim, KEY_TILE=key_tile, SEGMENT=segment, STAGES=ring_for(row, key_tile), PAGE=page,
            SHORT=short, **({"ROWS": narrow} if narrow else {}), num_warps=4, maxnreg=row.max_registers,
            enable_fp_fusion=False,
        )  # fmt: skip
    else:
        decode.attn_segments_kernel[(min(sequences * most * kv_heads, programs),)](
            q, k, v, *parts, counts[0], *common, *strides, table.stride(0),
            GROUP=group, D=head_dim, BLOCK_D=block_d, BLOCK_M=block_rows(row, group), KEY_TILE=key_tile,
            SEGMENT=segment, PAGE=page, SHORT=short, B=room, STAGES=stages_for(row, key_tile), **options(row, key_tile),
        )  # fmt: skip
    if fold_row is None:
        return
    # only the specialised segments let the fold come up early
    early = {"launch_pdl": True} if row.specialised else {}
    steps = (out.stride(0), out.stride(1), lse.stride(0))
    folded = (*parts, out, lse, counts[1], cu_q, seq_lens, sequences, heads, *steps)
    shape = {"D": head_dim, "SEGMENT": segment, "SHORT": short}
    if fold_row.specialised:
        _hopper().fold.attn_fold_sm90_kernel[(tokens, heads)](
            *folded, **shape, num_warps=4, enable_fp_fusion=False, **early
        )  # fmt: skip
        return
    decode.attn_fold_kernel[(tokens, heads)](
        *folded, **shape, BLOCK_D=block_d, B=room, UNROLL=fold_row.unroll, OVERLAPPED=row.specialised,
        **options(fold_row), **early,
    )  # fmt: skip
