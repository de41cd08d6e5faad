"""Contract `logprob` on a GPU: statistics of logits that lie in memory, and what follows from statistics.

Tiles are ``triton_tiles.tile_sums``, as in the fused head. Over tiles: exact maximum M, then the exact int64 sum of
each tile's fp64 ``sum * 2**((m - M) * log2(e))`` rounded to a multiple of 2**-42. Both are order-free, over tiles and
over ranks. Then fp64: log of the sum, ``(x - M) - log``, one rounding to fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.triton_launch import launch
from rl_logprob.triton_tiles import (
    STAT_TILE,
    below,
    exp2_f64,
    exp_f32,
    load_support,
    log_f64,
    logit_gradient,
    maximum_along,
    row_temperature,
    scaled,
    supported,
    term_parts,
    weighted_term,
    whole_sum,
)

MERGE_BITS = 42
_ROWS, _TILES = 16, 128


@triton.jit
def _quarter(
    logits, rows, row_mask, column, C, stride, temperature, first_id, threshold, last_id, goal, UNIT: tl.constexpr,
    SUPPORT: tl.constexpr,
):  # fmt: skip
    """32 columns of x for each row, -inf beyond C and outside the support."""
    columns = column + tl.arange(0, 32)
    ptrs = logits + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    x = tl.load(ptrs, mask=row_mask[:, None] & (columns < C)[None, :], other=float("-inf"))
    x = scaled(x, temperature, UNIT)
    if SUPPORT:
        x = supported(x, (first_id + columns)[None, :], threshold[:, None], last_id[:, None], goal[:, None])
    return x


@triton.jit
def _parts(x, top, ENTROPY: tl.constexpr):
    d = below(x, top)
    e = exp_f32(d)
    high, low = term_parts(e)
    if ENTROPY:
        more_high, more_low = term_parts(weighted_term(e, d))
    else:
        more_high, more_low = high, low
    return high, low, more_high, more_low


@triton.jit(do_not_specialize=["T", "first_tile"])
def tile_stats_kernel(
    logits, temperature, threshold, last_id, goal, m, s, u, T, C, stride, first_tile, stride_tile,
    ROWS: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, SUPPORT: tl.constexpr,
):  # fmt: skip
    """One program per 128 ids of ROWS rows. Four loads of 32 ids, so that a row's sums need few exchanges between
    lanes.
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < T
    tile = tl.program_id(0)
    column = tile * 128
    temp = row_temperature(temperature, rows, row_mask, UNIT)[:, None]
    least, last, own = temp, rows, rows
    if SUPPORT:
        least, last, own = load_support(threshold, last_id, goal, rows, row_mask)
    id0 = first_tile * 128
    x0 = _quarter(logits, rows, row_mask, column, C, stride, temp, id0, least, last, own, UNIT, SUPPORT)
    x1 = _quarter(logits, rows, row_mask, column + 32, C, stride, temp, id0, least, last, own, UNIT, SUPPORT)
    x2 = _quarter(logits, rows, row_mask, column + 64, C, stride, temp, id0, least, last, own, UNIT, SUPPORT)
    x3 = _quarter(logits, rows, row_mask, column + 96, C, stride, temp, id0, least, last, own, UNIT, SUPPORT)
    low_half = tl.maximum(x0, x1, propagate_nan=tl.PropagateNan.ALL)
    high_half = tl.maximum(x2, x3, propagate_nan=tl.PropagateNan.ALL)
    top = maximum_along(tl.maximum(low_half, high_half, propagate_nan=tl.PropagateNan.ALL), 1)
    a, b, c, d = _parts(x0, top[:, None], ENTROPY)
    a1, b1, c1, d1 = _parts(x1, top[:, None], ENTROPY)
    a2, b2, c2, d2 = _parts(x2, top[:, None], ENTROPY)
    a3, b3, c3, d3 = _parts(x3, top[:, None], ENTROPY)
    at = (first_tile + tile).to(tl.int64) * stride_tile + rows
    tl.store(m + at, top, mask=row_mask)
    total = whole_sum(tl.sum((a + a1) + (a2 + a3), 1), tl.sum((b + b1) + (b2 + b3), 1))
    tl.store(s + at, total, mask=row_mask)
    if ENTROPY:
        weighted = whole_sum(tl.sum((c + c1) + (c2 + c3), 1), tl.sum((d + d1) + (d2 + d3), 1))
        tl.store(u + at, weighted, mask=row_mask)


