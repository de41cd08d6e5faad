"""Launches of the forward kernels, decided from the tensors of one call, then repeated on others with the same traits.

Order and rounding are those of ``triton_tiles``. A launch keeps no tensor alive.
"""

from typing import Any

import torch
from torch import Tensor

from rl_attn import plans
from rl_attn.gpu_device import (
    block_rows,
    exponent_factor,
    hopper,
    kernels,
    options,
    padded,
    ring_for,
    stages_for,
)
from rl_contract.gpu import processors_of
from rl_contract.triton_launch import Prepared, at, without_base

# of a thread, for the specialised kernels where a processor runs one program
WIDE_REGISTERS = 168
Counts = tuple[Tensor, Tensor] | tuple[None, None]


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


def _steps(x: Tensor, paged: bool) -> tuple[int, int, int]:
    """What ``fetch_tile`` adds for a page and for a head."""
    return (page_steps(x) or (0, 0, 0)) if paged else (0, 0, x.stride(1))


def _tiles(x: Tensor, paged: bool, key_tile: int) -> Any:
    tiles = hopper().tiles
    made = tiles.pages_descriptor(x, page_steps(x) or (), key_tile) if paged else tiles.rows_descriptor(x, key_tile)
    return without_base(made)


def _by_name(prefix: str, names: str, values: tuple[int, ...]) -> dict[str, int]:
    return {prefix + name: value for name, value in zip(names.split(), values, strict=True)}


def _kv_strides(x: Tensor, paged: bool) -> tuple[int, ...]:
    return x.stride()[:3] if paged else (0, x.stride(1), x.stride(0))


