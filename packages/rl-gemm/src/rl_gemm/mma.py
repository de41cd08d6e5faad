"""The sm90 GEMM contract on a CPU, bit for bit: what Hopper's bf16 matrix instructions compute, step by step.

One step takes the fp32 accumulator and 16 products (mma.sync m16n8k16 and wgmma m64nNk16 alike) as one sum:
a product's significand is the product of the two significands, not renormalised, its exponent the sum of the two,
denormal inputs as they are; m is the largest exponent of the 17 nonzero terms, at least -133; every term is truncated
toward zero to 25 fraction bits relative to 2**m; the terms are added exactly; the sum is truncated toward zero to
fp32, denormals kept. Infinities and NaN follow IEEE rules step by step, an overflow is an infinity, every NaN is
0x7fffffff. A chain is a sequence of steps from +0 with k ascending, the last one filled up with zeros; a tree joins
chains in IEEE fp32.

The model of one step, up to the bound on m, is that of arXiv 2511.10909; the bound and the treatment of non-finite
values were measured on an H200 (``tests/data``).
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.devices import host_array
from rl_contract.jit import kernel
from rl_contract.threads import for_ranges

STEP = 16
_FRACTION = 25
_LEAST = -133
_NAN = np.uint32(0x7FFFFFFF)


@kernel
def _decode(bits, significand, exponent, finite):
    """bf16 bits [R, K] -> signed significand and exponent, value significand / 128 * 2**exponent; finite[r]."""
    rows, depth = bits.shape
    for i in range(rows):
        finite[i] = True
        for k in range(depth):
            u = np.int32(bits[i, k])
            e, s = (u >> 7) & 255, u & 127
            if e == 255:
                finite[i] = False
            if e > 0:
                s += 128
            significand[i, k] = -s if u >> 15 else s
            exponent[i, k] = (e if e > 0 else 1) - 127


@kernel
def _special(xs, xe, ws, we, i, j, k0, width, infinite):
    """State after a step with a non-finite operand or accumulator: 0 finite, 1 and -1 infinite, 2 NaN."""
    plus, minus = infinite == 1, infinite == -1
    for n in range(width):
        a, b = xs[i, k0 + n], ws[j, k0 + n]
        a_special, b_special = xe[i, k0 + n] == 128, we[j, k0 + n] == 128
        if not (a_special or b_special):
            continue
        # an infinity has significand 128, a NaN more; infinity times zero is NaN
        if (a_special and abs(a) != 128) or (b_special and abs(b) != 128) or a == 0 or b == 0:
            return 2
        if (a < 0) != (b < 0):
            minus = True
        else:
            plus = True
    if plus and minus:
        return 2
    return 1 if plus else (-1 if minus else 0)


@kernel
def _chains(xs, xe, ws, we, finite, begin, end, out, first, last):
    """out[i, j] = fp32 bits of the chain over k of ``begin`` to ``end``, for rows ``first`` to ``last``."""
    columns = ws.shape[0]
    p = np.zeros(STEP, np.int64)
    e = np.zeros(STEP, np.int64)
    for i in range(first, last):
        for j in range(columns):
            all_finite = finite[0, i] and finite[1, j]
            acc, acc_e = np.int64(0), np.int64(-126)  # value acc * 2**(acc_e - 23)
            state = 0  # as in _special
            for k0 in range(begin, end, STEP):
                width = min(STEP, end - k0)
                if not all_finite:
                    state = _special(xs, xe, ws, we, i, j, k0, width, state)
                    if state == 2:
                        break
                if state != 0:
                    if all_finite:
                        break
                    continue
                m = np.int64(_LEAST)
                if acc != 0 and acc_e > m:
                    m = acc_e
                for n in range(width):
                    p[n] = np.int64(xs[i, k0 + n]) * np.int64(ws[j, k0 + n])
                    e[n] = np.int64(xe[i, k0 + n]) + np.int64(we[j, k0 + n])
                for n in range(width, STEP):
                    p[n] = 0
                for n in range(STEP):
                    if p[n] != 0 and e[n] > m:
                        m = e[n]
                total = (abs(acc) << 2) >> min(m - acc_e, np.int64(63))
                if acc < 0:
                    total = -total
                for n in range(STEP):
                    # a product has 14 fraction bits, so 11 more make 25
                    term = (abs(p[n]) << 11) >> max(np.int64(0), min(m - e[n], np.int64(63)))
                    total += -term if p[n] < 0 else term
                magnitude = abs(total)
                if magnitude == 0:
                    acc, acc_e = np.int64(0), np.int64(-126)
                    continue
                # the sum is far below 2**53, so its fp64 exponent is exact
                top = (np.float64(magnitude).view(np.int64) >> 52) - 1023
                acc_e = max(top + m - _FRACTION, np.int64(-126))
                drop = acc_e - 23 - (m - _FRACTION)
                magnitude = magnitude >> min(drop, np.int64(63)) if drop >= 0 else magnitude << -drop
                acc = -magnitude if total < 0 else magnitude
                if acc_e > 127:
                    state = -1 if total < 0 else 1
            if state == 2:
                out[i, j] = _NAN
                continue
            if state != 0:
                out[i, j] = np.uint32(0x7F800000) if state > 0 else np.uint32(0xFF800000)
                continue
            magnitude = abs(acc)
            biased = acc_e + 127 if magnitude >= (1 << 23) else np.int64(0)
            bits = np.uint32((biased << 23) | (magnitude & 0x7FFFFF))
            out[i, j] = bits | np.uint32(0x80000000) if acc < 0 else bits


def chain(a: Tensor, b: Tensor, leaves: int = 1, fused: int = 1) -> list[Tensor]:
    """a [M, K], b [N, K], bf16 -> one fp32 [M, N] per leaf. ``fused=2``: leaf g is the g-th part of both halves of K.

    Raises:
        ContractError: another type, leaves that are no power of two, or K that they do not divide into whole steps.
    """
    for name, value in (("leaves", leaves), ("fused", fused)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
            raise ContractError(f"mma.chain got {name}={value!r}; supported: a power of two, 1 for one chain")
    if (
        a.dtype != torch.bfloat16
        or b.dtype != torch.bfloat16
        or a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != b.shape[1]
    ):
        raise ContractError(
            f"mma.chain got {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}; "
            "needs bfloat16 [M, K] and [N, K], one K"
        )
    k = a.shape[1]
    if leaves > 1 and k % (leaves * fused * STEP):
        raise ContractError(
            f"tree({leaves}) needs K divisible by {fused}*{leaves}*{STEP}, got K={k}; use fewer leaves or pad K"
        )
    if leaves > 1 and fused > 1:
        order = torch.arange(k).view(fused, leaves, -1).transpose(0, 1).flatten()
        a, b = a[:, order], b[:, order]
    sides, finite = [], np.zeros((2, max(a.shape[0], b.shape[0], 1)), np.bool_)
    for side, x in enumerate((a, b)):
        bits = host_array(x.detach().cpu().contiguous())
        significand, exponent = np.empty(bits.shape, np.int32), np.empty(bits.shape, np.int32)
        _decode(bits, significand, exponent, finite[side])
        sides += [significand, exponent]
    parts = []
    for leaf in range(leaves):
        begin, end = leaf * k // leaves, (leaf + 1) * k // leaves
        out = np.zeros((a.shape[0], b.shape[0]), np.uint32)
        for_ranges(
            partial(_chains, *sides, finite, begin, end, out),
            a.shape[0],
            8.0 * a.shape[0] * b.shape[0] * (end - begin),
        )
        parts.append(torch.from_numpy(out.view(np.float32)))
    return parts


def tree(a: Tensor, b: Tensor, leaves: int = 1, fused: int = 1) -> Tensor:
    """a [M, K], b [N, K], bf16 -> fp32 [M, N]: the bits of ``rl_gemm.ops.matmul_tree`` on sm90. Errors as ``chain``."""
    parts = chain(a, b, leaves, fused)
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]