@triton.jit
def _rows_top(m, rows, row_mask, tiles, stride_row, stride_tile, ROWS: tl.constexpr, TILES: tl.constexpr):
    """fp32 maximum of each row's tiles; NaN if one is NaN or +inf."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for begin in range(0, tiles, TILES):
        ks = begin + tl.arange(0, TILES)
        at = ks.to(tl.int64)[:, None] * stride_tile + rows.to(tl.int64)[None, :] * stride_row
        block = tl.load(m + at, mask=(ks < tiles)[:, None] & row_mask[None, :], other=float("-inf"))
        top = tl.maximum(top, maximum_along(block, 0), propagate_nan=tl.PropagateNan.ALL)
    # one zero of two
    return tl.where(top < float("inf"), top + 0.0, float("nan"))


@triton.jit
def _rows_sums(
    m, s, u, top, rows, row_mask, tiles, stride_row, stride_tile, ENTROPY: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """int64 sums of each row's tiles in units of 2**-42, terms weighted by exp(m - top)."""
    total = tl.zeros((ROWS,), tl.int64)
    weighted = tl.zeros((ROWS,), tl.int64)
    for begin in range(0, tiles, TILES):
        ks = begin + tl.arange(0, TILES)
        at = ks.to(tl.int64)[:, None] * stride_tile + rows.to(tl.int64)[None, :] * stride_row
        mask = (ks < tiles)[:, None] & row_mask[None, :]
        tile_top = tl.load(m + at, mask=mask, other=float("-inf"))
        tile_sum = tl.load(s + at, mask=mask, other=0)
        d = tile_top.to(tl.float64) - top.to(tl.float64)[None, :]
        # an empty tile's difference is no number, and neither is anything in a row that is not finite
        d = tl.where((tile_sum > 0) & (d <= 0.0), d, 0.0)
        d = tl.where(d > -690.0, d, -690.0)
        w = exp2_f64(d * 1.4426950408889634)
        part = tile_sum.to(tl.float64) * 9.094947017729282e-13
        total += tl.sum((part * w * 4398046511104.0 + 0.5).to(tl.int64), 0)
        if ENTROPY:
            inside = tl.load(u + at, mask=mask & (tile_sum > 0), other=0).to(tl.float64) * 9.094947017729282e-13
            weighted += tl.sum(((inside - part * d) * w * 4398046511104.0 + 0.5).to(tl.int64), 0)
    return total, weighted


@triton.jit
def _log_total(top, total):
    """fp64: M, the sum of exp(x - M), its log; M and the log are NaN for a row that is not finite."""
    good = (top > float("-inf")) & (top < float("inf"))
    whole = tl.where(good, total.to(tl.float64) * 2.2737367544323206e-13, 1.0)
    nan = tl.full(top.shape, float("nan"), tl.float64)
    return tl.where(good, top.to(tl.float64), nan), whole, tl.where(good, log_f64(whole), nan)


