"""Contract `logprob` on a GPU, over ranks that share the vocabulary: each one's part of a row, and the row's state.

Maximum M over ranks, then each rank's exact int64 sum against it, which ranks add: both are order-free. Rounding is
that of ``triton_scores``, whose functions these are; a rank alone has its state there in one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.triton_scores import _ROWS, _TILES, _rows_sums, _rows_top, _store_state


@triton.jit(do_not_specialize=["T"])
def rank_top_kernel(m, out, T, tiles, stride_row, stride_tile, ROWS: tl.constexpr, TILES: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < T
    tl.store(out + rows, _rows_top(m, rows, row_mask, tiles, stride_row, stride_tile, ROWS, TILES), mask=row_mask)


@triton.jit(do_not_specialize=["T"])
def rank_sums_kernel(
    m, s, u, top, out, T, tiles, stride_row, stride_tile, ENTROPY: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr
):
    """out int64 [2, T]: sums of this rank's tiles against the maximum over all ranks."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < T
    whole = tl.load(top + rows, mask=row_mask, other=0.0)
    total, weighted = _rows_sums(m, s, u, whole, rows, row_mask, tiles, stride_row, stride_tile, ENTROPY, ROWS, TILES)
    tl.store(out + rows, total, mask=row_mask)
    tl.store(out + T + rows, weighted, mask=row_mask)


@triton.jit(do_not_specialize=["T"])
def state_kernel(top, sums, state, T, ENTROPY: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < T
    total = tl.load(sums + rows, mask=row_mask, other=0)
    weighted = tl.load(sums + T + rows, mask=row_mask, other=0)
    _store_state(state, rows, row_mask, tl.load(top + rows, mask=row_mask, other=0.0), total, weighted, ENTROPY)


def rank_top(m: Tensor) -> Tensor:
    """m [tiles, T] -> fp32 [T]: this rank's maximum, NaN where a logit was NaN or +inf."""
    out = torch.empty(m.shape[1], dtype=torch.float32, device=m.device)
    rank_top_kernel[(triton.cdiv(m.shape[1], _ROWS),)](
        m, out, m.shape[1], m.shape[0], m.stride(1), m.stride(0), ROWS=_ROWS, TILES=_TILES, num_warps=4,
        enable_fp_fusion=False
    )  # fmt: skip
    return out


def rank_sums(m: Tensor, s: Tensor, u: Tensor, top: Tensor) -> Tensor:
    """int64 [2, T]: sums against ``top``, the maximum over all ranks; to be added over ranks."""
    out = torch.empty((2, m.shape[1]), dtype=torch.int64, device=m.device)
    rank_sums_kernel[(triton.cdiv(m.shape[1], _ROWS),)](
        m, s, u, top, out, m.shape[1], m.shape[0], m.stride(1), m.stride(0), ENTROPY=u.numel() > 0, ROWS=_ROWS,
        TILES=_TILES,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def state_of(top: Tensor, sums: Tensor, entropy: bool) -> Tensor:
    """Maximum fp32 [T] and sums int64 [2, T] over all ranks -> state fp64 [T, 3]."""
    state = torch.empty((len(top), 3), dtype=torch.float64, device=top.device)
    state_kernel[(triton.cdiv(len(top), 128),)](
        top, sums, state, len(top), ENTROPY=entropy, ROWS=128, num_warps=4, enable_fp_fusion=False
    )
    return state