class Walk:
    """One program walks all keys of a tile of queries. Packed rows [T, H, D], or caches [blocks, Hkv, page, D].

    Args:
        short: sequences of up to as many queries are left to ``Segments``.
    """

    def __init__(
        self, row: plans.Row, q: Tensor, k: Tensor, v: Tensor, sequences: int, table: Tensor | None, short: int,
        scale: float, key_tile: int, segment: int, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        tokens, heads, head_dim = q.shape
        paged = table is not None
        kv_heads, page, blocks = k.shape[1], k.shape[2] if paged else 0, k.shape[0] if paged else 0
        group = heads // kv_heads
        self.kernel = "rl_attn.triton_hopper" if row.specialised else "rl_attn.triton_forward"
        self._tiles = (_tiles(k, paged, key_tile), _tiles(v, paged, key_tile)) if row.specialised else None
        self._launch = None
        if tokens == 0 or sequences == 0:
            return
        fixed: dict[str, Any] = {"c": exponent_factor(scale), "sequences": sequences, "blocks": blocks}
        fixed |= _by_name("s", "q_t q_h o_t o_h _lse", (*q.stride()[:2], *out.stride()[:2], lse.stride(0)))
        fixed |= {"s_table": 0 if table is None else table.stride(0), "GROUP": group, "D": head_dim}
        fixed |= {"KEY_TILE": key_tile, "SEGMENT": segment, "PAGE": page, "SHORT": short}
        if row.specialised:
            for prefix, x in (("k_", k), ("v_", v)):
                fixed |= _by_name(prefix, "page_rows head_rows head_columns", _steps(x, paged))
            self._launch = Prepared(
                hopper().walk.attn_fwd_sm90_kernel, (tokens // (128 // group) + sequences, kv_heads),
                fixed | {"STAGES": stages_for(row, key_tile)}, num_warps=4, maxnreg=WIDE_REGISTERS,
                enable_fp_fusion=False,
            )  # fmt: skip
            return
        for prefix, x in (("sk_", k), ("sv_", v)):
            fixed |= _by_name(prefix, "b h t", _kv_strides(x, paged))
        block_m = block_rows(row, group)
        self._launch = Prepared(
            kernels().forward.attn_fwd_kernel, (tokens // (block_m // group) + sequences, kv_heads),
            fixed | {"BLOCK_D": padded(head_dim), "BLOCK_M": block_m}, **options(row, key_tile),
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counts: Counts, cu_q: Tensor, cu_k: Tensor,
        seq_lens: Tensor, positions: Tensor, table: Tensor,
    ) -> None:  # fmt: skip
        if self._launch is None:
            return
        keys, values = (k, v) if self._tiles is None else (at(self._tiles[0], k), at(self._tiles[1], v))
        self._launch(q, keys, values, out, lse, *counts, cu_q, cu_k, seq_lens, positions, table)


class Segments:
    """Segments of sequences of up to ``short`` queries in parallel, and the fold of those that have more than one.

    Args:
        fold_row: None where no table holds more than a segment.
        most: segments that a table holds. narrow: rows of ``triton_hopper_few``, 0: another kernel decodes.
    """

    def __init__(
        self, row: plans.Row, fold_row: plans.Row | None, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor,
        table: Tensor, scale: float, key_tile: int, segment: int, most: int, short: int, narrow: int, out: Tensor,
        lse: Tensor,
    ) -> None:  # fmt: skip
        tokens, heads, head_dim = q.shape
        blocks, kv_heads, page, _ = k.shape
        group, sequences = heads // kv_heads, seq_lens.numel()
        self.kernel = "rl_attn.triton_hopper_decode" if row.specialised else "rl_attn.triton_decode"
        self.kernel = "rl_attn.triton_hopper_few" if narrow else self.kernel
        self._tiles = (_tiles(k, True, key_tile), _tiles(v, True, key_tile)) if row.specialised else None
        self._launch = self._fold = None
        self._slots = (0, heads, head_dim)
        if tokens == 0 or sequences == 0:
            return
        programs = row.programs * (processors_of(q.device.index or 0) if q.is_cuda else 1)
        decode, room, block_d = kernels().decode, padded(sequences), padded(head_dim)
        out_steps = _by_name("s", "o_t o_h _lse", (*out.stride()[:2], lse.stride(0)))
        common: dict[str, Any] = {"sequences": sequences, "SEGMENT": segment, "SHORT": short, "D": head_dim}
        fixed = common | {"c": exponent_factor(scale), "kv_heads": kv_heads, "blocks": blocks, "GROUP": group}
        fixed |= _by_name("s", "q_t q_h _table", (*q.stride()[:2], table.stride(0)))
        fixed |= {"KEY_TILE": key_tile, "PAGE": page}
        if row.specialised:
            for prefix, x in (("k_", k), ("v_", v)):
                fixed |= _by_name(prefix, "page_rows head_rows head_columns", _steps(x, True))
            teams = min(sequences * most, max(1, programs // kv_heads))
            self._launch = Prepared(
                hopper().few.attn_few_sm90_kernel if narrow else hopper().decode.attn_segments_sm90_kernel,
                (teams * kv_heads,),
                fixed | out_steps | {"STAGES": ring_for(row, key_tile)} | ({"ROWS": narrow} if narrow else {}),
                num_warps=4, maxnreg=row.max_registers, enable_fp_fusion=False,
            )  # fmt: skip
        else:
            for prefix, x in (("sk_", k), ("sv_", v)):
                fixed |= _by_name(prefix, "b h t", _kv_strides(x, True))
            fixed |= {"BLOCK_D": block_d, "BLOCK_M": block_rows(row, group), "B": room}
            self._launch = Prepared(
                decode.attn_segments_kernel, (min(sequences * most * kv_heads, programs),),
                fixed | {"STAGES": stages_for(row, key_tile)}, **options(row, key_tile),
            )  # fmt: skip
        if fold_row is None:
            return
        self._slots = (min(tokens, sequences * short) * most, heads, head_dim)
        # only the specialised segments let the fold come up early
        early = {"launch_pdl": True} if row.specialised else {}
        fixed = common | out_steps | {"heads": heads}
        if fold_row.specialised:
            self._fold = Prepared(
                hopper().fold.attn_fold_sm90_kernel, (tokens, heads), fixed, num_warps=4, enable_fp_fusion=False,
                **early,
            )  # fmt: skip
            return
        fixed |= {"BLOCK_D": block_d, "B": room, "UNROLL": fold_row.unroll, "OVERLAPPED": row.specialised}
        self._fold = Prepared(decode.attn_fold_kernel, (tokens, heads), fixed, **options(fold_row), **early)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counts: Counts, cu_q: Tensor,
        seq_lens: Tensor, table: Tensor,
    ) -> None:  # fmt: skip
        if self._launch is None:
            return
        parts: tuple[Tensor, ...] | tuple[None, ...] = (None, None, None)
        if self._fold is not None:
            sums = torch.empty((2, *self._slots[:2]), dtype=torch.float32, device=q.device)
            parts = (*sums.unbind(), torch.empty(self._slots, dtype=torch.float32, device=q.device))
        if self._tiles is None:
            self._launch(q, k, v, *parts, counts[0], cu_q, seq_lens, table)
        else:
            keys, values = at(self._tiles[0], k), at(self._tiles[1], v)
            self._launch(q, keys, values, *parts, out, lse, *counts, cu_q, seq_lens, table)
        if self._fold is not None:
            self._fold(*parts, out, lse, counts[1], cu_q, seq_lens)
