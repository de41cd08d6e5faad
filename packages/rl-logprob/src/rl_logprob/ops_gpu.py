"""The ops of ``ops.py`` and ``sampling.py`` on a GPU. Statistics are held [tiles, T] and shown as [T, tiles]."""

import torch
from torch import Tensor

from rl_logprob import gpu, ops, sampling
from rl_logprob.contract import GPU_TILE


def _columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@ops.tile_stats.register_kernel("cuda")
def _tile_stats(
    logits: Tensor, temperature: Tensor, first_id: int, vocab_size: int, vocab_tile: int, entropy: bool,
    threshold: Tensor | None = None, last_id: Tensor | None = None, goal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    k = gpu.ready(logits)
    gpu.check_tile(vocab_tile)
    columns = max(0, min(logits.shape[1], vocab_size - first_id))
    m, s, u = k.scores.new_stats(len(logits), -(-columns // GPU_TILE), entropy, logits.device)
    if m.numel():
        kept = None
        if threshold is not None and last_id is not None and goal is not None:
            kept = (threshold.contiguous(), last_id - first_id, goal - first_id)
        k.scores.tile_stats(_columns(logits), temperature, columns, (m, s, u), 0, kept)
    gpu.record("triton_scores.tile_stats")
    return m.t(), s.t(), u.t()


def score(
    logits: Tensor, targets: Tensor, temperature: Tensor, vocab_size: int, vocab_tile: int, entropy: bool,
    threshold: Tensor | None = None, last_id: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``tile_stats``, ``merge_tiles`` and ``selected`` for whoever is not traced: two launches, no dispatch.

    logits fp32 [T, >= vocab_size], targets int64 [T] -> logp and x fp32 [T], state fp64 [T, 3]; NaN for a target that
    is no id.
    """
    k = gpu.ready(logits)
    gpu.check_tile(vocab_tile)
    logits = _columns(logits)
    stats = k.scores.new_stats(logits.shape[0], -(-vocab_size // GPU_TILE), entropy, logits.device)
    kept = None if threshold is None or last_id is None else (threshold, last_id, targets)
    if logits.shape[0]:
        k.scores.tile_stats(logits, temperature, vocab_size, stats, 0, kept)
    gpu.record("triton_scores.tile_stats")
    gpu.record("triton_scores.score")
    return k.scores.score_logits(stats, logits, targets, temperature, vocab_size)


@ops.merge_tiles.register_kernel("cuda")
def _merge_tiles(m: Tensor, s: Tensor, u: Tensor) -> Tensor:
    k = gpu.ready(m)
    gpu.record("triton_scores.merge")
    if not len(m):
        return torch.empty((0, 3), dtype=torch.float64, device=m.device)
    # what comes from tile_stats is contiguous the other way round already
    return k.scores.merge(m.t().contiguous(), s.t().contiguous(), u.t().contiguous())


@ops.selected.register_kernel("cuda")
def _selected(x: Tensor, state: Tensor) -> Tensor:
    k = gpu.ready(x)
    gpu.record("triton_scores.selected")
    return k.scores.selected(x.contiguous(), state.contiguous()) if len(x) else torch.empty_like(x)


@ops.full.register_kernel("cuda")
def _full(logits: Tensor, temperature: Tensor, state: Tensor, vocab_size: int) -> Tensor:
    k = gpu.ready(logits)
    gpu.record("triton_scores.full")
    if not len(logits):
        return logits.new_empty((0, vocab_size))
    return k.scores.full(_columns(logits), temperature, state, vocab_size)


@ops.grad_logits.register_kernel("cuda")
def _grad_logits(
    logits: Tensor, temperature: Tensor, state: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor, first_id: int,
    vocab_size: int, threshold: Tensor | None = None, last_id: Tensor | None = None,
) -> Tensor:  # fmt: skip
    k = gpu.ready(logits)
    gpu.record("triton_scores.grad_logits")
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out.numel():
        real = max(0, min(logits.shape[1], vocab_size - first_id))
        kept = None if threshold is None or last_id is None else (threshold.contiguous(), last_id.contiguous())
        k.scores.grad_logits(_columns(logits), temperature, state, targets, dlogp, dentropy, first_id, real, out, kept)
    return out


@sampling.sample_op.register_kernel("cuda")
def _sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, vocab_size: int, greedy: bool,
    threshold: Tensor | None = None, last_id: Tensor | None = None,
) -> Tensor:  # fmt: skip
    k = gpu.ready(logits)
    gpu.record("triton_sample.gumbel_sample", "greedy" if greedy else "gumbel")
    if not len(logits):
        return seeds.new_empty(0)
    kept = None if threshold is None or last_id is None else (threshold, last_id)
    return k.sample.sample(_columns(logits), seeds, positions, temperature, vocab_size, greedy, kept)


@ops.support.register_kernel("cuda")
def _support(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    k = gpu.ready(logits)
    gpu.record("triton_support.support")
    if not len(logits):
        return logits.new_empty(0), top_k.new_empty(0)
    return k.support.support(_columns(logits), temperature, top_k, top_p, min_p, vocab_size)
