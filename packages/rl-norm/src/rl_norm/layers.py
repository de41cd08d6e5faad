"""The public RMSNorm, with its gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_contract import Communicator, ContractError, TokenShards
from rl_contract.checks import require_tensor
from rl_contract.communicator import refuse
from rl_contract.gradients import add_onto, apart, main_grad_of
from rl_contract.tokens import check_peers
from rl_norm import ops


def _head_leaves(heads: int, leaves: int, world: int) -> int:
    """This rank's leaves of the tree over all heads: the same tree on every TP size."""
    total = heads * world
    if not isinstance(leaves, int) or isinstance(leaves, bool):
        raise ContractError(f"rms_norm got leaves={leaves!r}; supported: an integer, a power of two; convert it")
    joined = min(leaves, total & -total)
    if leaves < 1 or leaves & (leaves - 1) or joined % world:
        raise ContractError(
            f"rms_norm got leaves={leaves} for {total} heads on {world} ranks; needs a power of two, ranks dividing "
            "leaves and heads; use leaves = the larger TP size of the two engines"
        )
    return joined // world


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [M, H]
        weight: Tensor,
        residual: Tensor | None,
        eps: float,
        comm: Communicator | None,
        heads: int,
        leaves: int,
        tokens: TokenShards | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.how = comm, heads, leaves, residual is not None, tokens
        if residual is None:
            y, rstd = ops.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            return y
        y, stream, rstd = ops.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(stream, weight, rstd)
        return y, stream

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None = None) -> tuple[Tensor | None, ...]:
        try:
            stream, weight, rstd = ctx.saved_tensors
            comm, heads, leaves, added, tokens = ctx.how
            needs_x, needs_weight, needs_residual, *_ = ctx.needs_input_grad
            dx, dw = dstream, None
            if dy is not None:
                if needs_x or needs_residual:
                    dx = ops.grad_input(dy, stream, weight, rstd, dstream)
                if needs_weight:
                    into = partial(_weight_gradient, weight, heads, leaves, comm)
                    if tokens is None:
                        dw = into(dy, stream, rstd)
                    else:
                        rows = [t.reshape(-1, heads, *t.shape[1:]) for t in (dy, stream, rstd)]
                        if main_grad_of(weight) is not None:
                            tokens.with_all(rows, into)
                        else:
                            dw = into(*tokens.gather_each(*rows))
            return dx, dw, dx if added else None, None, None, None, None, None
        except Exception as problem:
            refuse(problem, ctx.how[0], ctx.how[-1], given=(dy, dstream))
            raise


def _weight_gradient(
    weight: Tensor, heads: int, leaves: int, comm: Communicator | None, dy: Tensor, stream: Tensor, rstd: Tensor
) -> Tensor | None:
    """From all tokens' dy, stream [T * heads, H] or [T, heads, H], rstd alike; None where ``main_grad`` took it."""
    main_grad = main_grad_of(weight)
    if dy.dim() > 2:
        dy, stream, rstd = (t.flatten(0, 1) for t in (dy, stream, rstd))
    root = ops.grad_weight(dy, stream, rstd, heads, leaves)
    return add_onto(main_grad, weight, root if comm is None else comm.all_reduce(root))


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    comm: Communicator | None = None,
    leaves: int = 1,
    tokens: TokenShards | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight in fp32, one rounding; with ``residual``, x + residual is rounded first.

    Args:
        x: [..., H], bf16 or fp32; for q/k norm [..., heads/t, D].
        weight: [H] of x's type.
        eps: added to the mean in fp32.
        residual: x's shape and type. The sum, rounded to the type, is the norm's input and the new residual stream.
        comm: for q/k norm, the t ranks that share the heads; only the gradient of weight needs them.
        leaves: for q/k norm, G: the gradient of weight is one tree over leaves of all heads, at any t that divides G.
        tokens: where x is one context parallel rank's rows, the ranks that hold the others: the gradient of weight is
            then that of all tokens, the same on every rank, in the bits of one rank that holds them all.

    Returns:
        y, or (y, new_residual) where ``residual`` is given; x's shape and type.

    Raises:
        ContractError: shapes, types, eps or leaves outside the contract.
        MissingSupport: a device without kernels.
    """
    try:
        require_tensor("rms_norm", "x", x)
        require_tensor("rms_norm", "weight", weight)
        if residual is not None:
            require_tensor("rms_norm", "residual", residual)
        if x.dim() < 1 or x.shape[-1] == 0:
            raise ContractError(f"rms_norm got x {tuple(x.shape)}; needs [..., H] with H > 0")
        if not isinstance(eps, (int, float)) or isinstance(eps, bool):
            raise ContractError(
                f"rms_norm got eps={eps!r}; supported: a positive normal fp32, as a Python number; convert it"
            )
        if residual is not None and residual.shape != x.shape:
            raise ContractError(
                f"rms_norm got residual {tuple(residual.shape)} for x {tuple(x.shape)}; needs one shape"
            )
        check_peers("rms_norm", comm, tokens)
        heads = own = 1
        if comm is not None or leaves != 1 or not isinstance(leaves, int) or isinstance(leaves, bool):
            if x.dim() < 3:
                raise ContractError(
                    f"rms_norm got comm or leaves with x {tuple(x.shape)}; they need [..., heads, D]; leave them out"
                )
            heads = x.shape[-2]
            own = _head_leaves(heads, leaves, 1 if comm is None else comm.world_size)
        # rows as they are need no view, here nor in the gradient
        flat, width = x.dim() == 2, x.shape[-1]
        rows = x if flat else x.reshape(-1, width)
        add = residual if flat or residual is None else residual.reshape(-1, width)
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (residual is not None and residual.requires_grad)
        ):
            if add is not None:
                rows, add = apart(rows, add)
            result = _RMSNorm.apply(rows, weight, add, float(eps), comm, heads, own, tokens)
        elif add is None:
            result = ops.rms_norm(rows, weight, float(eps))[0]
        else:
            result = ops.add_rms_norm(rows, add, weight, float(eps))[:2]
        if flat:
            return result
        if residual is None:
            return result.view(x.shape)
        return result[0].view(x.shape), result[1].view(x.shape)
    except Exception as problem:
        refuse(problem, comm, tokens, given=(x, weight))
        raise
