"""The head on a GPU: statistics of a shard in bounded memory. Nothing here looks at a device value.

Order and rounding are those of ``triton_head`` and ``triton_scores``. Whether logits stay in registers or lie in memory
for a chunk of ids, and how many tokens go through at once, never shows in the bits.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

import rl_gemm
from rl_contract import ContractError, Launch, record_launch
from rl_contract.gpu import arch_of, needs_triton, processors_of
from rl_contract.triton_launch import keep
from rl_logprob import plans
from rl_logprob.contract import GPU_ARCHS, GPU_GRAD_BLOCK, GPU_TILE
from rl_logprob.support import Support, SupportIds, key_of

# fp32 logits in memory at once, where they are: 128 MiB
CHUNK_ELEMENTS = 1 << 25
# below so many tokens computing logits again is quicker than keeping them
KEEP_FROM_TOKENS = 4096
# bytes of statistics in memory at once: they are merged into a row's state for as many tokens at a time as fit
STATS_BYTES = 192 << 20


@cache
def kernels() -> Any:
    """The Triton modules, as attributes ``head``, ``few``, ``scores``, ``ranks``, ``sample``, ``draw``,
    ``draw_ranks``, ``support``.

    Raises:
        MissingSupport: Triton is not installed.
    """
    with needs_triton("rl_logprob"):
        from rl_logprob import (
            triton_draw,
            triton_draw_ranks,
            triton_few,
            triton_head,
            triton_ranks,
            triton_sample,
            triton_scores,
            triton_support,
        )

    class Kernels:
        head, few, scores, ranks = triton_head, triton_few, triton_scores, triton_ranks
        sample, draw, draw_ranks, support = triton_sample, triton_draw, triton_draw_ranks, triton_support

    return Kernels


@cache
def arch(device_index: int) -> str:
    """Name of the device's contracts: ``sm90``, ``gfx942``, ``gfx950``.

    Raises:
        MissingSupport: any other device.
    """
    return arch_of(device_index, GPU_ARCHS, "rl_logprob")


@cache
def _launch(kernel: str, plan: str, phase: str) -> Launch:
    return Launch("logprob", f"rl_logprob.{kernel}", plan, phase=phase)


@cache
def _cuda() -> bool:
    return torch.cuda.is_available()


def record(kernel: str, plan: str = "-") -> None:
    capturing = _cuda() and torch.cuda.is_current_stream_capturing()
    record_launch(_launch(kernel, plan, "capture" if capturing else "eager"))


def ready(x: Tensor) -> Any:
    """The kernels, for a device that has a contract."""
    arch(x.device.index or 0)
    return kernels()


def check(hidden: Tensor, weight: Tensor, vocab_tile: int) -> None:
    """What the head asks beyond ``linear_logprob``'s own checks.

    Raises:
        ContractError: a type other than bf16, tensors on two devices, or a vocabulary tile that does not hold whole
        tiles. MissingSupport: a device without kernels.
    """
    name = arch(hidden.device.index or 0)
    if hidden.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ContractError(
            f"linear_logprob on {name} got {hidden.dtype} and {weight.dtype}; supported: bfloat16; convert the model"
        )
    if hidden.device != weight.device:
        raise ContractError(f"linear_logprob got tensors on {hidden.device} and {weight.device}; needs one device")
    check_tile(vocab_tile)


def check_tile(vocab_tile: int) -> None:
    if vocab_tile % GPU_TILE:
        raise ContractError(
            f"vocab_tile={vocab_tile} on a GPU; supported: multiples of {GPU_TILE}, whose tiles are summed; use 512"
        )


def room(tokens: int) -> int:
    """Bytes for logits that wait for the backward: half of what the device and PyTorch's own pool have free."""
    if tokens < KEEP_FROM_TOKENS:
        return 0
    free, _ = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // 2


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def copy_engine_may(*tensors: Tensor) -> bool:
    return torch.version.hip is None and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in tensors)


def choose(operation: str, hidden: Tensor, weight: Tensor) -> tuple[str, plans.Kernel | None]:
    own = plans.current(arch(hidden.device.index or 0))
    name = own.choose(operation, len(hidden), hidden.shape[1], copy_engine_may(hidden, weight))
    return f"{own.arch}:{name}", own.kernels.get(name)


def slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))


