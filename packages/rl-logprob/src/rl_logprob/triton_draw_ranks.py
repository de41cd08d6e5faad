"""``triton_draw`` over ranks that share the vocabulary: what crosses ranks is small, and has no order.

Column j of rank r's logits [T, C] is id r C + j. A tile that two ranks share is the lower one's, which is given the
first columns of the other. Then each rank's best id with its logit and largest tile cross, 32 bytes a row, and the sum
of its tiles against the largest of all with the count of its logits that are as large as the chosen one, 16 bytes a
row. Maxima, sums of integers and counts only: the bits are those of one rank that holds all columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_contract import Communicator
from rl_contract.communicator import gather_said
from rl_logprob.triton_draw import BLOCK, TILES, WARPS, cut, draw_kernel, most_parts, temperature_of
from rl_logprob.triton_scores import _log_total, _logp, _rows_sums, _rows_top
from rl_logprob.triton_tiles import STAT_TILE

_STAT_TILES = 512
_ROWS = 128


@triton.jit(do_not_specialize=["parts"])
def best_kernel(
    logits, edge, values, ids, m, out, first_id, C, tiles, parts, stride, PARTS: tl.constexpr, TILES: tl.constexpr
):
    """One row: out int64 [4, T] gets this rank's best value (bits fp64), the id, the bits of its logit fp32, and those
    of the largest of its tiles.
    """
    row = tl.program_id(0)
    T = tl.num_programs(0)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    found = tl.load(ids + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    best = tl.max(value, 0)
    choice = tl.min(tl.where(value == best, found, 0x7FFFFFFF), 0)
    column = choice - first_id
    held = (choice >= 0) & (best > float("-inf"))
    own = tl.load(logits + row.to(tl.int64) * stride + column, mask=held & (column < C), other=0.0)
    behind = tl.load(edge + row * 128 + column - C, mask=held & (column >= C), other=0.0)
    own = tl.where(column < C, own, behind)
    rows = row + tl.zeros((1,), tl.int32)
    top = _rows_top(m, rows, rows >= 0, tiles, tiles, 1, 1, TILES)
    tl.store(out + row, best.to(tl.int64, bitcast=True))
    tl.store(out + T + row, choice.to(tl.int64))
    tl.store(out + 2 * T + row, own.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(out + 3 * T + rows, top.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def pick_kernel(found, kinds, m, s, chosen, mine, out, bad, tiles, WORLD: tl.constexpr, TILES: tl.constexpr):
    """One row: of everyone's ``best_kernel``, found int64 [WORLD, 4, T], the id goes to out[0] (0 for a bad row, which
    is counted in ``bad``), its logit and the largest tile of all to chosen fp32 [2, T], the sum of this rank's tiles
    against it to mine[0] of int64 [2, T], 0 to mine[1].
    """
    row = tl.program_id(0)
    T = tl.num_programs(0)
    rows = row + tl.zeros((1,), tl.int32)
    kind = tl.load(kinds + row)
    best = tl.full((), float("-inf"), tl.float64)
    choice = tl.full((), 0x7FFFFFFF, tl.int64)
    own = tl.full((), 0.0, tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    for rank in tl.static_range(WORLD):
        theirs = found + rank * 4 * T + row
        value = tl.load(theirs).to(tl.float64, bitcast=True)
        id = tl.load(theirs + T)
        better = (value > best) | ((value == best) & (id < choice))
        best = tl.where(better, value, best)
        choice = tl.where(better, id, choice)
        own = tl.where(better, tl.load(theirs + 2 * T).to(tl.int32).to(tl.float32, bitcast=True), own)
        high = tl.load(found + (rank * 4 + 3) * T + rows).to(tl.int32).to(tl.float32, bitcast=True)
        top = tl.maximum(top, high, propagate_nan=tl.PropagateNan.ALL)
    good = (choice >= 0) & (best > float("-inf"))
    tl.atomic_add(bad, 1, mask=(kind != -1) & (good == 0))
    total, _ = _rows_sums(m, s, s, top, rows, rows >= 0, tiles, tiles, 1, False, 1, TILES)
    tl.store(out + row, tl.where(good & (kind != -1), choice, 0))
    tl.store(chosen + row, own)
    tl.store(chosen + T + rows, top)
    tl.store(mine + rows, total)
    tl.store(mine + T + row, tl.zeros((), tl.int64))


@triton.jit
def count_kernel(logits, kinds, chosen, mine, columns, per_program, stride, BLOCK: tl.constexpr):
    """Program (part, row) adds to mine[1] how many of this rank's logits are at least as large as the chosen one."""
    row = tl.program_id(1)
    start = tl.program_id(0) * per_program
    T = tl.num_programs(1)
    own = tl.load(chosen + row)
    count = tl.zeros((BLOCK,), tl.int32)
    end = tl.where(tl.load(kinds + row) == -1, start, tl.minimum(start + per_program, columns))
    for begin in range(start, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < columns, other=float("-inf"))
        count += ((x >= own) & (at < columns)).to(tl.int32)
    tl.atomic_add(mine + T + row, tl.sum(count, 0).to(tl.int64), mask=end > start)


