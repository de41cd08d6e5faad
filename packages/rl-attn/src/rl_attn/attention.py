"""The public functions: argument checks, then the ops."""

from functools import partial
from typing import Any

import torch

from rl_attn import eager, gpu, metadata, nosplit, ops, ops_backward  # noqa: F401  registers the gradient of ops.packed
from rl_attn.calls import looks, right
from rl_attn.checks import (
    check_call,
    refuse_variants,
    require_cu_seqlens,
    require_device,
    require_dtype,
    require_family,
    require_heads,
    require_indices,
    require_kind,
    require_on,
    require_tiles,
)
from rl_attn.paged import PagedKV
from rl_attn.rope import RopeTable
from rl_contract import ContractError, memory
from rl_contract.checks import require_tensor, whole_number
from rl_contract.profile import KEY_TILE, SEGMENT
from rl_contract.triton_launch import keep

# types of attention_paged's scale, key_tile, segment, family, max_query_len, min_query_len; others are looked at anew
_PLAIN = ((float, int, int, str, int, int), (float, int, int, str, type(None), int))


def segments_of(length: int, segment: int = SEGMENT) -> int:
    """How many segments a row folds that sees ``length`` keys.

    Raises:
        ContractError: a negative length, a segment below 1, or either not an integer.
    """
    if not (whole_number(length) and whole_number(segment)) or length < 0 or segment < 1:
        raise ContractError(
            f"segments_of got length={length!r}, segment={segment!r}; supported: integers, a length of 0 or more and a "
            "segment of 1 or more; take the segment from the profile"
        )
    return -(-length // segment)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: RopeTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their absolute positions (half-split layout); differentiable in q and k.

    Args:
        q: ``[T, Hq, D]``, bf16 or fp32. k: ``[T, Hkv, D]``, same dtype; Hq and Hkv are independent.
        positions: ``[T]`` int64 or int32.
        table: from ``rope_table``; ``table.rotary_dim`` may be below D, the rest of a head passes through.

    Raises:
        ContractError: shapes, dtypes, or a position outside the table.
        MissingSupport: a device without kernels.
    """
    key = None
    if type(table) is RopeTable and gpu.direct(q, k, positions):
        cos, sin = table.on(q.device)
        key = ("rotary", cos.shape, *looks(q, k, positions))
        if key in right:
            return eager.rotary(q, k, positions, cos, sin)
    require_kind("rotary", "table", table, RopeTable, "build it with rope_table")
    require_device("rotary", q=q, k=k, positions=positions)
    require_dtype("rotary", q=q, k=k)
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ContractError(f"rotary got q {tuple(q.shape)}, k {tuple(k.shape)}; supported: [T, Hq, D] and [T, Hkv, D]")
    if positions.shape != q.shape[:1] or positions.dtype not in (torch.int32, torch.int64):
        raise ContractError(
            f"rotary got positions {tuple(positions.shape)} {positions.dtype}; supported: int64 [{q.shape[0]}]"
        )
    if table.rotary_dim > q.shape[2]:
        raise ContractError(f"rotary got rotary_dim={table.rotary_dim} for head_dim={q.shape[2]}; build another table")
    cos, sin = table.on(q.device)
    if key is None:
        return ops.rotary(q, k, positions, cos, sin, False)  # type: ignore[no-any-return]
    keep(right, key, None)
    return eager.rotary(q, k, positions, cos, sin)


def attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    positions: torch.Tensor | None = None,
    scale: float,
    key_tile: int = KEY_TILE,
    segment: int = SEGMENT,
    family: str = "segments",
    return_lse: bool = False,
    **variants: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over packed sequences; differentiable in q, k and v.

    Args:
        q: ``[Tq, Hq, D]``, bf16 or fp32. k, v: ``[Tk, Hkv, D]``, same dtype. D a multiple of 8 up to 256.
        cu_seqlens_q, cu_seqlens_k: int ``[sequences + 1]``, cumulative lengths; a sequence may be empty. For q on a GPU
            they and ``positions`` are looked at once a tensor, and again after a write: of tensors on the host after
            any, of those on the GPU after writes that PyTorch counts. It counts none by a collective, by ``.data`` or
            by a kernel of one's own; pass another tensor then.
        positions: int ``[Tq]``, absolute position of each query inside its own sequence, below the sequence's keys;
            default: the last rows of the sequence.
        scale: factor on scores, usually ``D ** -0.5``.
        key_tile, segment: keys per tile and per segment; part of the contract.
        family: ``segments``, or ``nosplit``: a certified library on a GPU, without key tiles and segments of ours and
            without explicit positions.
        variants: names of other attention kinds (``causal``, ``sliding_window``, ``softcap``, ...), refused unless
            neutral.

    Returns:
        out ``[Tq, Hq, D]`` as q; with ``return_lse`` also the natural log of the row's sum of exponentials, fp32
        ``[Tq, Hq]``, without gradient.

    Raises:
        ContractError: shapes, dtypes, lengths, positions or a variant that the contract does not cover.
        MissingSupport: a device without kernels.
    """
    where = "attention_packed"
    plain = type(scale) is float and type(key_tile) is int and type(segment) is int
    plain = plain and type(family) is str and not variants
    direct = plain and gpu.direct(q, k, v)
    key = (where, scale, key_tile, segment, family, *looks(q, k, v)) if direct else None
    if key is None or key not in right:
        check_call(where, q, k, v, scale, key_tile, segment, variants)
        require_family(where, family)
        if key is not None:
            keep(right, key, None)
    if family == "nosplit" and positions is not None:
        raise ContractError(f"{where} got positions with family 'nosplit'; leave them out, or use 'segments'")
    if direct:
        batch = metadata.on_device(where, q, k, cu_seqlens_q, cu_seqlens_k, positions)
        run = partial(_by_library, scale) if family == "nosplit" else partial(_by_kernels, scale, key_tile, segment)
        out, lse = eager.attention(q, k, v, batch, scale, run)
        return (out, lse) if return_lse else out
    if q.is_cuda:
        batch = metadata.on_device(where, q, k, cu_seqlens_q, cu_seqlens_k, positions)
        rest: Any = (batch.cu_q, batch.cu_k, batch.positions, float(scale))
    else:
        explicit = {} if positions is None else {"positions": positions}
        require_on(where, q.device, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **explicit)
        require_cu_seqlens(where, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
        require_cu_seqlens(where, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
        at = metadata.checked_positions(where, cu_seqlens_q, cu_seqlens_k, positions)
        rest = (cu_seqlens_q, cu_seqlens_k, at, float(scale))
    if family == "nosplit":
        out, lse = nosplit.packed(q, k, v, *rest)
    else:
        out, lse = ops.packed(q, k, v, *rest, key_tile, segment)
    return (out, lse.detach()) if return_lse else out


def _by_library(
    scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: metadata.Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = nosplit.packed(
        q, k, v, *batch.narrow(), batch.positions, scale, eager=True
    )
    return found


def _by_kernels(
    scale: float, key_tile: int, segment: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: metadata.Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    return gpu.packed(q, k, v, batch.cu_q, batch.cu_k, batch.positions, scale, key_tile, segment)


def attention_paged(
    q: torch.Tensor,
    cache: PagedKV,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    key_tile: int = KEY_TILE,
    segment: int = SEGMENT,
    family: str = "segments",
    max_query_len: int | None = None,
    min_query_len: int = 0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    **variants: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over a paged cache: prefill, chunks, prefix hits and decode alike; no gradient.

    Args:
        q: ``[Tq, Hq, D]``, the rows of all requests, no padding. The keys of these rows are already in the cache.
        cache: ``PagedKV``.
        query_start_loc: int ``[requests + 1]``. seq_lens: int ``[requests]``, keys of each request (context plus its
            queries); the request's queries are its last positions.
        block_table: int ``[requests, pages]``; entries behind a request's length are never read.
        max_query_len: a bound on the queries of a request, for speed alone: rows of a request with more of them may be
            left unwritten.
        min_query_len: a bound from below on the same, for speed alone; no row depends on it.
        out: like q, with a last stride of 1 and memory apart from q and the cache: the result is written there, and is
            what comes back.
        scale, key_tile, segment, family, return_lse, variants: as in ``attention_packed``.

    On a GPU the values of ``block_table`` and ``seq_lens`` are not looked at, so that nothing stops the stream: rows
    that need a page outside the cache become NaN. ``check_paged`` looks.

    Returns:
        as ``attention_packed``.

    Raises:
        ContractError: shapes, dtypes, page ids, lengths or a variant that the contract does not cover.
        MissingSupport: a device without kernels.
    """
    where = "attention_paged"
    numbers = (scale, key_tile, segment, family, max_query_len, min_query_len)
    key = None
    if type(cache) is PagedKV and not variants and tuple(map(type, numbers)) in _PLAIN:
        indices = (query_start_loc, seq_lens, block_table)
        if gpu.direct(q, cache.k, *indices):
            key = (where, numbers, *looks(q, cache.k, *indices))
    if key is None or key not in right:
        refuse_variants(where, variants)
        require_family(where, family)
        require_kind(where, "cache", cache, PagedKV, "view the engine's cache with PagedKV(k, v)")
        require_tiles(where, scale, key_tile, segment)
        _check_paged(where, q, cache, query_start_loc, seq_lens, block_table, max_query_len, min_query_len)
        if key is not None:
            keep(right, key, None)
    if out is not None:
        _require_out(where, q, cache, out)
    if family == "nosplit":
        found, lse = nosplit.paged(q, cache, query_start_loc, seq_lens, block_table, float(scale), max_query_len)
        found = found if out is None else out.copy_(found)
        return (found, lse) if return_lse else found
    rest = (query_start_loc, seq_lens, block_table, float(scale), key_tile, segment, max_query_len)
    if key is not None or gpu.direct(q):
        eager.refuse_gradients(where, q, cache.k, cache.v)
        given = out
        out, lse = gpu.paged(
            q, cache.k, cache.v, *rest[:-1], most_rows=max_query_len, least_rows=min_query_len, out=out
        )
        if given is not None:
            eager.count_writes(given)
    elif out is None:
        out, lse = ops.paged(q, cache.k, cache.v, *rest)
    else:
        lse = ops.paged_into(out, q, cache.k, cache.v, *rest)
    return (out, lse) if return_lse else out


def _check_paged(
    where: str, q: torch.Tensor, cache: PagedKV, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_query_len: int | None, min_query_len: int,
) -> None:  # fmt: skip
    require_device(where, q=q, block_table=block_table, **{"cache.k": cache.k, "cache.v": cache.v})
    require_dtype(where, q=q, cache=cache.k)
    if q.dim() != 3 or q.shape[2] != cache.head_dim:
        raise ContractError(
            f"{where} got q {tuple(q.shape)} for a cache of head_dim {cache.head_dim}; supported: [Tq, Hq, D]"
        )
    require_heads(where, q.shape[1], cache.num_kv_heads, cache.head_dim)
    require_indices(where, query_start_loc=query_start_loc, seq_lens=seq_lens, block_table=block_table)
    require_on(where, q.device, query_start_loc=query_start_loc, seq_lens=seq_lens)
    requests = seq_lens.numel()
    tables = block_table.dim() == 2 and block_table.shape[0] == requests
    if seq_lens.dim() != 1 or query_start_loc.shape != (requests + 1,) or not tables:
        raise ContractError(
            f"{where} got seq_lens {tuple(seq_lens.shape)}, query_start_loc {tuple(query_start_loc.shape)}, "
            f"block_table {tuple(block_table.shape)}; supported: [requests], [requests + 1], [requests, pages]"
        )
    if max_query_len is not None and not (whole_number(max_query_len) and 0 <= max_query_len < 2**31):
        raise ContractError(
            f"{where} got max_query_len={max_query_len!r}; supported: None, or an integer from 0 to 2**31 - 1, the "
            "most queries of a request"
        )
    if not whole_number(min_query_len) or min_query_len < 0:
        raise ContractError(
            f"{where} got min_query_len={min_query_len!r}; supported: an integer from 0, the least queries of any"
        )


def _require_out(where: str, q: torch.Tensor, cache: PagedKV, out: torch.Tensor) -> None:
    require_tensor(where, "out", out)
    given = (tuple(out.shape), out.dtype, out.device)
    if given != (tuple(q.shape), q.dtype, q.device) or (out.numel() and out.stride(-1) != 1):
        raise ContractError(
            f"{where} got out {given[0]} {out.dtype} on {out.device} with strides {out.stride()}; supported: as q, "
            f"{tuple(q.shape)} {q.dtype} on {q.device}, with a last stride of 1"
        )
    if not out.is_contiguous() and not memory.distinct(zip(out.shape, out.stride(), strict=True)):
        raise ContractError(
            f"{where} got out {given[0]} with strides {out.stride()}, in which rows share memory; supported: a place "
            "of its own for every element, make it with torch.empty"
        )
    cache.refuse_overlap(where, out=out)
    if memory.known(out) and memory.overlap(out, q):
        raise ContractError(f"{where} got out in the memory of q, which is read meanwhile; pass a buffer of its own")
    if out.requires_grad and torch.is_grad_enabled():
        raise ContractError(f"{where} has no gradient, and out requires one; detach it")


def write_paged(cache: PagedKV, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store keys and values at their slots, in place.

    Args:
        k, v: ``[T, Hkv, D]`` of the cache's dtype, in memory apart from it.
        slot_mapping: int ``[T]``, ``block * block_size + offset``; a negative slot is padding and is skipped.

    Raises:
        ContractError: shapes, dtypes, or a slot beyond the cache; nothing is written then.
    """
    where = "write_paged"
    key = None
    if type(cache) is PagedKV and gpu.direct(k, v, slot_mapping, cache.k, cache.v):
        key = (where, *looks(k, v, slot_mapping, cache.k))
    if key is None or key not in right:
        _check_write(where, cache, k, v, slot_mapping)
        if key is not None:
            keep(right, key, None)
    cache.refuse_overlap(where, k=k, v=v)
    if key is None:
        ops.write(cache.k, cache.v, k.detach(), v.detach(), slot_mapping)
    else:
        eager.write(cache.k, cache.v, k, v, slot_mapping)


def _check_write(
    where: str, cache: PagedKV, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:  # fmt: skip
    require_kind(where, "cache", cache, PagedKV, "view the engine's cache with PagedKV(k, v)")
    require_device(where, k=k, v=v, slot_mapping=slot_mapping, **{"cache.k": cache.k, "cache.v": cache.v})
    require_dtype(where, k=k, v=v, cache=cache.k)
    require_indices(where, slot_mapping=slot_mapping)
    expected = (slot_mapping.numel(), cache.num_kv_heads, cache.head_dim)
    if tuple(k.shape) != expected or tuple(v.shape) != expected or slot_mapping.dim() != 1:
        raise ContractError(
            f"{where} got k {tuple(k.shape)}, v {tuple(v.shape)}, slot_mapping {tuple(slot_mapping.shape)}; supported: "
            f"{expected} and [{expected[0]}]"
        )
