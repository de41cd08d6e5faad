"""Gradients of the head on a GPU in bounded memory. Nothing here looks at a device value.

Order and rounding are those of ``triton_head``, ``triton_scores`` and ``triton_few``. How many blocks of ids go through
at once, and whether a kernel or a certified library call adds a chain, never shows in the bits.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

import rl_gemm
import rl_gemm.ops
from rl_logprob import gpu, plans
from rl_logprob.contract import GPU_GRAD_BLOCK
from rl_logprob.support import Support, SupportIds

# bf16 gradients of logits in memory at once: 64 MiB, or one block of ids of one block of tokens
GRADIENT_ELEMENTS = 1 << 25
# up to so many tokens many blocks of ids go through one launch instead of a library call each, which a host issues late
FEW_TOKENS = 768
# bytes that gradients of logits and chains of hidden's gradient take there
FEW_BYTES = 160 << 20


def grad_logits(
    hidden: Tensor, weight: Tensor, temperature: Tensor, state: Tensor, targets: Tensor, dlogp: Tensor,
    dentropy: Tensor,
    first_id: int, logits: Tensor | None = None, support: Support | None = None, *, apart: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Gradient by the logits of hidden @ weight.T, ids from ``first_id``, rounded once to bf16: [T, ids of the block]
    for every block of GPU_GRAD_BLOCK ids, or with ``apart`` False one [T, N].

    ``logits``: the product where the forward kept it, of one block at most.
    """
    k = gpu.ready(hidden)
    hidden, weight = gpu.rows_contiguous(hidden), gpu.rows_contiguous(weight)
    tokens, n = len(hidden), len(weight)
    if apart and n > GPU_GRAD_BLOCK:
        blocks = list(gpu.slices(n, GPU_GRAD_BLOCK))
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
    limits = gpu.limits_of(support, targets, 0)
    if logits is not None:
        name, kernel = "kept", None
    elif isinstance(support, SupportIds):
        name, kernel = "listed", None
    else:
        name, kernel = gpu.choose("gradient", hidden, weight)
    if kernel is not None:
        given = {"state": state, "targets": targets, "dlogp": dlogp, "dentropy": dentropy}
        processors = gpu.processors_of(hidden.device.index or 0)
        k.head.launch(kernel, hidden, weight, temperature, first_id, processors, gradient=given, out=out, kept=limits)
        gpu.record("triton_head.gradient", name)
        return parts
    if logits is None:
        logits = gpu.logits_of(hidden, weight, first_id, support, targets)
    outer = None if limits is None else limits[:2]
    k.scores.grad_logits(logits, temperature, state, targets, dlogp, dentropy, first_id, len(weight), out, outer)
    gpu.record("triton_scores.grad_logits", name)
    return parts


def backward(
    hidden: Tensor, weight: Tensor, temperature: Tensor, state: Tensor, targets: Tensor, dlogp: Tensor,
    dentropy: Tensor,
    *, first_id: int, real: int, leaf_rows: int, needs_hidden: bool, weight_grad: Tensor | None, add: bool,
    kept: gpu.Kept, support: Support | None = None,
) -> Tensor | None:  # fmt: skip
    """Gradients of one shard for at most GPU_TOKEN_BLOCK tokens: the root fp32 [T, H] of hidden's tree, or None.

    Hidden: per leaf of ``leaf_rows`` ids, blocks of GPU_GRAD_BLOCK ids, each a chain, folded left; leaves by the
    balanced tree. weight_grad [N, H]: with ``add`` fp32, to which the chain over the tokens is added; else overwritten,
    rounded once to its type.
    """
    pending: list[Tensor] = []
    hidden = gpu.rows_contiguous(hidden)
    fused = not kept and not isinstance(support, SupportIds) and gpu.choose("gradient", hidden, weight)[1] is not None
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
            _few_backward(hidden, gpu.rows_contiguous(weight[begin:end]), begin, gradient, root, sink, add)
            end = begin
        for start in range(begin, end, group * GPU_GRAD_BLOCK):
            ids = slice(start, min(start + group * GPU_GRAD_BLOCK, end))
            dlogits = grad_logits(
                hidden, weight[ids], temperature, state, targets, dlogp, dentropy, first_id + ids.start,
                kept.pop(ids.start, None), support,
            )  # fmt: skip
            blocks = [slice(start + b.start, start + b.stop) for b in gpu.slices(ids.stop - start, GPU_GRAD_BLOCK)]
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
    few, (tokens, h) = gpu.ready(hidden).few, hidden.shape
    blocks = -(-len(weight) // GPU_GRAD_BLOCK)
    most = max(1, FEW_BYTES // (tokens * (2 * GPU_GRAD_BLOCK + (0 if root is None else 4 * h))))
    # slices of one size, so that the last one is not short
    group = -(-blocks // -(-blocks // most))
    parts = None if root is None else torch.empty((group, tokens, h), dtype=torch.float32, device=hidden.device)
    copies, processors = gpu.copy_engine_may(hidden, weight), gpu.processors_of(hidden.device.index or 0)
    for ids in gpu.slices(len(weight), group * GPU_GRAD_BLOCK):
        part = weight[ids]
        d = gradient(part, begin + ids.start)
        if root is not None and parts is not None:
            shape = few.hidden_shape(tokens, copies)
            few.add_hidden(d, part, root, parts, GPU_GRAD_BLOCK, ids.start == 0, processors, shape)
        if weight_grad is not None:
            few.add_weight(d, hidden, weight_grad[ids], add, processors, few.weight_shape(tokens, copies))
        gpu.record("triton_few", "tma" if copies else "pointer")
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
        gpu.record(f"{vendor.NAME}.{operation}")


def _add_chain(total: Tensor, a: Tensor, b: Tensor, operation: str, first: bool) -> None:
    # rows of the product are independent, so a slice of them at a time bounds the memory
    step = max(128, (1 << 23) // total.shape[1])
    for rows in gpu.slices(len(total), step):
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
    return gpu.certified(a.device.index or 0, operation, key[0], key[1], rows)
