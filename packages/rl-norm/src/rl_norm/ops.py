"""Opaque custom ops over the kernels: checks, launch counts, choice by device. Autograd lives in ``layers.py``."""

import torch
from torch import Tensor

from rl_contract import ContractError, Launch, MissingSupport, record_launch
from rl_contract.arrays import as_array
from rl_contract.opaque import opaque_op
from rl_contract.threads import for_ranges
from rl_norm import cpu

MODEL_TYPES = (torch.bfloat16, torch.float32)


def check(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> None:
    if x.dim() != 2 or x.shape[1] == 0:
        raise ContractError(f"rms_norm got x {tuple(x.shape)}; needs [M, H] with H > 0")
    if x.dtype not in MODEL_TYPES:
        raise ContractError(
            f"rms_norm got x {x.dtype}; supported: bfloat16, float32; convert the model to one of these"
        )
    if weight.shape != (x.shape[1],):
        raise ContractError(f"rms_norm got weight {tuple(weight.shape)}; needs [{x.shape[1]}], the last dimension of x")
    if weight.dtype != x.dtype:
        raise ContractError(
            f"rms_norm got x {x.dtype} and weight {weight.dtype}; both must have one type, convert weight"
        )
    if not 2.0**-126 <= eps < 2.0**128:
        raise ContractError(f"rms_norm got eps={eps}; supported: a positive normal fp32; read it from the live module")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ContractError(
            f"rms_norm got residual {tuple(residual.shape)} {residual.dtype} for x {tuple(x.shape)} {x.dtype}; "
            "both must have one shape and type"
        )
    kinds = {t.device.type for t in (x, weight, residual) if t is not None}
    if kinds not in ({"cpu"}, {"cuda"}):
        raise MissingSupport(
            f"rl_norm got tensors on {sorted(kinds)}; supported: all on cpu or all on one GPU; move them"
        )


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    m, width = x.shape
    y, rstd = torch.empty((m, width), dtype=x.dtype), torch.empty(m)
    stream = y if residual is None else torch.empty_like(y)
    arrays = as_array(x), as_array(x if residual is None else residual), as_array(weight)
    add, out = residual is not None, (as_array(stream), as_array(y), as_array(rstd))
    for_ranges(lambda first, last: cpu.forward(*arrays, eps, add, *out, first, last), m, 10.0 * m * width)
    return y, stream, rstd


@opaque_op("rl_norm::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [M, H], weight [H] -> y [M, H], rstd fp32 [M]."""
    check(x, weight, eps)
    record_launch(Launch("norm", "rl_norm.cpu.forward", "plain"))
    y, _, rstd = _forward(x, None, weight, eps)
    return y, rstd


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check(x, weight, eps)
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@opaque_op("rl_norm::add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [M, H], weight [H] -> y [M, H], stream = x + residual [M, H], rstd fp32 [M]."""
    check(x, weight, eps, residual)
    record_launch(Launch("norm", "rl_norm.cpu.forward", "residual"))
    return _forward(x, residual, weight, eps)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, eps, residual)
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@opaque_op("rl_norm::grad_input")
def grad_input(dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None = None) -> Tensor:
    """Gradient of the norm's input [M, H], plus ``dstream`` where the stream is used further; rounded once."""
    record_launch(Launch("norm", "rl_norm.cpu.grad_input"))
    dx = torch.empty(dy.shape, dtype=stream.dtype)
    arrays = (
        as_array(dy),
        as_array(stream),
        as_array(weight),
        as_array(rstd),
        as_array(dy if dstream is None else dstream),
    )
    add, out = dstream is not None, as_array(dx)
    for_ranges(lambda first, last: cpu.grad_input(*arrays, add, out, first, last), len(dy), 20.0 * dy.numel())
    return dx


@grad_input.register_fake
def _(dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None = None) -> Tensor:
    return stream.new_empty(stream.shape)


@opaque_op("rl_norm::grad_weight")
def grad_weight(dy: Tensor, stream: Tensor, rstd: Tensor, heads: int = 1, leaves: int = 1) -> Tensor:
    """dy, stream [T * heads, H] -> fp32 [H], the root of the tree over ``leaves`` equal leaves of ``heads``."""
    record_launch(Launch("norm", "rl_norm.cpu.grad_weight", f"tree{leaves}"))
    width = dy.shape[1]
    parts = torch.empty((leaves, width))
    arrays = as_array(dy), as_array(stream), as_array(rstd)
    out = as_array(parts)
    for_ranges(lambda first, last: cpu.grad_weight(*arrays, heads, out, first, last), width, 4.0 * dy.numel())
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0].clone()


@grad_weight.register_fake
def _(dy: Tensor, stream: Tensor, rstd: Tensor, heads: int = 1, leaves: int = 1) -> Tensor:
    return dy.new_empty(dy.shape[1:], dtype=torch.float32)
