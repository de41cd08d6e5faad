"""Launches of the GPU kernels: shapes, strides and the frozen plan of each call. Nothing here looks at a device value.

Order and rounding are those of ``triton_tiles``, ``triton_backward`` and ``triton_rotary``; which kernel evaluates a
call (one walk over all keys, or segments in parallel and a fold) is decided from shapes and never shows in the bits.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_attn import plans
from rl_contract import ContractError, Launch, MissingSupport, record_launch

LOG2E = 1.4426950408889634
ARCHS = ("sm90", "gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16)
# sequences of one call whose segments may run in parallel; more than this fill the processors by themselves
MOST_SPLIT_SEQUENCES = 1024
MOST_SPLIT_PROGRAMS = 1024


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
    from rl_attn import triton_hopper

    return triton_hopper


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


def options(row: plans.Row, key_tile: int = 64) -> dict[str, Any]:
    """Compiler options of a launch. Contraction is off; on CDNA the two switches that regroup sums are pinned."""
    found: dict[str, Any] = {"num_warps": row.warps, "num_stages": stages_for(row, key_tile), "enable_fp_fusion": False}
    if torch.version.hip is not None:
        found |= {"kpack": 1, "matrix_instr_nonkdim": 16}
    elif row.max_registers:
        found["maxnreg"] = row.max_registers
    return found


def stages_for(row: plans.Row, key_tile: int) -> int:
    """Plans are made for key tiles of 64; wider ones take the same room with fewer in flight."""
    return max(1, row.stages * 64 // max(64, key_tile))


def record(boundary: str, kernel: str, plan: str = "-", layout: str = "-") -> None:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    record_launch(Launch(boundary, kernel, plan, layout, "capture" if capturing else "eager"))


def check(where: str, *tensors: Tensor) -> None:
    """Model types of a GPU."""
    for x in tensors:
        if x.dtype not in DTYPES:
            raise ContractError(f"{where} on a GPU got {x.dtype}; supported: {DTYPES}; convert the model")


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def exponent_factor(scale: float) -> float:
    """c = fp32(fp64(scale) * log2(e))."""
    return float(np.float32(float(scale) * LOG2E))


def _shape(row: plans.Row, group: int) -> int:
    """Query rows of a program: the plan's, or more where one token's heads need them."""
    return max(row.block_m, _padded(group))


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
    may = _may_specialise(q, k, v, key_tile, segment)
    row = own.choose("forward", q.shape[2], q.shape[0] * group // max(1, cu_q.numel() - 1), specialised=may)
    if row.specialised:
        result = _walk_specialised(row, q, k, v, cu_q, cu_k, positions, scale, key_tile, segment, out_dtype)
        record("attention", "rl_attn.triton_hopper", f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}", "packed")
        return result
    result = _walk(
        row,
        q,
        k,
        v,
        strides,
        k.shape[1],
        cu_q,
        cu_k,
        cu_q,
        positions,
        cu_q,
        0,
        0,
        0,
        scale,
        key_tile,
        segment,
        out_dtype,
    )
    record("attention", "rl_attn.triton_forward", f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}", "packed")
    return result


def paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor,
    scale: float, key_tile: int, segment: int, max_keys: int = 0, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``packed``, keys on pages. ``max_keys``: a bound on seq_lens, where one below the table's width is known."""
    check("attention_paged", q, k_cache, v_cache)
    q = unit_last(q)
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k_cache.shape
    sequences, group = seq_lens.numel(), heads // kv_heads
    (a, b, c, _), (d, e, f, _) = k_cache.stride(), v_cache.stride()
    strides = (a, b, c, d, e, f)
    own = current_plans(q)
    bound = block_table.shape[1] * page
    most = -(-(min(bound, max_keys) if max_keys else bound) // segment)
    split = own.choose("segments", head_dim, sequences * kv_heads * most)
    room = _shape(split, group) // group
    few = tokens <= sequences * room
    splits = most > 1 and sequences <= MOST_SPLIT_SEQUENCES and sequences * kv_heads <= MOST_SPLIT_PROGRAMS
    short = (room if few else 1) if splits else 0
    out = q.new_empty((tokens, heads, head_dim), dtype=out_dtype or q.dtype)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if splits:
        fold_row = own.choose("fold", head_dim)
        _segments(
            split, fold_row, q, k_cache, v_cache, strides, query_start_loc, seq_lens, block_table, scale, key_tile,
            segment, most, short, out, lse,
        )  # fmt: skip
        plan = f"{own.arch}:{split.name}:tile{key_tile}-segment{segment}-most{most}"
        record("attention", "rl_attn.triton_decode", plan, "paged")
    # where every sequence is short the walk has nothing to do, but only the device knows
    if short < tokens:
        row = own.choose("paged", head_dim, tokens * group // max(1, sequences))
        _walk(
            row, q, k_cache, v_cache, strides, kv_heads, query_start_loc, query_start_loc, seq_lens, seq_lens,
            block_table, blocks, page, short, scale, key_tile, segment, out_dtype, out, lse,
        )  # fmt: skip
        record("attention", "rl_attn.triton_forward", f"{own.arch}:{row.name}:tile{key_tile}-segment{segment}", "paged")
    return out, lse


def _walk(
    row: plans.Row, q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...], kv_heads: int, cu_q: Tensor,
    cu_k: Tensor, seq_lens: Tensor, positions: Tensor, table: Tensor, blocks: int, page: int, short: int, scale: float,
    key_tile: int, segment: int, out_dtype: torch.dtype | None, out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads, head_dim = q.shape
    if out is None or lse is None:
        out = q.new_empty((tokens, heads, head_dim), dtype=out_dtype or q.dtype)
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
    group, sequences = heads // kv_heads, cu_q.numel() - 1
    if tokens == 0 or sequences == 0:
        return out, lse
    block_m = _shape(row, group)
    grid = (tokens // (block_m // group) + sequences, kv_heads)
    kernels().forward.attn_fwd_kernel[grid](
        q, k, v, out, lse, cu_q, cu_k, seq_lens, positions, table, exponent_factor(scale), sequences, blocks,
        q.stride(0), q.stride(1), *strides, out.stride(0), out.stride(1), lse.stride(0), table.stride(0) if page else 0,
        GROUP=group, D=head_dim, BLOCK_D=_padded(head_dim), BLOCK_M=block_m, KEY_TILE=key_tile, SEGMENT=segment,
        PAGE=page, SHORT=short, **options(row, key_tile),
    )  # fmt: skip
    return out, lse


def _may_specialise(q: Tensor, k: Tensor, v: Tensor, key_tile: int, segment: int) -> bool:
    """What the copy engine and the groups of 64 rows ask for."""
    tokens, heads, head_dim = q.shape
    return (
        head_dim in (64, 128)
        and key_tile in (64, 128)
        and heads // k.shape[1] <= 64
        and 0 < k.shape[0] < 2**31
        and tokens > 0
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(0) >= head_dim for x in (k, v))
    )


def _walk_specialised(
    row: plans.Row, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, positions: Tensor, scale: float,
    key_tile: int, segment: int, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hopper = _hopper()
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group, sequences = heads // kv_heads, cu_q.numel() - 1
    out = q.new_empty((tokens, heads, head_dim), dtype=out_dtype or q.dtype)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    grid = (tokens // (128 // group) + sequences, kv_heads)
    hopper.attn_fwd_sm90_kernel[grid](
        q, hopper.rows_descriptor(k, key_tile), hopper.rows_descriptor(v, key_tile), out, lse, cu_q, cu_k, positions,
        exponent_factor(scale), sequences, q.stride(0), q.stride(1), k.stride(1), v.stride(1), out.stride(0),
        out.stride(1), lse.stride(0), GROUP=group, D=head_dim, KEY_TILE=key_tile, SEGMENT=segment,
        STAGES=stages_for(row, key_tile),
        num_warps=4, maxnreg=168, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse


def _segments(
    row: plans.Row, fold_row: plans.Row, q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...], cu_q: Tensor,
    seq_lens: Tensor, table: Tensor, scale: float, key_tile: int, segment: int, most: int, short: int, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k.shape
    group, sequences = heads // kv_heads, seq_lens.numel()
    if tokens == 0 or sequences == 0:
        return
    slots = min(tokens, sequences * short) * most
    part_m = torch.empty((2, slots, heads), dtype=torch.float32, device=q.device)
    part_o = torch.empty((slots, heads, head_dim), dtype=torch.float32, device=q.device)
    padded, block_d = _padded(sequences), _padded(head_dim)
    programs = min(sequences * most * kv_heads, row.programs * (_processors(q.device.index or 0) if q.is_cuda else 1))
    decode = kernels().decode
    decode.attn_segments_kernel[(programs,)](
        q, k, v, part_m[0], part_m[1], part_o, cu_q, seq_lens, table, exponent_factor(scale), sequences, kv_heads,
        blocks, q.stride(0), q.stride(1), *strides, table.stride(0),
        GROUP=group, D=head_dim, BLOCK_D=block_d, BLOCK_M=_shape(row, group), KEY_TILE=key_tile, SEGMENT=segment,
        PAGE=page, SHORT=short, B=padded, STAGES=stages_for(row, key_tile),
        **options(row, key_tile),
    )  # fmt: skip
    decode.attn_fold_kernel[(tokens, heads)](
        part_m[0], part_m[1], part_o, out, lse, cu_q, seq_lens, sequences, heads, out.stride(0), out.stride(1),
        lse.stride(0), D=head_dim, BLOCK_D=block_d, SEGMENT=segment, SHORT=short, B=padded, UNROLL=fold_row.unroll,
        STAGES=fold_row.stages,        **options(fold_row),
    )  # fmt: skip


def row_delta(grad: Tensor, out: Tensor) -> Tensor:
    check("attention_packed backward", grad, out)
    grad, out = unit_last(grad), unit_last(out)
    tokens, heads, head_dim = out.shape
    delta = out.new_empty((tokens, heads), dtype=torch.float32)
    rows = 32
    if tokens:
        kernels().backward.attn_delta_kernel[(-(-tokens * heads // rows),)](
            grad, out, delta, tokens, heads, grad.stride(0), grad.stride(1), out.stride(0), out.stride(1),
            D=head_dim, BLOCK_D=_padded(head_dim), ROWS=rows, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return delta


def _token_head(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in (x.stride(0), x.stride(1)))


def grad_queries(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_q: Tensor, cu_k: Tensor,
    positions: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    check("attention_packed backward", grad, q, k, v)
    grad, q, k, v = (unit_last(x) for x in (grad, q, k, v))
    lse, delta = lse.contiguous(), delta.contiguous()
    tokens, heads, head_dim = q.shape
    group, sequences = heads // k.shape[1], cu_q.numel() - 1
    dq = q.new_empty(q.shape)
    if tokens == 0:
        return dq
    own = current_plans(q)
    row = own.choose("grad_queries", head_dim)
    block_m = _shape(row, group)
    kernels().backward.attn_grad_queries_kernel[(tokens // (block_m // group) + sequences, k.shape[1])](
        grad, q, k, v, dq, lse, delta, cu_q, cu_k, positions, exponent_factor(scale), float(scale), sequences, heads,
        *_token_head(grad, q, k, v),
        GROUP=group, D=head_dim, BLOCK_D=_padded(head_dim), BLOCK_M=block_m, BLOCK_N=row.block_n, **options(row),
    )  # fmt: skip
    record("attention", "rl_attn.triton_backward.grad_queries", f"{own.arch}:{row.name}", "packed")
    return dq


def grad_keys(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_q: Tensor, cu_k: Tensor,
    positions: Tensor, key_positions: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check("attention_packed backward", grad, q, k, v)
    grad, q, k, v = (unit_last(x) for x in (grad, q, k, v))
    lse, delta = lse.contiguous(), delta.contiguous()
    tokens, kv_heads, head_dim = k.shape
    group, sequences = q.shape[1] // kv_heads, cu_k.numel() - 1
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    if tokens == 0:
        return dk, dv
    own = current_plans(q)
    row = own.choose("grad_keys", head_dim)
    kernels().backward.attn_grad_keys_kernel[(kv_heads, tokens // row.block_n + sequences)](
        grad, q, k, v, dk, dv, lse, delta, cu_q, cu_k, positions, key_positions, exponent_factor(scale), float(scale),
        sequences, kv_heads, *_token_head(grad, q, k, v),
        GROUP=group, D=head_dim, BLOCK_D=_padded(head_dim), BLOCK_M=row.block_m, BLOCK_N=row.block_n, **options(row),
    )  # fmt: skip
    record("attention", "rl_attn.triton_backward.grad_keys", f"{own.arch}:{row.name}", "packed")
    return dk, dv


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """x [T, H, D] rotated, contiguous; cos, sin fp32 [P, rotary_dim/2]."""
    check("rotary", x)
    x = unit_last(x)
    tokens, heads, head_dim = x.shape
    out = x.new_empty(x.shape)
    half = cos.shape[1]
    rest = head_dim - 2 * half
    block = min(8, _power(heads))
    if tokens:
        kernels().rotary.rotary_kernel[(tokens, -(-heads // block))](
            x, out, positions, cos, sin, -1.0 if inverse else 1.0, cos.shape[0], tokens, heads, *_token_head(x, out),
            HALF=half, BLOCK_HALF=_power(half), REST=rest, BLOCK_REST=_power(max(1, rest)), HEADS=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store k, v [T, Hkv, D] at their slots; slots outside the cache are skipped."""
    k, v = unit_last(k), unit_last(v)
    blocks, heads, page, head_dim = k_cache.shape
    block = min(8, _power(heads))
    if slots.numel():
        kernels().rotary.write_slots_kernel[(slots.numel(), -(-heads // block))](
            k, v, k_cache, v_cache, slots, blocks * page, heads, *_token_head(k, v), *k_cache.stride()[:3],
            *v_cache.stride()[:3], PAGE=page, D=head_dim, BLOCK_D=_power(head_dim), HEADS=block, num_warps=4,
        )  # fmt: skip


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
