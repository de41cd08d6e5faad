"""Operators on a GPU for a caller that no compiler watches: kernels launched directly, gradients by a plain function.

Same kernels, hence the same bits as the opaque ops, whose way through the dispatcher takes longer than the launches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_attn import gpu, gpu_backward, gpu_rotary, ops, ops_backward
from rl_attn.metadata import Batch
from rl_contract import ContractError

Forward = Callable[[Tensor, Tensor, Tensor, Batch], tuple[Tensor, Tensor]]


def _unseen(*tensors: Tensor) -> bool:
    """Whether a backward may launch directly; one that would have to be differentiated is the ops' to refuse or do."""
    return not torch.is_grad_enabled() and gpu.direct(*tensors)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(positions, cos, sin)
        ctx.set_materialize_grads(False)
        return gpu_rotary.rotary(q, k, positions, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tables = ctx.saved_tensors
        dq, dk = grads
        first = dk if dq is None else dq
        if first is None:
            return None, None, None, None, None
        # one that nobody asks for has no heads
        both = (first[:, :0] if dq is None else dq, first[:, :0] if dk is None else dk)
        back: Any = gpu_rotary.rotary if _unseen(*both) else ops.rotary
        found_q, found_k = back(*both, *tables, True)
        return None if dq is None else found_q, None if dk is None else found_k, None, None, None


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``ops.rotary`` forwards."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _Rotation.apply(q, k, positions, cos, sin)  # type: ignore[no-any-return]
    return gpu_rotary.rotary(q, k, positions, cos, sin, False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, run: Forward
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = run(q, k, v, batch)
        # what says where sequences begin is saved too, so that nobody changes it until the backward
        ctx.save_for_backward(q, k, v, out, lse, batch.cu_q, batch.cu_k, batch.positions)
        ctx.batch, ctx.scale = batch, scale
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None, None
        found = ops_backward.gradients(
            gpu_backward if _unseen(grad) else ops_backward,
            ctx,
            grad,
            lambda *_: ctx.batch.positions_of_keys(),
        )
        return *found, None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, run: Forward) -> tuple[Tensor, Tensor]:
    """``run(q, k, v, batch)``, out and lse without gradient; out differentiable in q, k and v."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, batch, scale, run)  # type: ignore[no-any-return]
    return run(q, k, v, batch)


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """``ops.write``; the caches count the change."""
    gpu_rotary.write(k_cache, v_cache, k, v, slots)
    count_writes(k_cache, v_cache)


def count_writes(*tensors: Tensor) -> None:
    """Tell autograd of launches that have written to these, as an operator would."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def refuse_gradients(where: str, *tensors: Tensor) -> None:
    """Raise ContractError where a launch would lose a gradient that somebody waits for, as an operator does."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ContractError(
            f"{where} got a tensor that requires grad, and has no gradient; supported: under torch.no_grad(), or "
            "attention_packed"
        )
