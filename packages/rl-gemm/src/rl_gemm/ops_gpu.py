"""The ops of ``ops.py`` on a GPU: the same checks, then ``gpu.py`` and the Triton kernels."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.evidence import gpu_tally
from rl_contract.gpu import needs_triton
from rl_contract.triton_launch import keep
from rl_gemm import gpu, gpu_grad, ops, plans

_swiglus: dict[Any, Callable[..., Tensor]] = {}


@cache
def _triton_swiglu() -> Any:
    with needs_triton("rl_gemm"):
        from rl_gemm import triton_swiglu
    return triton_swiglu


@ops.matmul_tree.register_kernel("cuda")
def _matmul_tree(x: Tensor, weight: Tensor, leaves: int = 1, boundary: str = "gemm.row") -> Tensor:
    return _matmul(x, weight, None, leaves, torch.float32, boundary)


@ops.matmul.register_kernel("cuda")
def _matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, out_dtype: torch.dtype, boundary: str = "gemm.column"
) -> Tensor:
    key = gpu.gemm_key(x, weight, leaves, 1, bias, out_dtype, "forward", boundary, "nt")
    run = gpu.known(key)
    if run is None:
        ops.check_matmul(x, weight, leaves)
        ops.check_out(bias, x, weight.shape[0], out_dtype)
        run = gpu.prepare(key, x, weight, bias)
    return run(x, weight, bias)


@ops.grad_input.register_kernel("cuda")
def _grad_input(
    dy: Tensor,
    weight: Tensor,
    leaves: int = 1,
    fused: int = 1,
    boundary: str = "gemm.column",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    key = gpu.gemm_key(dy, weight, leaves, fused, None, out_dtype, "grad_input", boundary, "nn")
    run = gpu.known(key)
    if run is None:
        ops.check_grad_input(dy, weight, leaves, fused)
        run = gpu.prepare(key, dy, weight)
    return run(dy, weight, None)


@ops.grad_weight.register_kernel("cuda")
def _grad_weight(dy: Tensor, x: Tensor, boundary: str = "gemm.column") -> Tensor:
    # one block's product, as a rule
    run = gpu.known(gpu_grad.block_key(dy, x, boundary))
    if run is not None:
        return run(dy, x, None)
    ops.check_grad_weight(dy, x)
    return gpu_grad.grad_weight(dy, x, boundary)


@ops.add_grad_weight.register_kernel("cuda")
def _add_grad_weight(total: Tensor, dy: Tensor, x: Tensor, boundary: str = "gemm.column") -> None:
    run = gpu.known(gpu_grad.onto_key(total, dy, x, boundary))
    if run is not None:
        run(total, dy, x)
        return
    ops.check_grad_weight(dy, x)
    gpu_grad.add_grad_weight(total, dy, x, boundary)


def _check_swiglu(gate_up: Tensor) -> None:
    if gate_up.dtype != torch.bfloat16:
        raise ContractError(f"swiglu on a GPU got {gate_up.dtype}; supported: bfloat16; convert the model")
    gpu.arch(gate_up.device.index or 0)


@ops.swiglu.register_kernel("cuda")
def _swiglu(gate_up: Tensor) -> Tensor:
    key = gpu.looks(gate_up)
    run = _swiglus.get(key)
    if run is None:
        ops.check_swiglu(gate_up)
        _check_swiglu(gate_up)
        run = keep(_swiglus, key, _counted("forward", _triton_swiglu().prepared_forward(gate_up)))
    return run(gate_up)


@ops.gate_up_swiglu.register_kernel("cuda")
def _gate_up_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    key = plans.GATE_UP, gpu.looks(x), gpu.looks(weight)
    run = gpu.known(key)
    if run is None:
        ops.check_gate_up(x, weight)
        run = gpu.prepare_gate_up(key, x, weight)
    fused = run(x, weight)
    if fused is not None:
        return fused
    return _swiglu(gpu.gemm(x, weight, out_dtype=x.dtype))


@ops.swiglu_backward.register_kernel("cuda")
def _swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    key = gpu.looks(dy), gpu.looks(gate_up)
    run = _swiglus.get(key)
    if run is None:
        ops.check_swiglu_backward(dy, gate_up)
        _check_swiglu(gate_up)
        run = keep(_swiglus, key, _counted("backward", _triton_swiglu().prepared_backward(dy, gate_up)))
    return run(dy, gate_up)


def _counted(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    count = gpu_tally("swiglu", f"rl_gemm.triton_swiglu.{name}")

    def counted(*tensors: Tensor) -> Tensor:
        count()
        return run(*tensors)

    return counted