@triton.jit
def _store_state(state, rows, row_mask, top, total, weighted, ENTROPY: tl.constexpr):
    """fp64 [T, 3]: M, log of the sum of exp(x - M), entropy or NaN. NaN for a row that is not finite. Returns the first
    two.
    """
    high, whole, log_total = _log_total(top, total)
    at = rows.to(tl.int64) * 3
    tl.store(state + at, high, mask=row_mask)
    tl.store(state + at + 1, log_total, mask=row_mask)
    entropy = tl.full(rows.shape, float("nan"), tl.float64)
    if ENTROPY:
        entropy = log_total + weighted.to(tl.float64) * 2.2737367544323206e-13 / whole
    tl.store(state + at + 2, entropy, mask=row_mask)
    return high, log_total


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    m, s, u, state, T, tiles, stride_row, stride_tile, ENTROPY: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr
):
    """All tiles of a row -> its state."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < T
    top = _rows_top(m, rows, row_mask, tiles, stride_row, stride_tile, ROWS, TILES)
    total, weighted = _rows_sums(m, s, u, top, rows, row_mask, tiles, stride_row, stride_tile, ENTROPY, ROWS, TILES)
    _store_state(state, rows, row_mask, top, total, weighted, ENTROPY)


@triton.jit
def _logp(x, top, log_total):
    # adding +0 makes one zero of two
    return (((x.to(tl.float64) + 0.0) - top) - log_total).to(tl.float32)


# targets are where they lie in a prompt
@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["targets"])
def score_kernel(
    m, s, u, logits, targets, temperature, x, state, logp, T, V, stride, tiles, stride_row, stride_tile,
    GATHER: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``merge_kernel`` and ``selected_kernel`` in one; with GATHER x comes from logits [T, >= V] and is stored."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < T
    if GATHER:
        target = tl.load(targets + rows, mask=row_mask, other=0).to(tl.int64)
        inside = (target >= 0) & (target < V)
        at = logits + rows.to(tl.int64) * stride + tl.where(inside, target, 0)
        value = tl.load(at, mask=row_mask & inside, other=float("nan"))
        value = scaled(value, row_temperature(temperature, rows, row_mask, UNIT), UNIT)
        tl.store(x + rows, value, mask=row_mask)
    else:
        value = tl.load(x + rows, mask=row_mask, other=0.0)
    top = _rows_top(m, rows, row_mask, tiles, stride_row, stride_tile, ROWS, TILES)
    total, weighted = _rows_sums(m, s, u, top, rows, row_mask, tiles, stride_row, stride_tile, ENTROPY, ROWS, TILES)
    whole_top, log_total = _store_state(state, rows, row_mask, top, total, weighted, ENTROPY)
    tl.store(logp + rows, _logp(value, whole_top, log_total), mask=row_mask)


@triton.jit(do_not_specialize=["T"])
def selected_kernel(x, state, out, T, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < T
    top = tl.load(state + rows * 3, mask=mask, other=0.0)
    log_total = tl.load(state + rows * 3 + 1, mask=mask, other=0.0)
    tl.store(out + rows, _logp(tl.load(x + rows, mask=mask, other=0.0), top, log_total), mask=mask)


@triton.jit
def full_kernel(logits, temperature, state, out, V, stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    temp = row_temperature(temperature, row + tl.zeros((1,), tl.int32), tl.full((1,), True, tl.int1), UNIT)
    x = scaled(tl.load(logits + row.to(tl.int64) * stride + columns, mask=mask, other=0.0), temp, UNIT)
    top = tl.load(state + row * 3)
    log_total = tl.load(state + row * 3 + 1)
    tl.store(out + row.to(tl.int64) * V + columns, _logp(x, top, log_total), mask=mask)


@triton.jit
def grad_logits_kernel(
    logits, temperature, threshold, last_id, state, targets, dlogp, dentropy, out, C, real, stride, stride_out,
    first_id, UNIT: tl.constexpr, ENTROPY: tl.constexpr, SUPPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of ``triton_head`` from logits in memory; 0 for ids from ``real`` on, and where x is -inf."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    temp = row_temperature(temperature, row + tl.zeros((1,), tl.int32), tl.full((1,), True, tl.int1), UNIT)
    x = scaled(tl.load(logits + row.to(tl.int64) * stride + columns, mask=mask, other=0.0), temp, UNIT)
    top = tl.load(state + row * 3).to(tl.float32)
    log_total = tl.load(state + row * 3 + 1).to(tl.float32)
    entropy, h = top, top
    if ENTROPY:
        entropy = tl.load(state + row * 3 + 2).to(tl.float32)
        h = tl.load(dentropy + row)
    target = (tl.load(targets + row) - first_id).to(tl.int32)
    if SUPPORT:
        last = (tl.load(last_id + row) - first_id).to(tl.int32)
        x = supported(x, columns, tl.load(threshold + row), last, target)
    hit = columns == target
    value = logit_gradient(x, top, log_total, entropy, tl.load(dlogp + row), h, hit, temp, ENTROPY, UNIT)
    value = tl.where((columns < real) & (x != float("-inf")), value, 0.0)
    tl.store(out + row.to(tl.int64) * stride_out + columns, value.to(out.dtype.element_ty), mask=mask)


def new_stats(rows: int, tiles: int, entropy: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for m fp32, s and u int64 [tiles, T]."""
    m = torch.empty((tiles, rows), dtype=torch.float32, device=device)
    s = torch.empty((tiles, rows), dtype=torch.int64, device=device)
    return m, s, torch.empty((tiles if entropy else 0, rows), dtype=torch.int64, device=device)