def stats_rows(tiles: int, entropy: bool) -> int:
    """How many tokens' statistics fit in the room for them."""
    return max(128, STATS_BYTES // (tiles * (20 if entropy else 12)) // 128 * 128)


Kept = dict[int, Tensor]


def id_blocks(rows: int, real: int, leaf_rows: int) -> Iterator[slice]:
    """Blocks of ids the gradient of hidden goes through: GPU_GRAD_BLOCK ids from the start of each leaf, padding left
    out.
    """
    for begin in range(0, rows, leaf_rows):
        end = min(begin + leaf_rows, real)
        for part in range(begin, end, GPU_GRAD_BLOCK):
            yield slice(part, min(part + GPU_GRAD_BLOCK, end))


def limits_of(support: Support | None, targets: Tensor, first_id: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Threshold, last id and target, ids counted from ``first_id``; None without a key."""
    threshold, last_id = key_of(support)
    if threshold is None or last_id is None:
        return None
    return threshold, last_id - first_id, targets - first_id


def logits_of(
    hidden: Tensor, weight: Tensor, first_id: int, support: Support | None, targets: Tensor | None
) -> Tensor:  # fmt: skip
    """fp32 [T, C] of ids from ``first_id``; -inf outside a support that lists its ids."""
    logits = rl_gemm.linear(hidden, weight, out_dtype=torch.float32)
    return support.mask_(logits, first_id, targets) if isinstance(support, SupportIds) else logits


def stats(
    hidden: Tensor, weight: Tensor, temperature: Tensor, real: int, entropy: bool, *, first_id: int,
    targets: Tensor, support: Support | None = None, kept: Kept | None = None, keep_bytes: int = 0, leaf_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """m fp32, s and u int64 [tiles, T] of the first ``real`` ids of this shard, whose own first id is ``first_id``;
    whole tiles of padding are left out.

    ``kept`` receives the fp32 logits of as many blocks of ids, by first id, as ``keep_bytes`` hold.
    """
    k = ready(hidden)
    hidden, weight = rows_contiguous(hidden), rows_contiguous(weight)
    found = k.scores.new_stats(len(hidden), -(-real // GPU_TILE), entropy, hidden.device)
    if not found[0].numel():
        return found
    limits = limits_of(support, targets, first_id)
    done = 0
    blocks = list(id_blocks(len(weight), real, leaf_rows)) if kept is not None else []
    if kept is not None and 4 * len(hidden) * real <= keep_bytes and _library_takes(hidden, real):
        # all of them at once: two launches instead of two a block, which a busy host cannot issue in time
        logits = logits_of(hidden, weight[:real], first_id, support, targets)
        k.scores.tile_stats(logits, temperature, real, found, 0, limits)
        kept.update((ids.start, logits[:, ids]) for ids in blocks)
        record("triton_scores.tile_stats", "kept")
        return found
    for ids in blocks:
        keep_bytes -= 4 * len(hidden) * (ids.stop - ids.start)
        if kept is None or keep_bytes < 0:
            break
        logits = logits_of(hidden, weight[ids], first_id + ids.start, support, targets)
        k.scores.tile_stats(logits, temperature, logits.shape[1], found, ids.start // GPU_TILE, limits)
        kept[ids.start] = logits
        done = ids.stop
    if done:
        record("triton_scores.tile_stats", "kept")
    if done == real:
        return found
    name, kernel = ("listed", None) if isinstance(support, SupportIds) else choose("stats", hidden, weight)
    if kernel is not None:
        processors = processors_of(hidden.device.index or 0)
        first = done // GPU_TILE
        part = weight if done == 0 and real == weight.shape[0] else weight[done:real]
        k.head.launch(kernel, hidden, part, temperature, first, processors, stats=found, kept=limits)
        record("triton_head.stats", name)
        return found
    for chunk in slices(real - done, max(1, CHUNK_ELEMENTS // len(hidden) // 4096) * 4096):
        ids = slice(done + chunk.start, done + chunk.stop)
        logits = logits_of(hidden, weight[ids], first_id + ids.start, support, targets)
        k.scores.tile_stats(logits, temperature, logits.shape[1], found, ids.start // GPU_TILE, limits)
        del logits
    record("triton_scores.tile_stats", name)
    return found


def target_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, first_id: int, real: int, out: Tensor,
    vocab_size: int | None = None,
) -> None:  # fmt: skip
    """x of the targets this shard holds into out fp32 [T], 0 elsewhere; with ``vocab_size`` NaN where one is no id."""
    k = ready(hidden)
    if not hidden.shape[0] or not real:
        out.zero_()
        return
    record("triton_head.target_logits")
    hidden, weight = rows_contiguous(hidden), rows_contiguous(weight)
    k.head.target_logits(hidden, weight, real, targets, temperature, first_id, out, vocab_size)


def selected(x: Tensor, state: Tensor) -> Tensor:
    """x fp32 [T], state fp64 [T, 3] -> logp fp32 [T]."""
    if not len(x):
        return torch.empty_like(x)
    record("triton_scores.selected")
    return ready(x).scores.selected(x, state)


def _library_takes(hidden: Tensor, ids: int) -> bool:
    """Whether the library is certified for the logits of so many ids in one call."""
    if not hidden.is_cuda or torch.version.hip is not None:
        return False
    return certified(hidden.device.index or 0, "forward", ids, hidden.shape[1], len(hidden))


# by device and product: the plans that were asked, and what they say
_certified: dict[Any, tuple[Any, bool]] = {}


def certified(device_index: int, operation: str, n: int, k: int, rows: int) -> bool:
    """Whether the plans of rl-gemm in force hold a certificate of the library for this product."""
    from rl_gemm import plans as gemm_plans
    from rl_gemm import vendor

    own = gemm_plans.current(arch(device_index))
    key = (device_index, operation, n, k, rows)
    found = _certified.get(key)
    if found is None or found[0] is not own:
        says = own.certified(vendor.environment(device_index), operation, n, k, rows, False)
        found = keep(_certified, key, (own, says))
    return found[1]
