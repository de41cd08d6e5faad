"""Opaque custom ops over the CPU kernels: flat storages, strides, launch evidence. Dispatch is by device type."""

import functools
from collections.abc import Callable

import numpy as np
import torch

from rl_attn import cpu, cpu_rotary
from rl_contract import ContractError, Launch, record_launch
from rl_contract.devices import host_array, host_span
from rl_contract.opaque import opaque_op
from rl_contract.threads import for_ranges

# below this many operations handing over to threads costs more than it saves
INLINE_WORK = 4e6
LOG2E = 1.4426950408889634
_EMPTY_TABLE = np.zeros((0, 0), np.int64)


def flat(x: torch.Tensor) -> np.ndarray:
    """The storage that ``x`` spans, one dimension, bf16 as uint16; shares memory."""
    return host_span(x)


def dense(x: torch.Tensor) -> np.ndarray:
    """A contiguous tensor as an array, bf16 as uint16; shares memory."""
    return host_array(x)


def strides(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def int64(x: torch.Tensor) -> np.ndarray:
    return host_array(x.detach().to(torch.int64).contiguous())


def unit_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def spread(run: Callable[[int, int], int], tasks: int, work: float) -> list[int]:
    """``run(first, step)`` does tasks first, first + step, ...: interleaved, so that causal work is even."""
    lanes = min(tasks, torch.get_num_threads()) if work > INLINE_WORK else 1
    results: list[int] = []
    for_ranges(lambda first, last: results.extend(run(n, lanes) for n in range(first, last)), max(lanes, 1), work)
    return results


@functools.lru_cache
def _plan_name(key_tile: int, segment: int, segments: int) -> str:
    return f"tile{key_tile}-segment{segment}-folded{segments}"


def _forward(
    layout: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_strides: np.ndarray,
    kv_heads: int,
    starts: np.ndarray,
    table: np.ndarray,
    block_size: int,
    positions: np.ndarray,
    cu_rows: np.ndarray,
    scale: float,
    key_tile: int,
    segment: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    q = unit_last(q)
    tokens, heads, head_dim = q.shape
    out = q.new_empty((tokens, heads, head_dim))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    group = heads // kv_heads
    tasks = cpu.plan_tasks(cu_rows, max(1, cpu.ROWS_PER_TASK // group))
    arguments = (
        flat(q), strides(q.stride(0), q.stride(1)), flat(k), flat(v), kv_strides, starts, table, block_size, positions,
        tasks, kv_heads, group, head_dim, np.float32(float(scale) * LOG2E), key_tile, segment, dense(out), dense(lse),
    )  # fmt: skip
    # two dots of head_dim for every visible key
    flops = 4.0 * head_dim * heads * float(positions.sum() + tokens)
    folded = spread(
        lambda first, step: cpu.attention_forward(*arguments, first, step), tasks.shape[0] * kv_heads, flops
    )
    record_launch(
        Launch("attention", "rl_attn.cpu.attention_forward", _plan_name(key_tile, segment, max(folded)), layout)
    )
    return out, lse


@opaque_op("rl_attn::packed")
def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    key_tile: int,
    segment: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed attention, checked arguments; out as q, lse fp32 [Tq, Hq]."""
    k, v = unit_last(k), unit_last(v)
    kv_strides = strides(0, k.stride(1), k.stride(0), 0, v.stride(1), v.stride(0))
    return _forward(
        "packed", q, k, v, kv_strides, k.shape[1], int64(cu_seqlens_k), _EMPTY_TABLE, 0, int64(positions),
        int64(cu_seqlens_q), scale, key_tile, segment,
    )  # fmt: skip


@packed.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, positions, scale, key_tile, segment):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _paged(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, key_tile, segment):
    """Page ids are checked here, since only their values tell."""
    cu_rows, lengths, table = int64(query_start_loc), int64(seq_lens), int64(block_table)
    block_size = k_cache.shape[2]
    code, at, value = cpu.check_pages(cu_rows, lengths, table, block_size, k_cache.shape[0], q.shape[0])
    if code:
        raise ContractError(_PAGE_ERRORS[code].format(at=at, value=value, blocks=k_cache.shape[0], tokens=q.shape[0],
                                                      room=table.shape[1] * block_size))  # fmt: skip
    (a, b, c, _), (d, e, f, _) = k_cache.stride(), v_cache.stride()
    positions = cpu.paged_positions(cu_rows, lengths, q.shape[0])
    return _forward(
        "paged", q, k_cache, v_cache, strides(a, b, c, d, e, f), k_cache.shape[1], cu_rows, table, block_size,
        positions, cu_rows, scale, key_tile, segment,
    )  # fmt: skip


@opaque_op("rl_attn::paged")
def paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    key_tile: int,
    segment: int,
    most_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Paged attention; out as q, lse fp32 [Tq, Hq]. ``most_rows`` bounds the queries of a request, for a GPU's sake."""
    return _paged(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, key_tile, segment)


@paged.register_fake
def _(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, key_tile, segment, most_rows=None):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@opaque_op("rl_attn::paged_into", mutates_args=("out",))
def paged_into(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    key_tile: int,
    segment: int,
    most_rows: int | None = None,
) -> torch.Tensor:
    """``paged`` with its result written to ``out``; returns lse."""
    found, lse = _paged(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, key_tile, segment)
    out.copy_(found)
    return lse


@paged_into.register_fake
def _(out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, key_tile, segment, most_rows=None):
    return q.new_empty(q.shape[:2], dtype=torch.float32)


_PAGE_ERRORS = {
    1: "attention_paged got query_start_loc[{at}]={value} for {tokens} query rows; it must start at 0, never fall and "
    "end at the number of rows; slice padding rows off first",
    2: "attention_paged got seq_lens[{at}]={value}, less than its queries or negative; it counts context plus queries",
    3: "attention_paged got seq_lens[{at}]={value}, but a row of block_table holds {room} tokens; widen block_table",
    4: "attention_paged got page id {value} for request {at}; supported: 0 to {blocks} - 1; rebuild block_table",
}


@opaque_op("rl_attn::write_paged", mutates_args=("k_cache", "v_cache"))
def write(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store k and v at their slots; a slot below 0 is padding. Every slot is checked before the first write."""
    slots = int64(slot_mapping)
    room = k_cache.shape[0] * k_cache.shape[2]
    if slots.size and int(slots.max()) >= room:
        raise ContractError(
            f"write_paged got slot {int(slots.max())}; supported: below {room} (num_blocks * block_size), or negative "
            "for padding"
        )
    k, v = unit_last(k), unit_last(v)
    for cache, x in ((k_cache, k), (v_cache, v)):
        a, b, c, _ = cache.stride()
        cpu.write_slots(
            flat(x), strides(x.stride(0), x.stride(1)), slots, flat(cache), strides(a, b, c), cache.shape[1],
            cache.shape[2], cache.shape[3],
        )  # fmt: skip


@write.register_fake
def _(k_cache, v_cache, k, v, slot_mapping):
    return None


def _rotate(x: torch.Tensor, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: np.float32) -> torch.Tensor:
    x = unit_last(x)
    out = x.new_empty(x.shape)
    cpu_rotary.rotate(flat(x), strides(x.stride(0), x.stride(1)), positions, cos, sin, sign, dense(out))
    return out


@opaque_op("rl_attn::rotary")
def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k by cos, sin fp32 [P, rotary_dim/2]; ``inverse`` rotates back."""
    at = int64(positions)
    if at.size and not (int(at.min()) >= 0 and int(at.max()) < cos.shape[0]):
        raise ContractError(
            f"rotary got positions from {int(at.min())} to {int(at.max())}; the table holds 0 to {cos.shape[0] - 1}; "
            "build a longer rope_table"
        )
    sign = np.float32(-1.0 if inverse else 1.0)
    tables = (dense(cos), dense(sin))
    result = _rotate(q, at, *tables, sign), _rotate(k, at, *tables, sign)
    record_launch(Launch("rotary", "rl_attn.cpu_rotary.rotate", "inverse" if inverse else "-"))
    return result


@rotary.register_fake
def _(q, k, positions, cos, sin, inverse):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotary_context(ctx, inputs, output):
    _, _, positions, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(positions, cos, sin)


def _rotary_backward(ctx, dq, dk):
    positions, cos, sin = ctx.saved_tensors
    dq, dk = rotary(dq, dk, positions, cos, sin, not ctx.inverse)
    return dq, dk, None, None, None, None


rotary.register_autograd(_rotary_backward, setup_context=_rotary_context)
