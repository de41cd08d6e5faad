"""The head on a GPU: statistics and gradients of a shard in bounded memory. Nothing here looks at a device value.

Order and rounding are those of ``triton_head`` and ``triton_scores``. Whether logits stay in registers or lie in memory
for a chunk of ids, and how many tokens go through at once, never shows in the bits.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

import rl_gemm
import rl_gemm.ops
from rl_contract import ContractError, Launch, MissingSupport, record_launch
from rl_logprob import plans
from rl_logprob.contract import GPU_ARCHS, GPU_GRAD_BLOCK, GPU_TILE
from rl_logprob.support import Support, SupportIds, key_of

# fp32 logits in memory at once, where they are: 128 MiB
CHUNK_ELEMENTS = 1 << 25
# bf16 gradients of logits in memory at once: 64 MiB, or one block of ids of one block of tokens
GRADIENT_ELEMENTS = 1 << 25
# up to so many tokens many blocks of ids go through one launch instead of a library call each, which a host issues late
FEW_TOKENS = 768
# bytes that gradients of logits and chains of hidden's gradient take there
FEW_BYTES = 160 << 20
# below so many tokens computing logits again is quicker than keeping them
KEEP_FROM_TOKENS = 4096
# bytes of statistics in memory at once: they are merged into a row's state for as many tokens at a time as fit
STATS_BYTES = 192 << 20


@cache
def kernels() -> Any:
    """The Triton modules, as attributes ``head``, ``few``, ``scores``, ``sample``, ``support``.

    Raises:
        MissingSupport: Triton is not installed.
    """
    try:
        from rl_logprob import triton_few, triton_head, triton_sample, triton_scores, triton_support
    except ImportError as error:
        raise MissingSupport(
            f"rl_logprob on a GPU needs Triton ({error}); install a PyTorch build with Triton"
        ) from error

    class Kernels:
        head, few, scores, sample, support = triton_head, triton_few, triton_scores, triton_sample, triton_support

    return Kernels


@cache
def arch(device_index: int) -> str:
    """Name of the device's contracts: ``sm90``, ``gfx942``, ``gfx950``.

    Raises:
        MissingSupport: any other device.
    """
    properties = torch.cuda.get_device_properties(device_index)
    hip = torch.version.hip is not None
    name = properties.gcnArchName.split(":")[0] if hip else f"sm{properties.major}{properties.minor}"
    if name not in GPU_ARCHS:
        raise MissingSupport(f"rl_logprob got a {properties.name} ({name}); supported GPUs: {GPU_ARCHS}")
    return name


@cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@cache
def _launch(kernel: str, plan: str, phase: str) -> Launch:
    return Launch("logprob", f"rl_logprob.{kernel}", plan, phase=phase)


def record(kernel: str, plan: str = "-") -> None:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
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


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _copy_engine_may(*tensors: Tensor) -> bool:
    return torch.version.hip is None and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in tensors)


def _choose(operation: str, hidden: Tensor, weight: Tensor) -> tuple[str, plans.Kernel | None]:
    own = plans.current(arch(hidden.device.index or 0))
    name = own.choose(operation, len(hidden), hidden.shape[1], _copy_engine_may(hidden, weight))
    return f"{own.arch}:{name}", own.kernels.get(name)


def _slices(length: int, step: int) -> Iterator[slice]:
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


def _limits(support: Support | None, targets: Tensor, first_id: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Threshold, last id and target, ids counted from ``first_id``; None without a key."""
    threshold, last_id = key_of(support)
    if threshold is None or last_id is None:
        return None
    return threshold, last_id - first_id, targets - first_id


