"""Gumbel-max sampling whose choice depends on the row's logits, seed and position alone.

Noise of id i is -log(-log(u)), u = (r + 1/2) / 2**52 with r the upper 52 bits of a SplitMix64 finaliser over a counter
made of seed, position and i; the choice is the maximum of x + noise in fp64, the lowest id at a tie. No batch mate, no
other id's noise and no state takes part.
"""

import hashlib
import math
import re
from decimal import Decimal

import numba as nb
import numpy as np
import torch
from torch import Tensor

from rl_contract import ContractError, Launch, record_launch
from rl_contract.arrays import as_array
from rl_contract.checks import shown, whole_number
from rl_contract.jit import kernel
from rl_contract.opaque import opaque_op
from rl_contract.primitives import log_f64
from rl_contract.threads import for_ranges
from rl_logprob.checks import check_logits, check_tensor, check_vocab, row_temperature
from rl_logprob.cpu import dropped
from rl_logprob.ops import support_arrays
from rl_logprob.support import Support, masked_logits, refuse_undrawn

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S12, _S27, _S30, _S31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)
_ONE = np.uint64(1)
_TOP = np.uint64((1 << 52) - 1)
_LN2 = math.log(2.0)


@nb.njit(inline="always")
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@nb.njit(inline="always")
def _noise(r: int) -> float:
    u = (np.float64(r) + 0.5) * 2.0**-52
    return -log_f64(-log_f64(u))


@nb.njit(inline="always")
def _noise_bound(r: int) -> float:
    """At least ``_noise(r)``: noise <= -log(1 - u), whose size the binary exponent of 1 - u bounds."""
    rest = np.float64(np.float64(_TOP - r) + 0.5)
    exponent = (rest.view(np.int64) >> 52) - 1023
    return np.float64(52 - exponent) * _LN2 + 1e-6


@kernel
def _gumbel(logits, seeds, positions, temperature, threshold, last_id, vocab_size, greedy, out, first, last):
    for t in range(first, last):
        key = _mix(_mix(np.uint64(seeds[t]) + _GOLDEN) + (np.uint64(positions[t]) + _ONE) * _GOLDEN)
        best = -np.inf
        choice = -1
        for i in range(vocab_size):
            x = np.float32(logits[t, i] / temperature[t])
            if x == -np.inf:
                continue
            if not x < np.inf:
                choice = -1
                break
            if len(threshold) > 0 and dropped(x, i, threshold[t], last_id[t]):
                continue
            value = np.float64(x)
            if not greedy:
                r = _mix(key + (np.uint64(i) + _ONE) * _GOLDEN) >> _S12
                # most ids cannot win, which is seen without a logarithm
                if value + _noise_bound(r) < best:
                    continue
                value = value + _noise(r)
            if value > best:
                best = value
                choice = i
        out[t] = choice


@opaque_op("rl_logprob::gumbel_sample")
def sample_op(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    vocab_size: int,
    greedy: bool,
    threshold: Tensor | None = None,
    last_id: Tensor | None = None,
) -> Tensor:
    out = torch.empty(len(logits), dtype=torch.int64)
    head = tuple(as_array(a) for a in (logits, seeds, positions, temperature)) + support_arrays(threshold, last_id)
    work = 10.0 * len(logits) * vocab_size
    for_ranges(lambda a, b: _gumbel(*head, vocab_size, greedy, as_array(out), a, b), len(logits), work)
    record_launch(Launch("logprob", "rl_logprob.cpu.gumbel_sample", "greedy" if greedy else "gumbel"))
    return out


@sample_op.register_fake
def _(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    vocab_size: int,
    greedy: bool,
    threshold: Tensor | None = None,
    last_id: Tensor | None = None,
) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def _sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, vocab_size: int, temperature: float | Tensor, greedy: bool,
    support: Support | None = None,
) -> Tensor:  # fmt: skip
    check_vocab(vocab_size, 1)
    check_logits(logits, vocab_size)
    rows = len(logits)
    for name, x in (("seeds", seeds), ("positions", positions)):
        check_tensor(name, x)
        if x.shape != (rows,) or x.dtype != torch.int64:
            raise ContractError(f"{name} are {x.dtype} {tuple(x.shape)}; needs int64 [{rows}]")
    seeds, positions = seeds.to(logits.device).contiguous(), positions.to(logits.device).contiguous()
    temp = row_temperature(temperature, rows, logits.device)
    masked, key = masked_logits(logits, support, vocab_size, temperature=temperature)
    out = sample_op(masked, seeds, positions, temp, vocab_size, greedy, *key)
    if out.is_cuda and torch.cuda.is_current_stream_capturing():
        # nothing can be looked at here: such a row stays -1, which is no id
        return out
    bad = out < 0
    if bool(bad.any()):
        if support is not None:
            refuse_undrawn(support, logits[:, :vocab_size], temp, int(bad.nonzero()[0]))
        raise ContractError(
            f"logits of row {int(bad.nonzero()[0])} hold a NaN, +inf or no finite value ({int(bad.sum())} such rows); "
            "nothing can be sampled from them; look for the first nonfinite activation or weight"
        )
    return out


def gumbel_sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    support: Support | None = None,
) -> Tensor:
    """One id per row, distributed as ``softmax(logits / temperature)`` over ids 0..vocab_size-1, or over ``support``.

    Args:
        logits: fp32 [T, at least vocab_size].
        seeds: int64 [T], one per request; see ``request_seed``.
        positions: int64 [T], position of the sampled token in its own sequence.
        temperature: positive number, or fp32 [T]; 1.0 where the caller has divided already.
        support: the kept ids of each row; see ``sampling_support``. The noise of an id stays what it was without.

    Returns:
        int64 [T]. A row's id depends on its own logits, seed and position only.

    Raises:
        ContractError: types, shapes, temperature, a row with a NaN or +inf or without a finite logit, or a support made
            at another temperature or without an id.
    """
    return _sample(logits, seeds, positions, vocab_size, temperature, greedy=False, support=support)


def greedy_sample(logits: Tensor, *, vocab_size: int) -> Tensor:
    """The id of the largest logit of each row, the lowest at a tie; int64 [T]. Errors as in ``gumbel_sample``."""
    check_tensor("logits", logits)
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return _sample(logits, zeros, zeros, vocab_size, 1.0, greedy=True)


def _decimal(whole: int) -> str:
    """As ``str``, which Python refuses to a long integer."""
    return str(Decimal(int(whole)))


def request_seed(run_seed: int, request: str | int) -> int:
    """A signed 64-bit seed for one request of a run: the first eight bytes of sha256 of both.

    The request 1 and the request "1" are two, with two seeds.

    Raises:
        ContractError: a run seed that is no integer, or a request that is neither an integer nor a text.
    """
    if not whole_number(run_seed):
        raise ContractError(f"request_seed got run_seed={shown(run_seed)}; supported: an integer; convert it")
    if not whole_number(request) and not isinstance(request, str):
        raise ContractError(f"request_seed got request={shown(request)}; supported: an integer or a text; convert it")
    # a text that could be taken for an integer, or for a text so marked, is marked
    marked = isinstance(request, str) and re.fullmatch('0|-?[1-9][0-9]*|".*', request, re.DOTALL)
    name = f'"{request}' if marked else f"{request}" if isinstance(request, str) else _decimal(request)
    digest = hashlib.sha256(f"{_decimal(run_seed)}\n{name}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
