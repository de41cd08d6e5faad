"""The sampler's choice rule on a GPU: noise by (seed, position, id) in fp64 exactly as in ``sampling``, maximum, lowest
id at a tie.

Which ids a program looks at, and in what order, is free: the rule is a maximum with a total order. Ids whose noise
cannot reach the best value so far are passed over a block at a time, which a bound shows without a logarithm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.triton_launch import launch
from rl_logprob.triton_tiles import log_f64, row_temperature, scaled, supported

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def _best_of(value, ids, at_least):
    """The largest value and the lowest id that has it."""
    top = tl.max(value, 0)
    choice = tl.min(tl.where(value == top, ids, 0x7FFFFFFF), 0)
    better = top > at_least
    return top, choice, better


@triton.jit
def sample_kernel(
    logits, seeds, positions, temperature, threshold, last_id, values, ids_out, V, per_program, stride,
    GREEDY: tl.constexpr, UNIT: tl.constexpr, SUPPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (part, row): best of ids part * per_program onwards -> values fp64, ids_out int64 [parts, T]; id -1 and
    +inf for a row with a NaN or +inf, id 0x7FFFFFFF and -inf where there is nothing above -inf.
    """
    row = tl.program_id(1)
    start = tl.program_id(0) * per_program
    one = row + tl.zeros((1,), tl.int32)
    temp = row_temperature(temperature, one, tl.full((1,), True, tl.int1), UNIT)
    seed = tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    if SUPPORT:
        least, last = tl.load(threshold + row), tl.load(last_id + row).to(tl.int32)
    best = tl.full((), float("-inf"), tl.float64)
    choice = tl.full((), 0x7FFFFFFF, tl.int32)
    bad = tl.full((), 0, tl.int32)
    for begin in range(start, tl.minimum(start + per_program, V), BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        mask = (ids < V) & (ids < start + per_program)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=mask, other=float("-inf"))
        x = scaled(x, temp, UNIT)
        bad = tl.maximum(bad, tl.max(tl.where(x < float("inf"), 0, 1), 0))
        if SUPPORT:
            x = supported(x, ids, least, last, -1)
        value = x.to(tl.float64)
        if GREEDY:
            top, found, better = _best_of(value, ids, best)
            best = tl.where(better, top, best)
            choice = tl.where(better, found, choice)
        else:
            r = _mix(key + (ids.to(tl.uint64) + 1) * _GOLDEN) >> 12
            # noise <= -log(1 - u), whose size the binary exponent of 1 - u bounds
            rest = (4503599627370495 - r.to(tl.int64)).to(tl.float64) + 0.5
            exponent = (rest.to(tl.int64, bitcast=True) >> 52) - 1023
            bound = (52 - exponent).to(tl.float64) * 0.6931471805599453 + 1e-6
            if tl.max(value + bound, 0) >= best:
                u = (r.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
                top, found, better = _best_of(value - log_f64(-log_f64(u)), ids, best)
                best = tl.where(better, top, best)
                choice = tl.where(better, found, choice)
    at = tl.program_id(0) * tl.num_programs(1) + row
    tl.store(values + at, tl.where(bad > 0, float("inf"), best))
    tl.store(ids_out + at, tl.where(bad > 0, -1, choice).to(tl.int64))


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, vocab_size: int, greedy: bool,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """logits fp32 [T, >= V] -> int64 [T], of ids in ``kept``: threshold fp32, last id int64 [T]; -1 for a row with
    a NaN or +inf or nothing above -inf.
    """
    rows, block = len(logits), 1024
    # parts fill the processors when rows are few
    parts = max(1, min(triton.cdiv(vocab_size, block), 1024 // max(rows, 1)))
    per_program = triton.cdiv(triton.cdiv(vocab_size, parts), block) * block
    parts = triton.cdiv(vocab_size, per_program)
    values = torch.empty((parts, rows), dtype=torch.float64, device=logits.device)
    ids = torch.empty((parts, rows), dtype=torch.int64, device=logits.device)
    launch(
        sample_kernel, (parts, rows, 1),
        (logits, seeds, positions, temperature, *(kept or (temperature,) * 2), values, ids, vocab_size, per_program,
         logits.stride(0)),
        {"GREEDY": greedy, "UNIT": temperature.numel() == 0, "SUPPORT": kept is not None, "BLOCK": block},
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    best = values.amax(0)
    found = torch.where(values == best, ids, 0x7FFFFFFF).amin(0)
    return torch.where(best == -torch.inf, -1, found)