def _logits(
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
    hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight)
    found = k.scores.new_stats(len(hidden), -(-real // GPU_TILE), entropy, hidden.device)
    if not found[0].numel():
        return found
    limits = _limits(support, targets, first_id)
    done = 0
    blocks = list(id_blocks(len(weight), real, leaf_rows)) if kept is not None else []
    if kept is not None and 4 * len(hidden) * real <= keep_bytes and _library_takes(hidden, real):
        # all of them at once: two launches instead of two a block, which a busy host cannot issue in time
        logits = _logits(hidden, weight[:real], first_id, support, targets)
        k.scores.tile_stats(logits, temperature, real, found, 0, limits)
        kept.update((ids.start, logits[:, ids]) for ids in blocks)
        record("triton_scores.tile_stats", "kept")
        return found
    for ids in blocks:
        keep_bytes -= 4 * len(hidden) * (ids.stop - ids.start)
        if kept is None or keep_bytes < 0:
            break
        logits = _logits(hidden, weight[ids], first_id + ids.start, support, targets)
        k.scores.tile_stats(logits, temperature, logits.shape[1], found, ids.start // GPU_TILE, limits)
        kept[ids.start] = logits
        done = ids.stop
    if done:
        record("triton_scores.tile_stats", "kept")
    if done == real:
        return found
    name, kernel = ("listed", None) if isinstance(support, SupportIds) else _choose("stats", hidden, weight)
    if kernel is not None:
        processors = _processors(hidden.device.index or 0)
        first = done // GPU_TILE
        k.head.launch(kernel, hidden, weight[done:real], temperature, first, processors, stats=found, kept=limits)
        record("triton_head.stats", name)
        return found
    for part in _slices(real - done, max(1, CHUNK_ELEMENTS // len(hidden) // 4096) * 4096):
        ids = slice(done + part.start, done + part.stop)
        logits = _logits(hidden, weight[ids], first_id + ids.start, support, targets)
        k.scores.tile_stats(logits, temperature, logits.shape[1], found, ids.start // GPU_TILE, limits)
        del logits
    record("triton_scores.tile_stats", name)
    return found


def target_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, first_id: int, real: int,
    vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """x fp32 [T] of the targets this shard holds, 0 elsewhere; with ``vocab_size`` NaN for one that is no id."""
    k = ready(hidden)
    if not len(hidden) or not real:
        return torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight)[:real]
    record("triton_head.target_logits")
    return k.head.target_logits(hidden, weight, targets, temperature, first_id, vocab_size)


def selected(x: Tensor, state: Tensor) -> Tensor:
    """x fp32 [T], state fp64 [T, 3] -> logp fp32 [T]."""
    if not len(x):
        return torch.empty_like(x)
    record("triton_scores.selected")
    return ready(x).scores.selected(x, state)


def grad_logits(
    hidden: Tensor, weight: Tensor, temperature: Tensor, state: Tensor, targets: Tensor, dlogp: Tensor,
    dentropy: Tensor,
    first_id: int, logits: Tensor | None = None, support: Support | None = None, *, apart: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Gradient by the logits of hidden @ weight.T, ids from ``first_id``, rounded once to bf16: [T, ids of the block]
    for every block of GPU_GRAD_BLOCK ids, or with ``apart`` False one [T, N].

    ``logits``: the product where the forward kept it, of one block at most.
    """
    k = ready(hidden)
    hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight)
    tokens, n = len(hidden), len(weight)
    blocks = list(_slices(n, GPU_GRAD_BLOCK))
    if apart and len(blocks) > 1:
        # every block lies alone, whole blocks of rows long
        shape: tuple[int, ...] = (len(blocks), -(-tokens // plans.MAX_BLOCK_M) * plans.MAX_BLOCK_M, GPU_GRAD_BLOCK)
        out = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        parts = [out[i, :tokens, : b.stop - b.start] for i, b in enumerate(blocks)]
    else:
        # rows start at multiples of 16 bytes, as the copy engine asks
        out = torch.empty((tokens, -(-n // 8) * 8), dtype=hidden.dtype, device=hidden.device)[:, :n]
        parts = [out]
    if not out.numel():
        return parts
    limits = _limits(support, targets, 0)
    if logits is not None:
        name, kernel = "kept", None
    elif isinstance(support, SupportIds):
        name, kernel = "listed", None
    else:
        name, kernel = _choose("gradient", hidden, weight)
    if kernel is not None:
        given = {"state": state, "targets": targets, "dlogp": dlogp, "dentropy": dentropy}
        processors = _processors(hidden.device.index or 0)
        k.head.launch(kernel, hidden, weight, temperature, first_id, processors, gradient=given, out=out, kept=limits)
        record("triton_head.gradient", name)
        return parts
    if logits is None:
        logits = _logits(hidden, weight, first_id, support, targets)
    outer = None if limits is None else limits[:2]
    k.scores.grad_logits(logits, temperature, state, targets, dlogp, dentropy, first_id, len(weight), out, outer)
    record("triton_scores.grad_logits", name)
    return parts


def backward(
    hidden: Tensor, weight: Tensor, temperature: Tensor, state: Tensor, targets: Tensor, dlogp: Tensor,
    dentropy: Tensor,
    *, first_id: int, real: int, leaf_rows: int, needs_hidden: bool, weight_grad: Tensor | None, add: bool,
    kept: Kept, support: Support | None = None,
) -> Tensor | None:  # fmt: skip
    """Gradients of one shard for at most GPU_TOKEN_BLOCK tokens: the root fp32 [T, H] of hidden's tree, or None.

    Hidden: per leaf of ``leaf_rows`` ids, blocks of GPU_GRAD_BLOCK ids, each a chain, folded left; leaves by the
    balanced tree. weight_grad [N, H]: with ``add`` fp32, to which the chain over the tokens is added; else overwritten,
    rounded once to its type.
    """
    pending: list[Tensor] = []
    hidden = _rows_contiguous(hidden)
    fused = not kept and not isinstance(support, SupportIds) and _choose("gradient", hidden, weight)[1] is not None
    few = fused and 0 < len(hidden) <= FEW_TOKENS and (weight_grad is None or weight_grad.is_contiguous())
    # how many blocks of ids go through at once: rows of the weight's gradient are independent
    group = 1
    if fused and not few:
        padded = -(-max(len(hidden), 1) // plans.MAX_BLOCK_M) * plans.MAX_BLOCK_M
        group = max(1, GRADIENT_ELEMENTS // (GPU_GRAD_BLOCK * padded))
    for leaf, begin in enumerate(range(0, len(weight), leaf_rows)):
        end = min(begin + leaf_rows, real)
        root = None
        if needs_hidden:
            # a leaf of padding only is +0
            new = torch.zeros if begin >= end else torch.empty
            root = new(hidden.shape, dtype=torch.float32, device=hidden.device)
        if few and begin < end:

            def gradient(part: Tensor, first: int) -> Tensor:
                given = (temperature, state, targets, dlogp, dentropy, first_id + first, None, support)
                return grad_logits(hidden, part, *given, apart=False)[0]

            sink = None if weight_grad is None else weight_grad[begin:end]
            _few_backward(hidden, _rows_contiguous(weight[begin:end]), begin, gradient, root, sink, add)
            end = begin
        for start in range(begin, end, group * GPU_GRAD_BLOCK):
            ids = slice(start, min(start + group * GPU_GRAD_BLOCK, end))
            dlogits = grad_logits(
                hidden, weight[ids], temperature, state, targets, dlogp, dentropy, first_id + ids.start,
                kept.pop(ids.start, None), support,
            )  # fmt: skip
            blocks = [slice(start + b.start, start + b.stop) for b in _slices(ids.stop - start, GPU_GRAD_BLOCK)]
            if root is not None:
                _add_chains([root] * len(blocks), dlogits, [weight[b] for b in blocks], "grad_input", start == begin)
            if weight_grad is not None and add:
                totals, turned = [weight_grad[b] for b in blocks], [d.t() for d in dlogits]
                _add_chains(totals, turned, [hidden] * len(blocks), "grad_weight", False)
                del turned
            elif weight_grad is not None:
                for i, b in enumerate(blocks):
                    weight_grad[b] = rl_gemm.ops.grad_weight(dlogits[i].contiguous(), hidden)
            # the next gradient takes its place
            del dlogits
        if root is not None:
            # as a binary counter carries: at most one finished sub-tree a level waits
            done = leaf + 1
            while done % 2 == 0:
                root = pending.pop().add_(root)
                done //= 2
            pending.append(root)
    return pending[0] if pending else None


def _few_backward(
    hidden: Tensor, weight: Tensor, begin: int, gradient: Callable[[Tensor, int], Tensor], root: Tensor | None,
    weight_grad: Tensor | None, add: bool,
) -> None:  # fmt: skip
    """``backward`` of one leaf's ids [N, H] for few tokens: as many blocks of ids at a time as fit in FEW_BYTES.

    ``gradient``: that of the logits, from rows of the weight and the number of the first among this shard's.
    """
    few, (tokens, h) = ready(hidden).few, hidden.shape
    blocks = -(-len(weight) // GPU_GRAD_BLOCK)
    most = max(1, FEW_BYTES // (tokens * (2 * GPU_GRAD_BLOCK + (0 if root is None else 4 * h))))
    # slices of one size, so that the last one is not short
    group = -(-blocks // -(-blocks // most))
    parts = None if root is None else torch.empty((group, tokens, h), dtype=torch.float32, device=hidden.device)
    copies, processors = _copy_engine_may(hidden, weight), _processors(hidden.device.index or 0)
    for ids in _slices(len(weight), group * GPU_GRAD_BLOCK):
        part = weight[ids]
        d = gradient(part, begin + ids.start)
        if root is not None and parts is not None:
            shape = few.hidden_shape(tokens, copies)
            few.add_hidden(d, part, root, parts, GPU_GRAD_BLOCK, ids.start == 0, processors, shape)
        if weight_grad is not None:
            few.add_weight(d, hidden, weight_grad[ids], add, processors, few.weight_shape(tokens, copies))
        record("triton_few", "tma" if copies else "pointer")
        # the next gradient takes its place
        del d


def _add_chains(totals: list[Tensor], a: list[Tensor], b: list[Tensor], operation: str, first: bool) -> None:
    """In turn: totals[i] fp32 [M, N] plus the chain a[i] [M, K] b[i] [K, N], added once in fp32; with ``first`` the
    first total only takes it.
    """
    certified = [_library_adds(*job, operation) for job in zip(totals, a, b, strict=True)]
    for library, some in groupby(range(len(a)), key=certified.__getitem__):
        if not library:
            for i in some:
                _add_chain(totals[i], a[i], b[i], operation, first and i == 0)
            continue
        from rl_gemm import vendor

        # a switch of the whole process, set for the calls and put back
        with vendor.no_split_k():
            for i in some:
                if first and i == 0:
                    torch.mm(a[i], b[i], out_dtype=torch.float32, out=totals[i])
                else:
                    torch.addmm(totals[i], a[i], b[i], out_dtype=torch.float32, out=totals[i])
        record(f"{vendor.NAME}.{operation}")


def _add_chain(total: Tensor, a: Tensor, b: Tensor, operation: str, first: bool) -> None:
    # rows of the product are independent, so a slice of them at a time bounds the memory
    step = max(128, (1 << 23) // total.shape[1])
    for rows in _slices(len(total), step):
        if operation == "grad_input":
            part = rl_gemm.ops.grad_input(a[rows], b)
        else:
            part = rl_gemm.ops.grad_weight(a.t()[:, rows], b)
        if first:
            total[rows] = part
        else:
            total[rows].add_(part)


def _library_adds(total: Tensor, a: Tensor, b: Tensor, operation: str) -> bool:
    """Whether rl-gemm holds a certificate of the library for this product, which then also may add it to ``total``."""
    if torch.version.hip is not None or not total.is_contiguous():
        return False
    if not all(x.is_contiguous() or x.t().is_contiguous() for x in (a, b)):
        return False
    from rl_gemm import vendor

    if not vendor.aligned(total, a, b):
        return False
    key, rows = (b.shape, len(a)) if operation == "grad_input" else ((len(a), b.shape[1]), len(b))
    return _certified(a.device.index or 0, operation, key[0], key[1], rows)


def _library_takes(hidden: Tensor, ids: int) -> bool:
    """Whether the library is certified for the logits of so many ids in one call."""
    if not hidden.is_cuda or torch.version.hip is not None:
        return False
    return _certified(hidden.device.index or 0, "forward", ids, hidden.shape[1], len(hidden))


@cache
def _certified(device_index: int, operation: str, n: int, k: int, rows: int) -> bool:
    from rl_gemm import plans as gemm_plans
    from rl_gemm import vendor

    own = gemm_plans.current(arch(device_index))
    return own.certified(vendor.environment(device_index), operation, n, k, rows, False)
