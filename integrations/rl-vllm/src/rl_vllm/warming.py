"""Kernels compiled while an engine starts, so that none is at a request.

vLLM warms up and captures what it can foresee: whole forward passes at its own sizes. Which of our kernels a step needs
is decided by more: how many queries each request has, for how many rows tokens are drawn, who asks for which
log-probability. The calls here go through the same functions as a step, on zeros. They leave no request behind, and
write no key and no value (every slot is padding), but for two short requests of vLLM's own in pages that are free; the
worker forgets their launches.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_logprob.draw import new_packed
from rl_vllm.attention import StrictAttentionImpl, StrictAttentionMetadata
from rl_vllm.gpu_sampling import Draws, Scored

# queries up to which kernels of attention tell requests apart, at most, whatever the heads
ROOM = 64
# requests up to which kernels do not tell their number
TOGETHER = 16
# rows of prompt log-probabilities; vLLM asks for up to twice as many at once, whose logits may be memory nobody needs
PROMPT_ROWS = 512


def warm(worker: Any) -> None:
    """Run everything below on a strict GPU worker whose model is captured. Raises what a step would raise."""
    runner, config = worker.model_runner, worker.vllm_config
    scheduler = config.scheduler_config
    v2 = bool(getattr(worker, "use_v2_model_runner", False))
    # vLLM's warm-up has drawn from empty buffers
    torch.cuda.synchronize()
    worker._draws.forget()
    with _unwatched(), torch.inference_mode():
        for size in forward_sizes(config):
            runner._dummy_run(size, skip_eplb=True)
        if v2 and scheduler.max_num_seqs > 1 and scheduler.max_num_batched_tokens > 2:
            # a step of one request, and one of a decode beside a prompt: what prepares and finishes a step
            from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

            run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, 3)
        layers = config.compilation_config.static_forward_context
        layer = next((x for x in layers.values() if isinstance(getattr(x, "impl", None), StrictAttentionImpl)), None)
        if layer is not None and layer.impl.strict.profile.settings.attention == "segments":
            longest = min(config.model_config.max_model_len, scheduler.max_num_batched_tokens)
            shapes = batches(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, longest)
            attention(layer, table_of(runner, v2), shapes)
        # what attention has left in the allocator's cache is not kept from later steps
        torch.cuda.empty_cache()
        model, device = config.model_config, worker._draws.device
        hidden = torch.zeros((1, model.get_hidden_size()), dtype=model.dtype, device=device)
        score(
            runner.model.compute_logits, hidden, worker._draws, scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        )
        sampling = getattr(worker, "_sampling", None)
        if sampling is not None:
            for rows in row_counts(scheduler.max_num_seqs):
                sampling.warm(rows)
    torch.cuda.synchronize()
    # as vLLM has done with what it holds for good
    gc.collect()
    gc.freeze()


@contextmanager
def _unwatched() -> Iterator[None]:
    """vLLM, which believes that it is warm, reports kernels compiled from then on; it is not to report these."""
    from triton import knobs

    hook = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = hook


def forward_sizes(config: Any) -> list[int]:
    """Numbers of tokens between the largest captured and the most of a step, which vLLM has run.

    Powers of two and the numbers before them: Triton compiles a kernel for multiples of 16 and once more for others.
    None at which a request of vLLM's dummy batch is longer than its block table has room for.
    """
    compilation, scheduler, model = config.compilation_config, config.scheduler_config, config.model_config
    graphs = not model.enforce_eager and bool(compilation.cudagraph_mode)
    captured = max(compilation.cudagraph_capture_sizes or (), default=0) if graphs else 0
    most = scheduler.max_num_batched_tokens
    sizes = sorted({size for power in _powers(most) for size in (power - 1, power) if captured < size < most})
    return [size for size in sizes if sum(divmod(size, min(size, scheduler.max_num_seqs))) <= model.max_model_len]


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def batches(most_requests: int, most_tokens: int, longest: int) -> list[list[int]]:
    """Queries of each request, in batches of every kind that launches of attention tell apart.

    They differ by the number of requests, in powers of two; by whether the longest has one query, few or many; and by
    how many a request has on the average. Requests without a query stand for others: no kernel looks at them.
    """
    found = []
    # the fewest requests of each power of two, which may have the most queries
    counts = {1, 2, TOGETHER, most_requests, *(n + 1 for n in _powers(most_requests) if n >= TOGETHER)}
    for requests in sorted(n for n in counts if n <= most_requests):
        for rows in _powers(min(ROOM, longest)):
            found += [[rows] + [0] * (requests - 1), [rows] * requests]
        # more than few on the average
        whole, rest = divmod(min(ROOM * requests + 1, most_tokens, longest * requests), longest)
        lengths = [longest] * whole + [rest] * (rest > 0)
        found.append(lengths + [0] * (requests - len(lengths)))
    # just more than as many as kernels of few take, on the average: a share of their room, by heads of a group
    requests = min(TOGETHER, most_requests)
    found += [[1] * (requests - 1) + [requests * few + 1 - requests + 1] for few in {ROOM // n for n in range(1, ROOM)}]
    return [lengths for lengths in found if sum(lengths) <= most_tokens and max(lengths) <= longest]


def table_of(runner: Any, v2: bool) -> Tensor:
    """The block table [requests, blocks] that a step's is a part of."""
    if v2:
        table: Tensor = runner.block_tables.input_block_tables[0]
        return table
    table = runner.input_batch.block_table[0].get_device_tensor(runner.max_num_reqs)
    return table


