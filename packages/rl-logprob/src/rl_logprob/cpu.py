"""Contract `logprob`, CPU kernels: rows [first, last) of every output, one thread a row.

Inside a vocabulary tile the maximum and an int64 sum of fixed-point terms are exact, so their order is free; tiles are
joined left in id order in fp64. Rounded: logit / temperature to fp32, every fp64 step, and the result to fp32 once.
A row that holds a NaN or +inf, or no finite logit at all, has a NaN state.

Where a support is given (``threshold`` not empty), ids outside it are -inf, but for the row's own ``goal``.
"""

import numba as nb
import numpy as np

from rl_contract.jit import kernel
from rl_contract.primitives import LOG2E, exp2_f64, log_f64
from rl_logprob.contract import FIXED_POINT_BITS

_SCALE = float(1 << FIXED_POINT_BITS)
_UNIT = 1.0 / _SCALE
# e**-690 is zero in the fixed point, and keeps -inf out of products
_FLOOR = -690.0
_INF_KEY = 0x7F800000
_NEG_INF_KEY = -0x7F800001


@nb.njit(inline="always")
def dropped(x, i, threshold, last_id):  # type: ignore[no-untyped-def]
    """Whether id i with value x is outside a support; a NaN or +inf never is, so that it shows."""
    return x < threshold or (x == threshold and i > last_id)


@kernel
def tile_stats(
    logits, temperature, threshold, last_id, goal, first_id, vocab_size, tile, with_entropy, m, s, u, first, last
):
    """logits fp32 [T, C] hold ids from ``first_id``; writes m fp32 [T, k], s int64 [T, k] and u int64 [T, k or 0].

    m: maximum of x = logit / temperature; s: sum of exp(x - m); u: sum of exp(x - m) * (m - x); s, u in fixed point.
    """
    x = np.empty(tile, np.float32)
    bits = x.view(np.int32)
    columns = min(logits.shape[1], vocab_size - first_id)
    for t in range(first, last):
        temp = temperature[t]
        for k in range(m.shape[1]):
            begin = k * tile
            n = min(tile, columns - begin)
            if n <= 0:
                m[t, k] = -np.inf
                s[t, k] = 0
                if with_entropy:
                    u[t, k] = 0
                continue
            # bit patterns mapped to integers in the order of the floats: an integer maximum has no order of evaluation
            high = np.int32(-0x80000000)
            low = np.int32(0x7FFFFFFF)
            for i in range(n):
                x[i] = logits[t, begin + i] / temp
            if len(threshold) > 0:
                for i in range(n):
                    at = first_id + begin + i
                    if at != goal[t] and dropped(x[i], at, threshold[t], last_id[t]):
                        x[i] = -np.inf
            for i in range(n):
                b = bits[i]
                key = b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF))
                high = max(high, key)
                low = min(low, key)
            if high >= _INF_KEY or low < _NEG_INF_KEY:
                m[t, k] = np.nan
                s[t, k] = 0
                if with_entropy:
                    u[t, k] = 0
                continue
            top_bits = np.int32(high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            # adding +0 makes one zero of two
            top = top_bits.view(np.float32) + np.float32(0.0)
            m[t, k] = top
            if high == _NEG_INF_KEY:
                s[t, k] = 0
                if with_entropy:
                    u[t, k] = 0
                continue
            total = np.int64(0)
            if with_entropy:
                weighted = np.int64(0)
                for i in range(n):
                    d = max(np.float64(x[i]) - np.float64(top), _FLOOR)
                    e = exp2_f64(d * LOG2E) * _SCALE
                    total += np.int64(e + 0.5)
                    weighted += np.int64(e * -d + 0.5)
                u[t, k] = weighted
            else:
                for i in range(n):
                    d = max(np.float64(x[i]) - np.float64(top), _FLOOR)
                    total += np.int64(exp2_f64(d * LOG2E) * _SCALE + 0.5)
            s[t, k] = total


@kernel
def merge(m, s, u, with_entropy, state, first, last):
    """Tiles [T, k] in id order -> state fp64 [T, 3]: maximum M, log of the sum of exp(x - M), entropy or NaN."""
    for t in range(first, last):
        top = -np.inf
        bad = False
        for k in range(m.shape[1]):
            v = np.float64(m[t, k])
            if v != v:
                bad = True
            elif v > top:
                top = v
        if bad or top == -np.inf:
            state[t, 0] = np.nan
            state[t, 1] = np.nan
            state[t, 2] = np.nan
            continue
        total = 0.0
        weighted = 0.0
        for k in range(m.shape[1]):
            if s[t, k] > 0:
                d = np.float64(m[t, k]) - top
                w = exp2_f64(d * LOG2E)
                part = np.float64(s[t, k]) * _UNIT
                total = total + part * w
                if with_entropy:
                    weighted = weighted + (np.float64(u[t, k]) * _UNIT - part * d) * w
        log_total = log_f64(total)
        state[t, 0] = top
        state[t, 1] = log_total
        state[t, 2] = log_total + weighted / total if with_entropy else np.nan


@kernel
def selected(x, state, out, first, last):
    """x fp32 [T], already divided by the temperature -> logp fp32 [T]."""
    for t in range(first, last):
        out[t] = np.float32((np.float64(x[t]) - state[t, 0]) - state[t, 1])


@kernel
def full(logits, temperature, state, out, first, last):
    """logits fp32 [T, >=V] -> logp fp32 [T, V]."""
    for t in range(first, last):
        for i in range(out.shape[1]):
            x = np.float32(logits[t, i] / temperature[t])
            out[t, i] = np.float32((np.float64(x) - state[t, 0]) - state[t, 1])


@kernel
def grad_logits(
    logits, temperature, threshold, last_id, state, targets, dlogp, dentropy, with_entropy, first_id, vocab_size, out,
    first, last,
):  # fmt: skip
    """Gradient of ``sum(dlogp * logp + dentropy * entropy)`` by the logits of ids from ``first_id``, fp32 [T, C].

    With p = exp(logp_i): (dlogp * ((i == target) - p) - dentropy * (p * (logp_i + entropy))) / temperature, in fp64.
    """
    columns = min(logits.shape[1], vocab_size - first_id)
    for t in range(first, last):
        temp = temperature[t]
        top = state[t, 0]
        log_total = state[t, 1]
        g = np.float64(dlogp[t])
        at = targets[t] - first_id
        for i in range(logits.shape[1]):
            if i >= columns:
                out[t, i] = 0.0
                continue
            x = np.float32(logits[t, i] / temp)
            if len(threshold) > 0 and i != at and dropped(x, first_id + i, threshold[t], last_id[t]):
                out[t, i] = 0.0
                continue
            d = max((np.float64(x) - top) - log_total, _FLOOR)
            p = exp2_f64(d * LOG2E)
            value = g * ((1.0 if i == at else 0.0) - p)
            if with_entropy:
                value = value - np.float64(dentropy[t]) * (p * (d + state[t, 2]))
            out[t, i] = np.float32(value / np.float64(temp))
