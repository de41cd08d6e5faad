"""Opaque custom ops over the kernels: launch counts and choice by device. Inputs were checked by the callers."""

import numpy as np
import torch
from torch import Tensor

from rl_contract import Launch, record_launch
from rl_contract.arrays import as_array
from rl_contract.opaque import opaque_op
from rl_contract.threads import for_ranges
from rl_logprob import cpu, cpu_support

# operations an element, for the decision to hand rows to other threads
_WORK = 40.0


def _record(kernel: str) -> None:
    record_launch(Launch("logprob", f"rl_logprob.cpu.{kernel}"))


def support_arrays(threshold: Tensor | None, last_id: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Arrays for the kernels, empty where there is no support."""
    if threshold is None or last_id is None:
        return np.empty(0, np.float32), np.empty(0, np.int64)
    return as_array(threshold), as_array(last_id)


@opaque_op("rl_logprob::tile_stats")
def tile_stats(
    logits: Tensor,
    temperature: Tensor,
    first_id: int,
    vocab_size: int,
    vocab_tile: int,
    entropy: bool,
    threshold: Tensor | None = None,
    last_id: Tensor | None = None,
    goal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits fp32 [T, C], ids from ``first_id`` -> m fp32, s, u int64 [T, tiles]; u is empty unless ``entropy``.

    ``threshold``, ``last_id``: the support; ids outside it are -inf but for ``goal``, int64 [T].
    """
    rows, tiles = logits.shape[0], -(-logits.shape[1] // vocab_tile)
    m = torch.empty(rows, tiles, dtype=torch.float32)
    s = torch.empty(rows, tiles, dtype=torch.int64)
    u = torch.empty(rows, tiles if entropy else 0, dtype=torch.int64)
    kept = (*support_arrays(threshold, last_id), np.empty(0, np.int64) if goal is None else as_array(goal))
    head = (as_array(logits), as_array(temperature), *kept, first_id, vocab_size, vocab_tile, entropy)
    tail = (as_array(m), as_array(s), as_array(u))
    for_ranges(lambda a, b: cpu.tile_stats(*head, *tail, a, b), rows, _WORK * logits.numel())
    _record("tile_stats")
    return m, s, u


@tile_stats.register_fake
def _(
    logits: Tensor,
    temperature: Tensor,
    first_id: int,
    vocab_size: int,
    vocab_tile: int,
    entropy: bool,
    threshold: Tensor | None = None,
    last_id: Tensor | None = None,
    goal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, tiles = logits.shape[0], -(-logits.shape[1] // vocab_tile)
    s = logits.new_empty((rows, tiles), dtype=torch.int64)
    return logits.new_empty((rows, tiles)), s, s.new_empty((rows, tiles if entropy else 0))


@opaque_op("rl_logprob::merge_tiles")
def merge_tiles(m: Tensor, s: Tensor, u: Tensor) -> Tensor:
    """Tiles in id order -> state fp64 [T, 3]: maximum, log of the sum, entropy."""
    state = torch.empty(len(m), 3, dtype=torch.float64)
    args = (as_array(m), as_array(s), as_array(u), u.shape[1] > 0, as_array(state))
    for_ranges(lambda a, b: cpu.merge(*args, a, b), len(m), _WORK * m.numel())
    _record("merge_tiles")
    return state


@merge_tiles.register_fake
def _(m: Tensor, s: Tensor, u: Tensor) -> Tensor:
    return m.new_empty((m.shape[0], 3), dtype=torch.float64)


@opaque_op("rl_logprob::selected")
def selected(x: Tensor, state: Tensor) -> Tensor:
    """x fp32 [T], divided by the temperature -> logp fp32 [T]."""
    out = torch.empty(len(x), dtype=torch.float32)
    cpu.selected(as_array(x), as_array(state), as_array(out), 0, len(x))
    _record("selected")
    return out


@selected.register_fake
def _(x: Tensor, state: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@opaque_op("rl_logprob::full")
def full(logits: Tensor, temperature: Tensor, state: Tensor, vocab_size: int) -> Tensor:
    """logits fp32 [T, >=vocab_size] -> logp fp32 [T, vocab_size]."""
    out = torch.empty(len(logits), vocab_size, dtype=torch.float32)
    args = (as_array(logits), as_array(temperature), as_array(state), as_array(out))
    for_ranges(lambda a, b: cpu.full(*args, a, b), len(logits), 4.0 * out.numel())
    _record("full")
    return out


@full.register_fake
def _(logits: Tensor, temperature: Tensor, state: Tensor, vocab_size: int) -> Tensor:
    return logits.new_empty((logits.shape[0], vocab_size))


@opaque_op("rl_logprob::grad_logits")
def grad_logits(
    logits: Tensor,
    temperature: Tensor,
    state: Tensor,
    targets: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
    first_id: int,
    vocab_size: int,
    threshold: Tensor | None = None,
    last_id: Tensor | None = None,
) -> Tensor:
    """Gradient by the logits of ids from ``first_id``, fp32 [T, C]; ``dentropy`` is empty where there is none."""
    out = torch.empty(logits.shape, dtype=torch.float32)
    kept = support_arrays(threshold, last_id)
    head = (as_array(logits), as_array(temperature), *kept, as_array(state), as_array(targets), as_array(dlogp))
    tail = (as_array(dentropy), len(dentropy) > 0, first_id, vocab_size, as_array(out))
    for_ranges(lambda a, b: cpu.grad_logits(*head, *tail, a, b), len(logits), _WORK * out.numel())
    _record("grad_logits")
    return out


@grad_logits.register_fake
def _(
    logits: Tensor,
    temperature: Tensor,
    state: Tensor,
    targets: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
    first_id: int,
    vocab_size: int,
    threshold: Tensor | None = None,
    last_id: Tensor | None = None,
) -> Tensor:
    return logits.new_empty(logits.shape)


@opaque_op("rl_logprob::support")
def support(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, >=vocab_size], top_k int64, top_p and min_p fp64 [T] -> threshold fp32, last_id int64 [T]."""
    out = torch.empty(len(logits), dtype=torch.float32), torch.empty(len(logits), dtype=torch.int64)
    head = tuple(as_array(a) for a in (logits, temperature, top_k, top_p, min_p))
    tail = tuple(as_array(a) for a in out)
    work = _WORK * len(logits) * vocab_size
    for_ranges(lambda a, b: cpu_support.support(*head, vocab_size, *tail, a, b), len(logits), work)
    _record("support")
    return out


@support.register_fake
def _(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows), logits.new_empty(rows, dtype=torch.int64)
