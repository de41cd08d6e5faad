"""The public linear layers and SwiGLU, with their gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_contract import Communicator, ContractError, TokenShards
from rl_contract.checks import require_tensor
from rl_contract.communicator import refuse
from rl_contract.gradients import add_onto, apart, main_grad_of
from rl_contract.tokens import check_peers
from rl_gemm import ops


def _local_leaves(leaves: int, comm: Communicator | None) -> int:
    # what nearly every call gives is right at a glance
    if comm is None and type(leaves) is int:
        return leaves
    world = 1 if comm is None else comm.world_size
    if not isinstance(leaves, int) or isinstance(leaves, bool):
        raise ContractError(f"leaves={leaves!r}; supported: an integer, a power of two; convert it")
    if leaves % world:
        raise ContractError(
            f"leaves={leaves} on {world} ranks; leaves must be a multiple of the TP size, use leaves={world}"
        )
    return leaves // world


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [M, K]
        weight: Tensor,  # [N, K]
        bias: Tensor | None,
        comm: Communicator | None,
        leaves: int,
        fused: int,
        out_dtype: torch.dtype,
        column: bool,
        tokens: TokenShards | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how = comm, leaves, fused, column, tokens
        return _forward(x, weight, bias, comm, leaves, out_dtype, column)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        try:
            x, weight, bias = ctx.saved_tensors
            comm, leaves, fused, column, tokens = ctx.how
            boundary = "gemm.column" if column else "gemm.row"
            needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
            dx = dw = db = None
            # a refused main_grad must leave the other as it was
            if needs_weight:
                main_grad_of(weight)
            bias_onto = main_grad_of(bias) if needs_bias else None
            if needs_x:
                if column:
                    alone = comm is None or comm.world_size == 1
                    out_dtype = x.dtype if alone else torch.float32
                    dx = ops.grad_input(dy, weight, _local_leaves(leaves, comm), fused, boundary, out_dtype)
                    if not alone:
                        dx = comm.all_reduce(dx, out_dtype=x.dtype)
                else:
                    dx = ops.grad_input(dy, weight, 1, 1, boundary, x.dtype)
            if tokens is not None and needs_weight and not needs_bias and main_grad_of(weight) is not None:
                tokens.with_all((dy, x), partial(_add_to_weight, weight, boundary, tokens))
                return dx, *[None] * 8
            if tokens is not None and needs_weight:
                dy, x = tokens.gather_each(dy, x)
            elif tokens is not None and needs_bias:
                dy = tokens.gather(dy)
            if needs_weight:
                dw = _weight_gradient(weight, dy, x, boundary, tokens)
            if needs_bias:
                ones = torch.ones((len(dy), 1), dtype=dy.dtype, device=dy.device)
                db = add_onto(bias_onto, bias, ops.grad_weight(dy, ones, boundary)[:, 0])
            return dx, dw, db, None, None, None, None, None, None
        except Exception as problem:
            refuse(problem, ctx.how[0], ctx.how[-1], given=(dy,))
            raise


def _add_to_weight(weight: Tensor, boundary: str, tokens: TokenShards, dy: Tensor, x: Tensor) -> Tensor | None:
    return _weight_gradient(weight, dy, x, boundary, tokens)


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, boundary: str, tokens: TokenShards | None) -> Tensor | None:
    """dy [T, N] and x [T, K] of all tokens, which ``tokens`` has gathered."""
    main_grad = main_grad_of(weight)
    # a GPU adds the blocks of tokens to main_grad itself, and ranks that share its rows add to their own
    total = main_grad if weight.is_cuda or tokens is not None else None
    if tokens is None:
        if total is None:
            return add_onto(main_grad, weight, ops.grad_weight(dy, x, boundary))
        ops.add_grad_weight(total, dy, x, boundary)
        return None
    if total is None:

        def share(first: int, last: int) -> Tensor:
            return ops.grad_weight(dy[:, first:last].contiguous(), x, boundary)

        return add_onto(main_grad, weight, tokens.weight_grad(dy.shape[1], share))

    def add(part: Tensor, first: int, last: int) -> None:
        ops.add_grad_weight(part, dy[:, first:last].contiguous(), x, boundary)

    tokens.add_weight_grad(total, add)
    return None


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm: Communicator | None,
    leaves: int,
    out_dtype: torch.dtype,
    column: bool,
) -> Tensor:
    if column:
        return ops.matmul(x, weight, bias, 1, out_dtype, "gemm.column")
    if comm is None or comm.world_size == 1:
        return ops.matmul(x, weight, bias, leaves, out_dtype, "gemm.row")
    root = ops.matmul_tree(x, weight, _local_leaves(leaves, comm), "gemm.row")
    if bias is None:
        return comm.all_reduce(root, out_dtype=out_dtype)
    return ops.finish(comm.all_reduce(root), bias, out_dtype)


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    require_tensor("linear", "x", x)
    require_tensor("linear", "weight", weight)
    if bias is not None:
        require_tensor("linear", "bias", bias)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.shape[-1] == 0:
        raise ContractError(
            f"linear got x {tuple(x.shape)}, weight {tuple(weight.shape)}; needs x [..., K], weight [N, K], one K > 0"
        )


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm: Communicator | None,
    leaves: int,
    fused: int,
    out_dtype: torch.dtype | None,
    column: bool,
    tokens: TokenShards | None,
) -> Tensor:
    if out_dtype is None:
        out_dtype = x.dtype
    ops.check_type("x", x)
    ops.check_out(bias, x, weight.shape[0], out_dtype)
    rows = _rows(x)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        weight, rows = apart(weight, rows)
        y = _Linear.apply(rows, weight, bias, comm, leaves, fused, out_dtype, column, tokens)
    else:
        y = _forward(rows, weight, bias, comm, leaves, out_dtype, column)
    return y if rows is x else y.view(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    comm: Communicator | None = None,
    leaves: int = 1,
    fused: int = 1,
    out_dtype: torch.dtype | None = None,
    tokens: TokenShards | None = None,
) -> Tensor:
    """Linear layer whose outputs are sharded: a chain over K, bias in fp32, one rounding.

    Args:
        x: [..., K], bf16 or fp32, the same on every rank.
        weight: [N/t, K] of x's type, rank r's rows.
        bias: [N/t] of x's type, or None.
        comm: the t ranks; only the gradient of x needs them.
        leaves: G, a multiple of t; the gradient of x is tree(G) over the global N, rounded once.
        fused: 2 where weight is [gate; up] stacked; leaf g is then the g-th part of both.
        out_dtype: default x's type; float32 returns the accumulator.
        tokens: where x is one context parallel rank's rows, the ranks that hold the others: the gradients of weight and
            bias are then those of all tokens, the same on every rank, in the bits of one rank that holds them all.

    Returns:
        [..., N/t] of ``out_dtype``.

    Raises:
        ContractError: shapes or types outside the contract, or N not divisible into the leaves.
        MissingSupport: a device without kernels.
    """
    try:
        _check_shapes(x, weight, bias)
        check_peers("column_parallel_linear", comm, tokens)
        if not isinstance(fused, int) or isinstance(fused, bool) or fused not in (1, 2):
            raise ContractError(f"fused={fused!r}; supported: 1, or 2 for a [gate; up] weight")
        ops.check_leaves("N/t", weight.shape[0], _local_leaves(leaves, comm), fused)
        return _apply(x, weight, bias, comm, leaves, fused, out_dtype, True, tokens)
    except Exception as problem:
        refuse(problem, comm, tokens, given=(x, weight))
        raise


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    comm: Communicator | None = None,
    leaves: int = 1,
    out_dtype: torch.dtype | None = None,
    tokens: TokenShards | None = None,
) -> Tensor:
    """Linear layer whose inputs are sharded: tree(G) over the global K, bias in fp32, one rounding, same on all ranks.

    Args:
        x: [..., K/t], bf16 or fp32, rank r's part.
        weight: [N, K/t] of x's type.
        bias: [N] of x's type, or None; the same on every rank, added once after the reduction.
        comm: the t ranks that hold the parts of K.
        leaves: G, a multiple of t; K must be divisible by G. The gradient of x is a chain over N.
        out_dtype: default x's type.
        tokens: as in ``column_parallel_linear``.

    Returns:
        [..., N] of ``out_dtype``.

    Raises:
        ContractError: shapes or types outside the contract, or K not divisible into the leaves.
        MissingSupport: a device without kernels.
    """
    try:
        _check_shapes(x, weight, bias)
        check_peers("row_parallel_linear", comm, tokens)
        ops.check_leaves("K/t", x.shape[-1], _local_leaves(leaves, comm))
        return _apply(x, weight, bias, comm, leaves, 1, out_dtype, False, tokens)
    except Exception as problem:
        refuse(problem, comm, tokens, given=(x, weight))
        raise


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    leaves: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The linear layer of one rank: the bits of a column-parallel layer for ``leaves=1``, else of a row-parallel one.

    x [..., K], weight [N, K], bias [N] or None -> [..., N]; types and errors as in the parallel layers.
    """
    if _local_leaves(leaves, None) == 1:
        return column_parallel_linear(x, weight, bias, out_dtype=out_dtype)
    return row_parallel_linear(x, weight, bias, leaves=leaves, out_dtype=out_dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return ops.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return ops.swiglu_backward(dy, gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    """g / (1 + exp(-g)) * u in fp32, one rounding to the model's type.

    Args:
        gate_up: [..., 2F] = [gate, up], bf16 or fp32.

    Returns:
        [..., F] of the same type.

    Raises:
        ContractError: an odd last dimension or another type.
        MissingSupport: a device without kernels.
    """
    require_tensor("swiglu", "gate_up", gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] == 0 or gate_up.shape[-1] % 2:
        raise ContractError(f"swiglu got {tuple(gate_up.shape)}; needs [..., 2F] = [gate, up] with F > 0")
    rows = _rows(gate_up)
    y = _SwiGLU.apply(rows) if torch.is_grad_enabled() and gate_up.requires_grad else ops.swiglu(rows)
    return y if rows is gate_up else y.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def gate_up_swiglu(
    x: Tensor,
    weight: Tensor,
    *,
    comm: Communicator | None = None,
    leaves: int = 1,
    tokens: TokenShards | None = None,
) -> Tensor:
    """The bits of ``swiglu(column_parallel_linear(x, weight, fused=2))``; gate_up is not stored where that is faster.

    Under autograd the two run in turn, because the gradient reads gate_up.

    Args:
        x: [..., K], bf16 or fp32, the same on every rank.
        weight: [2F/t, K] of x's type, [gate; up] of this rank.
        comm: the t ranks; only the gradient of x needs them.
        leaves: G, a multiple of t, of the gradient of x.
        tokens: the ranks that hold the other tokens; only the gradient of weight needs them.

    Returns:
        [..., F/t] of x's type.

    Raises:
        ContractError: shapes or types outside the contract, or N not divisible into the leaves.
        MissingSupport: a device without kernels.
    """
    try:
        require_tensor("gate_up_swiglu", "x", x)
        require_tensor("gate_up_swiglu", "weight", weight)
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return swiglu(column_parallel_linear(x, weight, comm=comm, leaves=leaves, fused=2, tokens=tokens))
        _check_shapes(x, weight)
        check_peers("gate_up_swiglu", comm, tokens)
        ops.check_leaves("N/t", weight.shape[0], _local_leaves(leaves, comm), 2)
        rows = _rows(x)
        y = ops.gate_up_swiglu(rows, weight)
        return y if rows is x else y.view(*x.shape[:-1], weight.shape[0] // 2)
    except Exception as problem:
        refuse(problem, comm, tokens, given=(x, weight))
        raise
