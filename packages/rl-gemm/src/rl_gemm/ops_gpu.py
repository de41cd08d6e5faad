"""The ops of ``ops.py`` on a GPU: the same checks, then ``gpu.py`` and the Triton kernels."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError, MissingSupport
from rl_gemm import gpu, ops


@cache
def _triton_swiglu() -> Any:
    try:
        from rl_gemm import triton_swiglu
    except ImportError as error:
        raise MissingSupport(f"rl_gemm on a GPU needs Triton ({error}); install a PyTorch build with Triton") from error
    return triton_swiglu


@ops.matmul_tree.register_kernel("cuda")
def _matmul_tree(x: Tensor, weight: Tensor, leaves: int = 1, boundary: str = "gemm.row") -> Tensor:
    ops.check_matmul(x, weight, leaves)
    return gpu.gemm(x, weight, leaves=leaves, boundary=boundary)


@ops.matmul.register_kernel("cuda")
def _matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, out_dtype: torch.dtype, boundary: str = "gemm.column"
) -> Tensor:
    ops.check_matmul(x, weight, leaves)
    ops.check_out(bias, x, weight.shape[0], out_dtype)
    return gpu.gemm(x, weight, leaves=leaves, bias=bias, out_dtype=out_dtype, boundary=boundary)


@ops.grad_input.register_kernel("cuda")
def _grad_input(
    dy: Tensor,
    weight: Tensor,
    leaves: int = 1,
    fused: int = 1,
    boundary: str = "gemm.column",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    ops.check_grad_input(dy, weight, leaves, fused)
    return gpu.gemm(
        dy, weight.t(), leaves=leaves, fused=fused, out_dtype=out_dtype, operation="grad_input", boundary=boundary
    )


@ops.grad_weight.register_kernel("cuda")
def _grad_weight(dy: Tensor, x: Tensor, boundary: str = "gemm.column") -> Tensor:
    ops.check_grad_weight(dy, x)
    return gpu.grad_weight(dy, x, boundary)


@ops.add_grad_weight.register_kernel("cuda")
def _add_grad_weight(total: Tensor, dy: Tensor, x: Tensor, boundary: str = "gemm.column") -> None:
    ops.check_grad_weight(dy, x)
    gpu.add_grad_weight(total, dy, x, boundary)


def _model_type(x: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ContractError(f"swiglu on a GPU got {x.dtype}; supported: bfloat16; convert the model")


@ops.swiglu.register_kernel("cuda")
def _swiglu(gate_up: Tensor) -> Tensor:
    ops.check_swiglu(gate_up)
    _model_type(gate_up)
    gpu.arch(gate_up.device.index or 0)
    gpu.record("swiglu", "rl_gemm.triton_swiglu.forward")
    return _triton_swiglu().forward(gate_up)


@ops.gate_up_swiglu.register_kernel("cuda")
def _gate_up_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    ops.check_gate_up(x, weight)
    fused = gpu.gate_up_swiglu(x, weight)
    if fused is not None:
        return fused
    return _swiglu(gpu.gemm(x, weight, out_dtype=x.dtype))


@ops.swiglu_backward.register_kernel("cuda")
def _swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    ops.check_swiglu_backward(dy, gate_up)
    _model_type(gate_up)
    gpu.arch(gate_up.device.index or 0)
    gpu.record("swiglu", "rl_gemm.triton_swiglu.backward")
    return _triton_swiglu().backward(dy, gate_up)