def attention(layer: Any, table: Tensor, shapes: list[list[int]]) -> int:
    """Serve a batch of every shape by one layer's attention, which is every layer's; returns how many were served.

    A batch is left out whose partial results, one for each query and segment, might take a quarter of the free memory.
    """
    impl, kv_cache, device = layer.impl, layer.kv_cache, table.device
    heads, kv_heads, head_dim = impl.num_heads, impl.num_kv_heads, impl.head_size
    cache = impl._cache(kv_cache)
    segments = -(-table.shape[1] * cache.block_size // impl.strict.profile.settings.segment)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 40
    # as wide as a step's, whose width decides about kernels too; page 0 is nobody's
    pages = torch.zeros_like(table)
    served = 0
    for lengths in shapes:
        T, requests = sum(lengths), len(lengths)
        if 16 * T * segments * heads * (head_dim + 2) > free or requests > len(table):
            continue
        rows = torch.zeros((T, (heads + 2 * kv_heads) * head_dim), dtype=kv_cache.dtype, device=device)
        parts = rows.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
        q, k, v = (x.view(T, -1, head_dim) for x in parts)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.zeros(requests + 1, dtype=torch.int32)
        torch.cumsum(seq_lens, 0, out=starts[1:])
        slots = torch.full((T,), -1, dtype=torch.int64, device=device)
        metadata = StrictAttentionMetadata(
            num_actual_tokens=T, max_query_len=max(lengths), query_start_loc=starts.to(device),
            seq_lens=seq_lens.to(device), block_table=pages[:requests], slot_mapping=slots,
            positions=torch.zeros_like(slots), min_query_len=min(lengths),
        )  # fmt: skip
        if getattr(impl, "before", None) is None:
            q, k = q.contiguous(), k.contiguous()
            impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
        impl.forward(
            layer, q, k, v, kv_cache, metadata, torch.empty((T, heads, head_dim), dtype=q.dtype, device=device)
        )
        served += 1
    return served


def row_counts(most: int) -> list[int]:
    """Powers of two and the numbers before them, the largest first, whose memory the others take."""
    return sorted({n for power in (*_powers(most), most) for n in (power, power - 1) if n}, reverse=True)


def score(compute_logits: Any, hidden: Tensor, draws: Draws, most_requests: int, most_tokens: int) -> None:
    """Head, draw, and log-probabilities of the drawn token, of prompt tokens and of the most likely ones.

    Args:
        compute_logits: the model's, [T, H] -> fp32 [T, >= V]; ranks that share a head call it equally often.
        hidden: [1, H], finite.
        draws: the sampler's.
        most_requests, most_tokens: of the largest step.
    """
    most_prompts = min(PROMPT_ROWS, most_tokens)
    for rows in row_counts(max(most_requests, most_prompts)):
        logits = compute_logits(hidden.repeat(rows, 1))
        # where it is gathered on another rank
        if logits is None:
            continue
        seeds, positions, kinds, ids = torch.zeros((4, rows), dtype=torch.int64, device=logits.device)
        warm = torch.full((rows,), 0.5, dtype=torch.float32, device=logits.device)
        if rows <= most_prompts:
            draws.top(Scored(logits, 1.0), 0, ids)
        if rows <= most_requests:
            draws.scored(logits, seeds, positions, warm, kinds, new_packed(rows, logits.device))
            for greedy in (True, False):
                draws.draw(logits, seeds, positions, warm, greedy)
            draws.top(Scored(logits, warm), 1, ids)
