"""The kept ids of a row, CPU kernel: rows [first, last), one thread a row.

Ids stand in one total order: x = logit / temperature descending, the lowest id first at a tie. Counts are integers and
weights exp(x - maximum) are integers in steps of 2**-42, so their sums have no order and any way of finding a threshold
finds the same one. Every fp64 step is rounded on its own.
"""

import numba as nb
import numpy as np

from rl_contract.jit import kernel
from rl_contract.primitives import LOG2E, exp2_f64, log_f64
from rl_logprob.contract import SUPPORT_BITS, SUPPORT_MIN_P

_SCALE = float(1 << SUPPORT_BITS)
_FLOOR = -690.0
_LEAST_KEY = np.int32(-0x7F800001)  # the key of -inf
_LOW = np.int32(0x7FFFFFFF)


@nb.njit(inline="always")
def _weight(x, top):  # type: ignore[no-untyped-def]
    d = max(np.float64(x) - np.float64(top), _FLOOR)
    return np.int64(exp2_f64(d * LOG2E) * _SCALE + 0.5)


@nb.njit(inline="always")
def _of_key(key):  # type: ignore[no-untyped-def]
    return np.int32(key ^ ((key >> np.int32(31)) & _LOW)).view(np.float32)


@nb.njit
def _reach(keys, amounts, each, target, histogram):  # type: ignore[no-untyped-def]
    """The largest key whose ids and all above amount to ``target``, and what those above it amount to. An id amounts
    to ``amounts[i]``, or to 1 without ``each``.
    """
    prefix = np.int64(0)
    above = np.int64(0)
    for shift in (24, 16, 8, 0):
        histogram[:] = 0
        for i in range(len(keys)):
            u = np.int64(keys[i]) + 0x80000000
            if (u >> (shift + 8)) == (prefix >> (shift + 8)):
                histogram[(u >> shift) & 0xFF] += amounts[i] if each else 1
        digit = 255
        while digit > 0 and above + histogram[digit] < target:
            above += histogram[digit]
            digit -= 1
        prefix += np.int64(digit) << shift
    return np.int32(prefix - 0x80000000), above


@nb.njit
def _nth(keys, key, n):  # type: ignore[no-untyped-def]
    """The n-th id, from 1, of those with ``key``."""
    for i in range(len(keys)):
        if keys[i] == key:
            n -= 1
            if n == 0:
                return i
    return len(keys) - 1


@kernel
def support(logits, temperature, top_k, top_p, min_p, vocab_size, threshold, last_id, first, last):
    """Writes threshold fp32 [T] and last_id int64 [T]: x > threshold is kept, and x == threshold up to ``last_id``.

    A row with a NaN or +inf, or nothing above -inf, keeps every id, so that whoever scores it sees it.
    """
    keys = np.empty(vocab_size, np.int32)
    x = np.empty(vocab_size, np.float32)
    bits = x.view(np.int32)
    weights = np.empty(vocab_size, np.int64)
    histogram = np.empty(256, np.int64)
    for t in range(first, last):
        threshold[t] = -np.inf
        last_id[t] = vocab_size - 1
        top = np.float32(-np.inf)
        good = True
        for i in range(vocab_size):
            # adding +0 makes one zero of two
            x[i] = np.float32(logits[t, i] / temperature[t]) + np.float32(0.0)
            good = good and x[i] < np.inf
            top = max(top, x[i])
            keys[i] = bits[i] ^ ((bits[i] >> np.int32(31)) & _LOW)
        if not good or top == -np.inf:
            continue
        # min-p: a threshold on x alone
        count = np.int64(vocab_size)
        key = _LEAST_KEY
        if min_p[t] > 0:
            least = log_f64(max(min_p[t], SUPPORT_MIN_P))
            count = np.int64(0)
            key = _LOW
            for i in range(vocab_size):
                if np.float64(x[i]) - np.float64(top) >= least:
                    count += 1
                    key = min(key, keys[i])
        ties = np.int64(-1)  # of those at ``key``, all
        if 0 < top_k[t] < count:
            key, above = _reach(keys, weights, False, top_k[t], histogram)
            ties = top_k[t] - above
        if top_p[t] < 1:
            total = np.int64(0)
            at_key = np.int64(0)
            for i in range(vocab_size):
                weights[i] = _weight(x[i], top)
                if keys[i] > key:
                    total += weights[i]
                elif keys[i] == key and at_key != ties:
                    at_key += 1
                    total += weights[i]
            target = min(max(np.int64(np.ceil(np.float64(top_p[t]) * np.float64(total))), 1), total)
            key, above = _reach(keys, weights, True, target, histogram)
            one = _weight(_of_key(key), top)
            ties = (target - above + one - 1) // one
        threshold[t] = _of_key(key)
        if ties >= 0:
            last_id[t] = _nth(keys, key, ties)
