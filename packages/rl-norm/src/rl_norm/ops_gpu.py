"""The ops of ``ops.py`` on a GPU: the same checks, then the Triton kernels."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.evidence import gpu_tally
from rl_contract.gpu import arch_of, needs_triton
from rl_contract.triton_launch import keep
from rl_norm import ops

_ALIGNMENT = 16
_calls: dict[Any, Callable[..., Any]] = {}
ARCHS = ("sm90", "gfx942", "gfx950")


@cache
def _kernels(device_index: int) -> Any:
    arch_of(device_index, ARCHS, "rl_norm")
    with needs_triton("rl_norm"):
        from rl_norm import triton_norm
    return triton_norm


def _looks(x: Tensor | None) -> Any:
    """All of a tensor that a launch, or a compilation, may depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % _ALIGNMENT)


def _ready(x: Tensor) -> Any:
    if x.dtype != torch.bfloat16:
        raise ContractError(f"rms_norm on a GPU got {x.dtype}; supported: bfloat16; convert the model")
    return _kernels(x.device.index or 0)


def _keep(key: Any, run: Callable[..., Any], kernel: str, plan: str = "-") -> Callable[..., Any]:
    count = gpu_tally("norm", f"rl_norm.triton.{kernel}", plan)

    def counted(*tensors: Tensor | None) -> Any:
        count()
        return run(*tensors)

    return keep(_calls, key, counted)


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    key = _looks(x), _looks(residual), _looks(weight), eps
    run = _calls.get(key)
    if run is None:
        ops.check(x, weight, eps, residual)
        launch = _ready(x).prepared_forward(x, residual, weight, eps)
        run = _keep(key, launch, "forward", "plain" if residual is None else "residual")
    return run(x, residual, weight)


@ops.rms_norm.register_kernel("cuda")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, rstd = _forward(x, None, weight, eps)
    return y, rstd


@ops.add_rms_norm.register_kernel("cuda")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, eps)


@ops.grad_input.register_kernel("cuda")
def _grad_input(dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None = None) -> Tensor:
    key = "grad_input", *map(_looks, (dy, stream, weight, rstd, dstream))
    run = _calls.get(key)
    if run is None:
        launch = _ready(stream).prepared_grad_input(dy, stream, weight, rstd, dstream)
        run = _keep(key, launch, "grad_input")
    return run(dy, stream, weight, rstd, dstream)


@ops.grad_weight.register_kernel("cuda")
def _grad_weight(dy: Tensor, stream: Tensor, rstd: Tensor, heads: int = 1, leaves: int = 1) -> Tensor:
    key = "grad_weight", *map(_looks, (dy, stream, rstd)), heads, leaves
    run = _calls.get(key)
    if run is None:
        launch = _ready(stream).prepared_grad_weight(dy, stream, rstd, heads, leaves)
        run = _keep(key, launch, "grad_weight", f"tree{leaves}")
    parts = run(dy, stream, rstd)
    if leaves == 1:
        return parts
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0].clone()
