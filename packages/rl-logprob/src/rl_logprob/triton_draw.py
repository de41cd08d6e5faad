"""A sampled token, its log-probability and its rank out of logits in memory, in two passes over them.

The choice rule is that of ``triton_sample``; tiles, their sums and a row's state are those of ``triton_scores``, from
the same functions. Which ids a program looks at never shows: maxima, exact integer sums and counts only. Rows may be
greedy, drawn, or padding of a captured graph, which costs nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.triton_sample import _GOLDEN, _mix
from rl_logprob.triton_scores import _log_total, _logp, _rows_sums, _rows_top
from rl_logprob.triton_tiles import STAT_TILE, TINY, log_f64, tile_sums

TILES = 8
BLOCK = TILES * STAT_TILE
WARPS = 4
# programs in flight: parts of a row fill the processors where rows are few
_PROGRAMS = 1024


@triton.jit
def temperature_of(temperature, row, kind):
    """NaN, which makes a row bad, for what is no temperature and for a kind that there is not."""
    t = tl.load(temperature + row)
    return tl.where((t >= TINY) & (t < float("inf")) & (kind >= -1) & (kind <= 1), t, float("nan"))


@triton.jit
def draw_kernel(
    logits, edge, seeds, positions, temperature, kinds, values, ids_out, m, s, V, first_id, C, first_tile, tiles,
    per_program, stride, TILES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Program (part, row) -> values fp64 and ids_out int32 [T, parts], which mean what ``sample_kernel``'s do; m fp32
    and s int64 [T, tiles].

    Not SHARED, logits are [T, >= V], and first_id and first_tile 0. SHARED, column j of logits [T, C] is id first_id +
    j, the tiles are those from first_tile on, and ids behind the columns are those of edge fp32 [T, 128].
    """
    row = tl.program_id(1)
    start = first_tile * 128 + tl.program_id(0) * per_program
    kind = tl.load(kinds + row)
    temp = temperature_of(temperature, row, kind)
    seed = tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    drawn = kind == 0
    stop = first_tile + tiles
    best = tl.full((), float("-inf"), tl.float64)
    choice = tl.full((), 0x7FFFFFFF, tl.int32)
    # a NaN or +inf shows in a tile's maximum
    bad = tl.zeros((TILES,), tl.int32)
    end = tl.where(kind == -1, start, tl.minimum(start + per_program, tl.minimum(stop * 128, V)))
    for begin in range(start, end, TILES * 128):
        tile = begin // 128 + tl.arange(0, TILES)
        ids = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
        if SHARED:
            column = ids - first_id
            real = (tile < stop)[:, None] & (ids < V)
            x = tl.load(logits + row.to(tl.int64) * stride + column, mask=real & (column < C), other=float("-inf"))
            behind = tl.load(edge + row * 128 + column - C, mask=real & (column >= C), other=float("-inf"))
            x = tl.where(column < C, x, behind)
        else:
            x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < V, other=float("-inf"))
        x = tl.div_rn(x, temp)
        top, total, _ = tile_sums(x, 1, False)
        bad = tl.where(top < float("inf"), bad, 1)
        at = row.to(tl.int64) * tiles + tile - first_tile
        tl.store(m + at, top, mask=tile < stop)
        tl.store(s + at, total, mask=tile < stop)
        value = x.to(tl.float64)
        r = _mix(key + (ids.to(tl.uint64) + 1) * _GOLDEN) >> 12
        rest = (4503599627370495 - r.to(tl.int64)).to(tl.float64) + 0.5
        exponent = (rest.to(tl.int64, bitcast=True) >> 52) - 1023
        bound = (52 - exponent).to(tl.float64) * 0.6931471805599453 + 1e-6
        if tl.max(tl.max(tl.where(drawn, value + bound, value), 1), 0) >= best:
            u = (r.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
            value = tl.where(drawn, value - log_f64(-log_f64(u)), value)
            highest = tl.max(tl.max(value, 1), 0)
            found = tl.min(tl.min(tl.where(value == highest, ids, 0x7FFFFFFF), 1), 0)
            choice = tl.where(highest > best, found, choice)
            best = tl.where(highest > best, highest, best)
    at = row * tl.num_programs(0) + tl.program_id(0)
    any_bad = tl.max(bad, 0) > 0
    tl.store(values + at, tl.where(any_bad, float("inf"), best))
    tl.store(ids_out + at, tl.where(any_bad, -1, choice))


@triton.jit(do_not_specialize=["parts"])
def score_kernel(
    logits, temperature, kinds, values, ids, m, s, out, bad, V, parts, stride, PARTS: tl.constexpr, TILES: tl.constexpr
):
    """One row: out int64 [3, T] gets its id (0 for a bad row, which is counted in ``bad``), 0 as its rank, and in the
    last row's first half the log-probability, fp32.
    """
    row = tl.program_id(0)
    T = tl.num_programs(0)
    kind = tl.load(kinds + row)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    found = tl.load(ids + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    best = tl.max(value, 0)
    choice = tl.min(tl.where(value == best, found, 0x7FFFFFFF), 0)
    good = (choice >= 0) & (best > float("-inf"))
    tl.atomic_add(bad, 1, mask=(kind != -1) & (good == 0))
    choice = tl.where(good & (kind != -1), choice, 0)
    x = tl.div_rn(tl.load(logits + row.to(tl.int64) * stride + choice), temperature_of(temperature, row, kind))
    rows = row + tl.zeros((1,), tl.int32)
    mask = rows >= 0
    tiles = tl.cdiv(V, 128)
    top = _rows_top(m, rows, mask, tiles, tiles, 1, 1, TILES)
    total, _ = _rows_sums(m, s, s, top, rows, mask, tiles, tiles, 1, False, 1, TILES)
    high, _, log_total = _log_total(top, total)
    tl.store(out + row, choice.to(tl.int64))
    tl.store(out + T + row, tl.zeros((), tl.int64))
    tl.store((out + 2 * T).to(tl.pointer_type(tl.float32)) + rows, _logp(x, high, log_total))


@triton.jit
def rank_kernel(logits, kinds, out, V, per_program, stride, BLOCK: tl.constexpr):
    """Program (part, row) adds to out[1] how many of its logits are at least as large as that of out[0]."""
    row = tl.program_id(1)
    start = tl.program_id(0) * per_program
    T = tl.num_programs(1)
    first = logits + row.to(tl.int64) * stride
    own = tl.load(first + tl.load(out + row))
    count = tl.zeros((BLOCK,), tl.int32)
    end = tl.where(tl.load(kinds + row) == -1, start, tl.minimum(start + per_program, V))
    for begin in range(start, end, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(first + ids, mask=ids < V, other=float("-inf"))
        count += ((x >= own) & (ids < V)).to(tl.int32)
    tl.atomic_add(out + T + row, tl.sum(count, 0).to(tl.int64), mask=end > start)


def cut(ids: int, rows: int) -> tuple[int, int]:
    """(parts of a row, ids of a part): whole blocks; at least one part."""
    parts = max(1, min(triton.cdiv(ids, BLOCK), _PROGRAMS // rows))
    per_program = max(1, triton.cdiv(triton.cdiv(ids, parts), BLOCK)) * BLOCK
    return max(1, triton.cdiv(ids, per_program)), per_program


def most_parts(ids: int) -> int:
    """Of any number of rows; a power of two."""
    return triton.next_power_of_2(max(1, min(triton.cdiv(ids, BLOCK), _PROGRAMS)))


def draw(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor, vocab_size: int, bad: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """logits fp32 [T, >= V]; seeds, positions, kinds int64, temperature fp32 [T] -> out int64 [3, T], see
    ``score_kernel``; ``bad`` int64 [1] is added to.
    """
    rows, device = len(logits), logits.device
    parts, per_program = cut(vocab_size, rows)
    tiles = triton.cdiv(vocab_size, STAT_TILE)
    values = torch.empty((rows, parts), dtype=torch.float64, device=device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
    m = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    s = torch.empty((rows, tiles), dtype=torch.int64, device=device)
    stride = logits.stride(0)
    draw_kernel[(parts, rows)](
        logits, logits, seeds, positions, temperature, kinds, values, ids, m, s, vocab_size, 0, vocab_size, 0, tiles,
        per_program, stride, TILES=TILES, SHARED=False, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    score_kernel[(rows,)](
        logits, temperature, kinds, values, ids, m, s, out, bad, vocab_size, parts, stride,
        PARTS=most_parts(vocab_size), TILES=512, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    rank_kernel[(parts, rows)](
        logits, kinds, out, vocab_size, per_program, stride, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
