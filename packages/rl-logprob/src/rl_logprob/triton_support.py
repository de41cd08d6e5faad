"""The kept ids of a row on a GPU: ``cpu_support`` bit for bit.

Counts, and weights in steps of 2**-42, are exact integers, whose sums have no order: the search over values, the blocks
a row is read in and warps are free. A value is held as a key, an int32 in the order of the floats; the search fixes two
bits of the key a pass, and passes over blocks of the row that hold nothing near.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.triton_tiles import exp2_f64, log_f64, row_temperature, scaled


@triton.jit
def _block(logits, row, begin, V, stride, temp, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Ids, which of them are real, their x and keys."""
    ids = begin + tl.arange(0, BLOCK)
    real = ids < V
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=real, other=float("-inf"))
    # adding +0 makes one zero of two
    x = scaled(x, temp, UNIT) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    return ids, real, x, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(x, top):
    d = x.to(tl.float64) - top
    d = tl.where(d > -690.0, d, -690.0)
    return (exp2_f64(d * 1.4426950408889634) * 4398046511104.0 + 0.5).to(tl.int64)


@triton.jit
def _of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reach(logits, row, V, stride, temp, top, target, WEIGHTED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key whose ids and all above amount to ``target``, and what those above it amount to."""
    base = tl.full((), 0, tl.int64)
    end = tl.full((), 4294967296, tl.int64)
    above = tl.full((), 0, tl.int64)
    for step in range(0, 16):
        width = tl.full((), 1, tl.int64) << (30 - 2 * step)
        k1 = (base + width - 2147483648).to(tl.int32)
        k2 = (base + 2 * width - 2147483648).to(tl.int32)
        k3 = (base + 3 * width - 2147483648).to(tl.int32)
        last = (end - 1 - 2147483648).to(tl.int32)
        s1 = tl.zeros((BLOCK,), tl.int64)
        s2 = tl.zeros((BLOCK,), tl.int64)
        s3 = tl.zeros((BLOCK,), tl.int64)
        for begin in range(0, V, BLOCK):
            _, real, x, key = _block(logits, row, begin, V, stride, temp, UNIT, BLOCK)
            near = real & (key >= k1) & (key <= last)
            if tl.max(near.to(tl.int32), 0) > 0:
                amount = near.to(tl.int64)
                if WEIGHTED:
                    amount = tl.where(near, _weight(x, top), 0)
                s1 += amount
                s2 += tl.where(key >= k2, amount, 0)
                s3 += tl.where(key >= k3, amount, 0)
        a1 = above + tl.sum(s1, 0)
        a2 = above + tl.sum(s2, 0)
        a3 = above + tl.sum(s3, 0)
        digit = tl.where(a3 >= target, 3, tl.where(a2 >= target, 2, tl.where(a1 >= target, 1, 0)))
        above = tl.where(digit == 3, above, tl.where(digit == 2, a3, tl.where(digit == 1, a2, a1)))
        end = tl.where(digit == 3, end, base + (digit + 1).to(tl.int64) * width)
        base += digit.to(tl.int64) * width
    return (base - 2147483648).to(tl.int32), above


@triton.jit
def support_kernel(
    logits, temperature, top_k, top_p, min_p, threshold, last_id, V, stride, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row; threshold fp32 and last_id int64 [T]."""
    row = tl.program_id(0)
    one = row + tl.zeros((1,), tl.int32)
    temp = row_temperature(temperature, one, tl.full((1,), True, tl.int1), UNIT)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, V, BLOCK):
        _, _, x, _ = _block(logits, row, begin, V, stride, temp, UNIT, BLOCK)
        high = tl.maximum(high, x)
        bad |= tl.where(x < float("inf"), 0, 1)
    top32 = tl.max(high, 0)
    top = top32.to(tl.float64)
    # parameters out of range keep every id, as rows that are not finite do
    good = (
        (tl.max(bad, 0) == 0) & (top32 > float("-inf")) & (k >= -1) & (p > 0) & (p <= 1) & (least >= 0) & (least <= 1)
    )
    count = tl.full((), 0, tl.int64) + V
    key = tl.full((), -2139095041, tl.int32)
    ties = tl.full((), -1, tl.int64)
    if good & (least > 0):
        # log of a normal number
        bound = log_f64(tl.where(least > 1e-300, least, 1e-300))
        counts = tl.zeros((BLOCK,), tl.int32)
        lowest = tl.full((BLOCK,), 2147483647, tl.int32)
        for begin in range(0, V, BLOCK):
            _, real, x, keys = _block(logits, row, begin, V, stride, temp, UNIT, BLOCK)
            inside = real & (x.to(tl.float64) - top >= bound)
            counts += inside.to(tl.int32)
            lowest = tl.minimum(lowest, tl.where(inside, keys, 2147483647))
        count = tl.sum(counts, 0).to(tl.int64)
        key = tl.min(lowest, 0)
    if good & (k > 0) & (k < count):
        key, above = _reach(logits, row, V, stride, temp, top, k, False, UNIT, BLOCK)
        ties = k - above
    if good & (p < 1):
        sums = tl.zeros((BLOCK,), tl.int64)
        equal = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, V, BLOCK):
            _, real, x, keys = _block(logits, row, begin, V, stride, temp, UNIT, BLOCK)
            if tl.max((keys > key).to(tl.int32), 0) > 0:
                sums += tl.where(keys > key, _weight(x, top), 0)
            equal += (real & (keys == key)).to(tl.int32)
        each = _weight(_of_key(key), top)
        total = tl.sum(sums, 0) + tl.where(ties >= 0, ties, tl.sum(equal, 0).to(tl.int64)) * each
        wanted = tl.ceil(p * total.to(tl.float64)).to(tl.int64)
        wanted = tl.minimum(tl.maximum(wanted, 1), total)
        key, above = _reach(logits, row, V, stride, temp, top, wanted, True, UNIT, BLOCK)
        each = _weight(_of_key(key), top)
        ties = (wanted - above + each - 1) // each
    last = tl.full((), -1, tl.int64) + V
    if ties >= 0:
        seen = tl.full((), 0, tl.int64)
        found = tl.full((), -1, tl.int32)
        for begin in range(0, V, BLOCK):
            ids, real, x, keys = _block(logits, row, begin, V, stride, temp, UNIT, BLOCK)
            equal = (real & (keys == key)).to(tl.int32)
            here = tl.sum(equal, 0)
            if here > 0:
                place = seen + tl.cumsum(equal, 0).to(tl.int64)
                found = tl.maximum(found, tl.max(tl.where((equal > 0) & (place == ties), ids, -1), 0))
            seen += here
        last = found.to(tl.int64)
    tl.store(threshold + row, tl.where(good, _of_key(key), float("-inf")))
    tl.store(last_id + row, last)


def support(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, >= V], top_k int64, top_p and min_p fp64 [T] -> threshold fp32, last id int64 [T]."""
    rows = len(logits)
    threshold = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last_id = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(4096, triton.next_power_of_2(vocab_size))
    support_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, threshold, last_id, vocab_size, logits.stride(0),
        UNIT=temperature.numel() == 0, BLOCK=block, num_warps=16 if block > 1024 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return threshold, last_id