def tile_stats(
    logits: Tensor, temperature: Tensor, columns: int, stats: tuple[Tensor, Tensor, Tensor], first_tile: int,
    kept: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """logits fp32 [T, C], of which the first ``columns`` are ids -> m, s, u [tiles, T] from ``first_tile`` on.

    ``kept``: threshold fp32, last id and goal int64 [T], ids counted as tiles are.
    """
    m, s, u = stats
    rows = 16 if logits.shape[0] >= 16 else 4
    tokens = logits.shape[0]
    limits = (temperature, temperature, temperature) if kept is None else kept
    launch(
        tile_stats_kernel, (-(-columns // STAT_TILE), -(-tokens // rows), 1),
        (logits, temperature, *limits, m, s, u, tokens, columns, logits.stride(0), first_tile, m.stride(0)),
        {"ROWS": rows, "UNIT": temperature.numel() == 0, "ENTROPY": u.numel() > 0, "SUPPORT": kept is not None},
        num_warps=rows // 4, enable_fp_fusion=False,
    )  # fmt: skip


def merge(m: Tensor, s: Tensor, u: Tensor) -> Tensor:
    """m, s, u [tiles, T] -> state fp64 [T, 3]."""
    tiles, rows = m.shape
    state = torch.empty((rows, 3), dtype=torch.float64, device=m.device)
    merge_kernel[(triton.cdiv(rows, _ROWS),)](
        m, s, u, state, rows, tiles, m.stride(1), m.stride(0), ENTROPY=u.numel() > 0, ROWS=_ROWS, TILES=_TILES,
        num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return state


def score(stats: tuple[Tensor, Tensor, Tensor], x: Tensor, state: Tensor, logp: Tensor) -> None:
    """m, s, u [tiles, T] and x fp32 [T] -> state fp64 [T, 3] and logp fp32 [T], which are filled."""
    _score(stats, x, x, x, x, state, logp, 0, False)


def score_logits(
    stats: tuple[Tensor, Tensor, Tensor], logits: Tensor, targets: Tensor, temperature: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """m, s, u [tiles, T] of logits fp32 [T, >= V], targets int64 [T] -> logp and x fp32 [T], state fp64 [T, 3].

    Both are NaN for a target that is no id.
    """
    rows = logits.shape[0]
    x, logp = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    state = torch.empty((rows, 3), dtype=torch.float64, device=logits.device)
    _score(stats, logits, targets, temperature, x, state, logp, vocab_size, True)
    return logp, x, state


def _score(
    stats: tuple[Tensor, Tensor, Tensor], logits: Tensor, targets: Tensor, temperature: Tensor, x: Tensor,
    state: Tensor, logp: Tensor, vocab_size: int, gather: bool,
) -> None:  # fmt: skip
    m, s, u = stats
    tiles, rows = m.shape
    if not rows:
        return
    launch(
        score_kernel, (-(-rows // _ROWS), 1, 1),
        (m, s, u, logits, targets, temperature, x, state, logp, rows, vocab_size, logits.stride(0), tiles, m.stride(1),
         m.stride(0)),
        {"GATHER": gather, "UNIT": temperature.numel() == 0, "ENTROPY": u.numel() > 0, "ROWS": _ROWS, "TILES": _TILES},
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def selected(x: Tensor, state: Tensor) -> Tensor:
    """x fp32 [T], divided by the temperature -> logp fp32 [T]."""
    out = torch.empty_like(x)
    selected_kernel[(triton.cdiv(len(x), 128),)](x, state, out, len(x), BLOCK=128, num_warps=4, enable_fp_fusion=False)
    return out


def full(logits: Tensor, temperature: Tensor, state: Tensor, vocab_size: int) -> Tensor:
    """logits fp32 [T, >= V] -> logp fp32 [T, V]."""
    out = torch.empty((len(logits), vocab_size), dtype=torch.float32, device=logits.device)
    full_kernel[(triton.cdiv(vocab_size, 1024), len(logits))](
        logits, temperature, state, out, vocab_size, logits.stride(0), UNIT=temperature.numel() == 0, BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def grad_logits(
    logits: Tensor, temperature: Tensor, state: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor, first_id: int,
    real: int, out: Tensor, kept: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fills out [T, C]; ids from ``real`` columns on get 0. ``kept``: threshold fp32 and last id int64 [T]."""
    grad_logits_kernel[(triton.cdiv(logits.shape[1], 1024), len(logits))](
        logits, temperature, *(kept or (temperature,) * 2), state, targets, dlogp, dentropy, out, logits.shape[1], real,
        logits.stride(0), out.stride(0), first_id,
        UNIT=temperature.numel() == 0, ENTROPY=dentropy.numel() > 0, SUPPORT=kept is not None, BLOCK=1024, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