@triton.jit(do_not_specialize=["T"])
def finish_kernel(sums, temperature, kinds, chosen, out, T, WORLD: tl.constexpr, ROWS: tl.constexpr):
    """Everyone's ``mine``, sums int64 [WORLD, 2, T] -> out[1], ranks, and in out[2] the log-probabilities, fp32."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < T
    total = tl.zeros((ROWS,), tl.int64)
    count = tl.zeros((ROWS,), tl.int64)
    for rank in tl.static_range(WORLD):
        total += tl.load(sums + rank * 2 * T + rows, mask=mask, other=0)
        count += tl.load(sums + (rank * 2 + 1) * T + rows, mask=mask, other=0)
    kind = tl.load(kinds + rows, mask=mask, other=-1)
    temp = temperature_of(temperature, tl.minimum(rows, T - 1), kind)
    x = tl.div_rn(tl.load(chosen + rows, mask=mask, other=0.0), temp)
    high, _, log_total = _log_total(tl.load(chosen + T + rows, mask=mask, other=0.0), total)
    tl.store(out + T + rows, count, mask=mask)
    tl.store((out + 2 * T).to(tl.pointer_type(tl.float32)) + rows, _logp(x, high, log_total), mask=mask)


class Shard(NamedTuple):
    """This rank's part of the vocabulary: its first id, how many of its columns are ids, and the tiles it is to sum."""

    first_id: int
    columns: int
    first_tile: int
    tiles: int


def shard_of(rank: int, columns: int, vocab_size: int) -> Shard:
    first_id = rank * columns
    first_tile, stop = (triton.cdiv(min(i, vocab_size), STAT_TILE) for i in (first_id, first_id + columns))
    return Shard(first_id, max(0, min(columns, vocab_size - first_id)), first_tile, stop - first_tile)


class Step:
    """One step of T rows on this rank, between what crosses ranks."""

    def __init__(
        self, logits: Tensor, edge: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor,
        rank: int, vocab_size: int,
    ) -> None:  # fmt: skip
        """logits fp32 [T, C]; edge fp32 [T, 128], the first columns of the next rank, anything on the last one."""
        self.logits, self.edge, self.temperature, self.kinds = logits, edge, temperature, kinds
        self.rows, self.width = logits.shape
        self.shard = shard_of(rank, self.width, vocab_size)
        self._begin(seeds, positions, vocab_size)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def _begin(self, seeds: Tensor, positions: Tensor, vocab_size: int) -> None:
        first_id, _, first_tile, tiles = self.shard
        ids = tiles * STAT_TILE
        parts, per_program = cut(ids, self.rows)
        values = self._empty((self.rows, parts), torch.float64)
        choices = self._empty((self.rows, parts), torch.int32)
        self._m = self._empty((self.rows, tiles), torch.float32)
        self._s = self._empty((self.rows, tiles), torch.int64)
        stride = self.logits.stride(0)
        draw_kernel[(parts, self.rows)](
            self.logits, self.edge, seeds, positions, self.temperature, self.kinds, values, choices, self._m, self._s,
            vocab_size, first_id, self.width, first_tile, tiles, per_program, stride, TILES=TILES, SHARED=True,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        self.best = self._empty((4, self.rows), torch.int64)
        best_kernel[(self.rows,)](
            self.logits, self.edge, values, choices, self._m, self.best, first_id, self.width, tiles, parts, stride,
            PARTS=most_parts(ids), TILES=_STAT_TILES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def pick(self, found: Tensor, bad: Tensor, out: Tensor) -> Tensor:
        """found int64 [world, 4, T], everyone's ``best`` -> int64 [2, T] to be added over ranks; fills out[0]."""
        self._chosen = self._empty((2, self.rows), torch.float32)
        mine = self._empty((2, self.rows), torch.int64)
        pick_kernel[(self.rows,)](
            found, self.kinds, self._m, self._s, self._chosen, mine, out, bad, self.shard.tiles, WORLD=len(found),
            TILES=_STAT_TILES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        parts, per_program = cut(self.shard.columns, self.rows)
        count_kernel[(parts, self.rows)](
            self.logits, self.kinds, self._chosen, mine, self.shard.columns, per_program, self.logits.stride(0),
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return mine

    def finish(self, sums: Tensor, out: Tensor) -> None:
        """sums int64 [world, 2, T], what everyone's ``pick`` gave -> the rest of out."""
        finish_kernel[(triton.cdiv(self.rows, _ROWS),)](
            sums, self.temperature, self.kinds, self._chosen, out, self.rows, WORLD=len(sums), ROWS=_ROWS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


def draw(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor, vocab_size: int, bad: Tensor,
    out: Tensor, comm: Communicator, said: str = "",
) -> None:  # fmt: skip
    """As ``triton_draw.draw``, of logits fp32 [T, C] of this rank, C at least 128; its first call compares ``said``."""
    edge = logits
    if logits.shape[1] % STAT_TILE:
        edges = gather_said(comm, logits[:, :STAT_TILE].contiguous()[None], said)
        edge = edges[min(comm.rank + 1, comm.world_size - 1)]
    step = Step(logits, edge, seeds, positions, temperature, kinds, comm.rank, vocab_size)
    mine = step.pick(gather_said(comm, step.best[None], said), bad, out)
    step.finish(comm.all_gather(mine[None], dim=0), out)
