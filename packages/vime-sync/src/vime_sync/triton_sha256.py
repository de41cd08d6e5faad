"""SHA-256 (FIPS 180-4) of many chunks at once, where they lie: the levels of ``sha256-tree`` on a GPU.

One lane hashes one chunk, block after block, with the window of sixteen message words in registers. Everything is
32-bit integer arithmetic modulo 2^32, so there is no rounding and no order: any GPU gives hashlib's digests.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

LANES = 256
# the first 32 bits of the fractional parts of the cube roots of the first 64 primes
# fmt: off
KEYS = (
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
)
# fmt: on


@triton.jit
def _turn(x, N: tl.constexpr):
    return (x >> N) | (x << (32 - N))


@triton.jit
def _swap(x):
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@triton.jit
def _next(w, w1, w9, w14):
    small0 = _turn(w1, 7) ^ _turn(w1, 18) ^ (w1 >> 3)
    small1 = _turn(w14, 17) ^ _turn(w14, 19) ^ (w14 >> 10)
    return w + small0 + w9 + small1


@triton.jit
def _expand(w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, wa, wb, wc, wd, we, wf):
    w0 = _next(w0, w1, w9, we)
    w1 = _next(w1, w2, wa, wf)
    w2 = _next(w2, w3, wb, w0)
    w3 = _next(w3, w4, wc, w1)
    w4 = _next(w4, w5, wd, w2)
    w5 = _next(w5, w6, we, w3)
    w6 = _next(w6, w7, wf, w4)
    w7 = _next(w7, w8, w0, w5)
    w8 = _next(w8, w9, w1, w6)
    w9 = _next(w9, wa, w2, w7)
    wa = _next(wa, wb, w3, w8)
    wb = _next(wb, wc, w4, w9)
    wc = _next(wc, wd, w5, wa)
    wd = _next(wd, we, w6, wb)
    we = _next(we, wf, w7, wc)
    wf = _next(wf, w0, w8, wd)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, wa, wb, wc, wd, we, wf


@triton.jit
def _round(a, b, c, d, e, f, g, h, wk):
    big1 = _turn(e, 6) ^ _turn(e, 11) ^ _turn(e, 25)
    t = h + big1 + (g ^ (e & (f ^ g))) + wk
    big0 = _turn(a, 2) ^ _turn(a, 13) ^ _turn(a, 22)
    return d + t, t + big0 + ((a & b) | (c & (a | b)))


@triton.jit
def _eight(a, b, c, d, e, f, g, h, w0, w1, w2, w3, w4, w5, w6, w7, keys):
    # the eight names turn once; renaming them costs nothing
    d, h = _round(a, b, c, d, e, f, g, h, w0 + tl.load(keys))
    c, g = _round(h, a, b, c, d, e, f, g, w1 + tl.load(keys + 1))
    b, f = _round(g, h, a, b, c, d, e, f, w2 + tl.load(keys + 2))
    a, e = _round(f, g, h, a, b, c, d, e, w3 + tl.load(keys + 3))
    h, d = _round(e, f, g, h, a, b, c, d, w4 + tl.load(keys + 4))
    g, c = _round(d, e, f, g, h, a, b, c, w5 + tl.load(keys + 5))
    f, b = _round(c, d, e, f, g, h, a, b, w6 + tl.load(keys + 6))
    e, a = _round(b, c, d, e, f, g, h, a, w7 + tl.load(keys + 7))
    return a, b, c, d, e, f, g, h


@triton.jit
def _word(start, left, live, J: tl.constexpr):
    # an aligned word that holds one byte of the tensor can be read whole; what is beyond the end is not kept
    left -= 4 * J
    at = (start + 4 * J).to(tl.pointer_type(tl.uint32))
    raw = _swap(tl.load(at, mask=live & (left > 0), other=0))
    drop = tl.minimum(tl.maximum(32 - 8 * left, 0), 31).to(tl.uint32)
    # the bit 1 that follows the message
    mark = tl.full(left.shape, 0x80000000, tl.uint32) >> (8 * (left & 3)).to(tl.uint32)
    return ((raw >> drop) << drop) | tl.where((left >= 0) & (left < 4), mark, 0)


# compiled once: nothing in it is faster for a round number
@triton.jit(do_not_specialize=["table", "count", "chunks", "steps", "keys", "out"])
def chunk_digests_kernel(table, count, chunks, steps, keys, out, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """``table``: int64 [3, count], each tensor's address, its bytes, and how many chunks precede its own.

    ``keys``: int32 [64], the round constants. ``out``: int32 [chunks, 8], the digests' bytes.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < chunks
    # the last tensor that has no more than `lane` chunks before its own
    low = tl.zeros([LANES], tl.int32)
    high = tl.zeros([LANES], tl.int32) + (count - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begun = tl.load(table + 2 * count + middle) <= lane
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    begin = (lane - tl.load(table + 2 * count + low)) * CHUNK
    start = tl.load(table + low) + begin
    size = tl.minimum(tl.load(table + count + low) - begin, CHUNK).to(tl.int32)
    blocks = tl.where(active, (size + 72) // 64, 0)

    s0 = tl.full([LANES], 0x6A09E667, tl.uint32)
    s1 = tl.full([LANES], 0xBB67AE85, tl.uint32)
    s2 = tl.full([LANES], 0x3C6EF372, tl.uint32)
    s3 = tl.full([LANES], 0xA54FF53A, tl.uint32)
    s4 = tl.full([LANES], 0x510E527F, tl.uint32)
    s5 = tl.full([LANES], 0x9B05688C, tl.uint32)
    s6 = tl.full([LANES], 0x1F83D9AB, tl.uint32)
    s7 = tl.full([LANES], 0x5BE0CD19, tl.uint32)
    for block in range(tl.max(blocks, 0)):
        live = block < blocks
        at, left = start + block * 64, size - block * 64
        w0 = _word(at, left, live, 0)
        w1 = _word(at, left, live, 1)
        w2 = _word(at, left, live, 2)
        w3 = _word(at, left, live, 3)
        w4 = _word(at, left, live, 4)
        w5 = _word(at, left, live, 5)
        w6 = _word(at, left, live, 6)
        w7 = _word(at, left, live, 7)
        w8 = _word(at, left, live, 8)
        w9 = _word(at, left, live, 9)
        wa = _word(at, left, live, 10)
        wb = _word(at, left, live, 11)
        wc = _word(at, left, live, 12)
        wd = _word(at, left, live, 13)
        we = _word(at, left, live, 14)
        wf = _word(at, left, live, 15)
        # the message's length in bits ends its last block
        wf = tl.where(block == blocks - 1, (size * 8).to(tl.uint32), wf)
        a, b, c, d, e, f, g, h = s0, s1, s2, s3, s4, s5, s6, s7
        # a loop, as sixty-four rounds in a row take a compiler ten times as long
        for group in range(4):
            here = keys + group * 16
            a, b, c, d, e, f, g, h = _eight(a, b, c, d, e, f, g, h, w0, w1, w2, w3, w4, w5, w6, w7, here)
            a, b, c, d, e, f, g, h = _eight(a, b, c, d, e, f, g, h, w8, w9, wa, wb, wc, wd, we, wf, here + 8)
            w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, wa, wb, wc, wd, we, wf = _expand(
                w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, wa, wb, wc, wd, we, wf
            )
        s0 = tl.where(live, s0 + a, s0)
        s1 = tl.where(live, s1 + b, s1)
        s2 = tl.where(live, s2 + c, s2)
        s3 = tl.where(live, s3 + d, s3)
        s4 = tl.where(live, s4 + e, s4)
        s5 = tl.where(live, s5 + f, s5)
        s6 = tl.where(live, s6 + g, s6)
        s7 = tl.where(live, s7 + h, s7)
    to = out + lane * 8
    tl.store(to, _swap(s0), mask=active)
    tl.store(to + 1, _swap(s1), mask=active)
    tl.store(to + 2, _swap(s2), mask=active)
    tl.store(to + 3, _swap(s3), mask=active)
    tl.store(to + 4, _swap(s4), mask=active)
    tl.store(to + 5, _swap(s5), mask=active)
    tl.store(to + 6, _swap(s6), mask=active)
    tl.store(to + 7, _swap(s7), mask=active)


# the round constants travel with the table, as words of it
_PAIRS = torch.tensor(KEYS, dtype=torch.int64, device="cpu").to(torch.int32).view(torch.int64).tolist()


def tops(tensors: Sequence[torch.Tensor], chunk: int) -> torch.Tensor:
    """The top of each tensor's tree, see ``tree``; nothing waits for the device.

    Args:
        tensors: contiguous uint8 [n] of one device, each beginning at a multiple of four bytes.
        chunk: bytes of a chunk, a multiple of 64.

    Returns:
        int32 [len(tensors), 8]: bytes of a digest a row.
    """
    device = tensors[0].device
    levels, rows, place = _plan([t.numel() for t in tensors], chunk)
    out = torch.empty(rows, 8, dtype=torch.int32, device=device)
    where = [t.data_ptr() for t in tensors]
    table: list[int] = []
    for level in levels:
        table += [where[i] if level.below is None else out.data_ptr() + 32 * level.below[i] for i in level.members]
        table += level.sizes + level.firsts
    # one copy for all levels
    sent = torch.tensor([*table, *place, *_PAIRS], dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    keys = sent[-len(_PAIRS) :].view(torch.int32)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        at = 0
        for level in levels:
            count = len(level.members)
            chunk_digests_kernel[(triton.cdiv(level.chunks, LANES),)](
                sent[at:],
                count,
                level.chunks,
                count.bit_length(),
                keys,
                out[level.row :],
                CHUNK=chunk,
                LANES=LANES,
                # one lane a thread
                num_warps=LANES // (64 if torch.version.hip else 32),
            )
            at += 3 * count
    return out[sent[at : at + len(tensors)]]


@dataclass(frozen=True)
class _Level:
    members: list[int]
    sizes: list[int]
    firsts: list[int]
    chunks: int
    row: int
    below: dict[int, int] | None
    """Row of each member's first digest in the level below; None where the bytes are the tensors'."""


def _plan(sizes: Sequence[int], chunk: int) -> tuple[list[_Level], int, list[int]]:
    """The levels from the bytes up, rows of all of them together, and the row of each tensor's top."""
    levels: list[_Level] = []
    top = [0] * len(sizes)
    left, below, row = dict(enumerate(sizes)), None, 0
    while left:
        counts = [max(1, -(-size // chunk)) for size in left.values()]
        firsts = [0, *accumulate(counts)]
        chunks = firsts.pop()
        levels.append(_Level(list(left), list(left.values()), firsts, chunks, row, below))
        rows = {i: row + first for i, first in zip(left, firsts)}
        # a lone digest is the top of its tensor
        for i, count in zip(left, counts):
            top[i] = rows[i] if count == 1 else top[i]
        left = {i: 32 * count for i, count in zip(left, counts) if count > 1}
        below, row = rows, row + chunks
    return levels, row, top
