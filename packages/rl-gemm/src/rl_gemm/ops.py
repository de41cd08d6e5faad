"""Opaque custom ops over the kernels: checks, launch counts, choice by device. Autograd lives in ``layers.py``."""

from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError, Launch, MissingSupport, record_launch
from rl_contract.arrays import as_array
from rl_contract.checks import dtype_problem, require_tensor
from rl_contract.opaque import opaque_op
from rl_contract.threads import for_ranges
from rl_gemm import cpu, cpu_swiglu
from rl_gemm.contract import TOKEN_BLOCK

MODEL_TYPES = (torch.bfloat16, torch.float32)
OUT_TYPES = (torch.float32, torch.bfloat16)
_COLUMN, _ROW = "gemm.column", "gemm.row"


def check_tensors(where: str, **given: Any) -> None:
    """Each a dense tensor; None where it is ``bias``."""
    for name, x in given.items():
        if x is not None or name != "bias":
            require_tensor(where, name, x)


def check_type(what: str, x: Tensor) -> None:
    if x.dtype not in MODEL_TYPES:
        raise ContractError(f"{what} is {x.dtype}; supported: bfloat16, float32; convert the model to one of these")


def check_device(*tensors: Tensor) -> None:
    kinds = {t.device.type for t in tensors}
    if kinds not in ({"cpu"}, {"cuda"}):
        raise MissingSupport(
            f"rl_gemm got tensors on {sorted(kinds)}; supported: all on cpu or all on one GPU; move them"
        )


def check_leaves(name: str, length: int, leaves: int, fused: int = 1) -> None:
    if leaves < 1 or leaves & (leaves - 1):
        raise ContractError(f"tree({leaves}): supported are powers of two; use the larger TP size of the two engines")
    if length % (leaves * fused):
        sections = f"{fused} sections of " if fused > 1 else ""
        raise ContractError(
            f"tree({leaves}) needs {name} divisible by {sections}{leaves} leaves, got {name}={length}; "
            "use fewer leaves or pad"
        )


def check_matmul(x: Tensor, weight: Tensor, leaves: int) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ContractError(
            f"matmul got x {tuple(x.shape)} and weight {tuple(weight.shape)}; needs x [M, K] and weight [N, K], one K"
        )
    if x.shape[1] == 0:
        raise ContractError("matmul got K=0; supported: K of at least 1")
    check_type("x", x)
    if weight.dtype != x.dtype:
        raise ContractError(
            f"matmul got x {x.dtype} and weight {weight.dtype}; both must have one type, convert one of them"
        )
    check_leaves("K", x.shape[1], leaves)
    check_device(x, weight)


def check_out(bias: Tensor | None, x: Tensor, n: int, out_dtype: torch.dtype) -> None:
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in OUT_TYPES:
        raise ContractError(f"linear got {dtype_problem('out_dtype', out_dtype, OUT_TYPES)}")
    if bias is not None:
        if bias.dtype != x.dtype:
            raise ContractError(f"linear got x {x.dtype} and bias {bias.dtype}; both must have one type, convert bias")
        check_device(x, bias)
        if bias.shape != (n,):
            raise ContractError(f"bias has shape {tuple(bias.shape)}; needs [{n}], one per output")


def _gemm(a: Tensor, b: Tensor, leaves: int, fused: int = 1, merge: int = cpu.TREE) -> Tensor:
    """[M, K] x [N, K] -> fp32 [M, N]; either side may be a transposed view."""
    a = a.float()
    if b.stride(0) != 1 and b.stride(1) != 1:
        b = b.contiguous()
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty((m, n), dtype=torch.float32)
    if m == 0 or n == 0:
        return out
    head = (
        a.data_ptr(),
        a.stride(0),
        a.stride(1),
        b.data_ptr(),
        b.stride(0),
        b.stride(1),
        int(b.dtype == torch.bfloat16),
    )
    tail = (out.data_ptr(), m, n, k, leaves, fused, merge)
    units = -(-m // cpu.ROWS) * -(-n // cpu.COLUMNS)
    # a, b and out stay referenced here until every range is done
    # some eight multiply-adds take as long as one operation of an element-wise kernel
    for_ranges(lambda first, last: cpu.gemm(*head, *tail, first, last), units, 0.125 * m * n * k)
    return out


def finish(total: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The last steps of every forward: bias in fp32, one rounding. ``total`` is fresh fp32 and may be reused."""
    if bias is not None:
        total += bias
    return total.to(out_dtype)


@opaque_op("rl_gemm::matmul_tree")
def matmul_tree(x: Tensor, weight: Tensor, leaves: int = 1, boundary: str = _ROW) -> Tensor:
    """x [M, K], weight [N, K] -> fp32 [M, N]: ``leaves`` chains over K joined by the balanced tree.

    On rank r of t call it with the local K and ``leaves = G / t``; the result is the rank's sub-tree root.

    Raises:
        ContractError: shapes, types, or K not divisible by ``leaves``.
        MissingSupport: a device without kernels.
    """
    check_matmul(x, weight, leaves)
    record_launch(Launch(boundary, "rl_gemm.cpu.gemm", f"tree{leaves}"))
    return _gemm(x, weight, leaves)


@matmul_tree.register_fake
def _(x: Tensor, weight: Tensor, leaves: int = 1, boundary: str = _ROW) -> Tensor:
    check_matmul(x, weight, leaves)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@opaque_op("rl_gemm::matmul")
def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, out_dtype: torch.dtype, boundary: str = _COLUMN
) -> Tensor:
    """As ``matmul_tree``, then bias in fp32 and one rounding to ``out_dtype``."""
    check_matmul(x, weight, leaves)
    check_out(bias, x, weight.shape[0], out_dtype)
    record_launch(Launch(boundary, "rl_gemm.cpu.gemm", f"tree{leaves}"))
    return finish(_gemm(x, weight, leaves), bias, out_dtype)


@matmul.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, out_dtype: torch.dtype, boundary: str = _COLUMN
) -> Tensor:
    check_matmul(x, weight, leaves)
    check_out(bias, x, weight.shape[0], out_dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def check_grad_input(dy: Tensor, weight: Tensor, leaves: int, fused: int) -> None:
    if dy.dim() != 2 or weight.dim() != 2 or dy.shape[1] != weight.shape[0]:
        raise ContractError(
            f"grad_input got dy {tuple(dy.shape)}, weight {tuple(weight.shape)}; needs dy [M, N], weight [N, K], one N"
        )
    check_type("dy", dy)
    check_type("weight", weight)
    if fused not in (1, 2):
        raise ContractError(f"fused={fused}; supported: 1, or 2 for a [gate; up] weight")
    check_leaves("N", dy.shape[1], leaves, fused)
    check_device(dy, weight)


@opaque_op("rl_gemm::grad_input")
def grad_input(
    dy: Tensor,
    weight: Tensor,
    leaves: int = 1,
    fused: int = 1,
    boundary: str = _COLUMN,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dy [M, N], weight [N, K] -> [M, K]: tree(``leaves``) over N, fp32, or rounded once to ``out_dtype``.

    ``fused=2``: leaf g is the g-th part of both halves of N.
    """
    check_grad_input(dy, weight, leaves, fused)
    record_launch(Launch(boundary, "rl_gemm.cpu.gemm", f"grad_input{leaves}"))
    return _gemm(dy, weight.t(), leaves, fused).to(out_dtype)


@grad_input.register_fake
def _(
    dy: Tensor,
    weight: Tensor,
    leaves: int = 1,
    fused: int = 1,
    boundary: str = _COLUMN,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    check_grad_input(dy, weight, leaves, fused)
    return dy.new_empty((dy.shape[0], weight.shape[1]), dtype=out_dtype)


def check_grad_weight(dy: Tensor, x: Tensor) -> None:
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0]:
        raise ContractError(
            f"grad_weight got dy {tuple(dy.shape)} and x {tuple(x.shape)}; needs dy [T, N] and x [T, K] with one T"
        )
    check_type("dy", dy)
    check_type("x", x)
    check_device(dy, x)


@opaque_op("rl_gemm::grad_weight")
def grad_weight(dy: Tensor, x: Tensor, boundary: str = _COLUMN) -> Tensor:
    """dy [T, N], x [T, K] -> fp32 [N, K]: chains over blocks of 64 tokens from token 0, blocks folded left."""
    check_grad_weight(dy, x)
    record_launch(Launch(boundary, "rl_gemm.cpu.gemm", "grad_weight"))
    return _gemm(dy.t(), x.t(), TOKEN_BLOCK, merge=cpu.FOLD)


@grad_weight.register_fake
def _(dy: Tensor, x: Tensor, boundary: str = _COLUMN) -> Tensor:
    check_grad_weight(dy, x)
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=torch.float32)


@opaque_op("rl_gemm::add_grad_weight", mutates_args=("total",))
def add_grad_weight(total: Tensor, dy: Tensor, x: Tensor, boundary: str = _COLUMN) -> None:
    """total fp32 [N, K], a weight's main_grad, += ``grad_weight(dy, x)``; a GPU adds block after block."""
    total.add_(grad_weight(dy, x, boundary))


@add_grad_weight.register_fake
def _(total: Tensor, dy: Tensor, x: Tensor, boundary: str = _COLUMN) -> None:
    check_grad_weight(dy, x)


def check_swiglu(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ContractError(f"swiglu got {tuple(gate_up.shape)}; needs [M, 2F] = [gate, up]")
    check_type("gate_up", gate_up)
    check_device(gate_up)


@opaque_op("rl_gemm::swiglu")
def swiglu(gate_up: Tensor) -> Tensor:
    """[M, 2F] = [gate, up] -> [M, F] of the same type."""
    check_swiglu(gate_up)
    record_launch(Launch("swiglu", "rl_gemm.cpu_swiglu.forward"))
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((m, f), dtype=gate_up.dtype)
    source, target = as_array(gate_up), as_array(out)
    for_ranges(lambda first, last: cpu_swiglu.forward(source, target, first, last), m, 50.0 * m * f)
    return out


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    check_swiglu(gate_up)
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def check_gate_up(x: Tensor, weight: Tensor) -> None:
    check_matmul(x, weight, 1)
    if weight.shape[0] == 0 or weight.shape[0] % 2:
        raise ContractError(f"gate_up_swiglu got weight {tuple(weight.shape)}; needs [2F, K] = [gate; up] with F > 0")


@opaque_op("rl_gemm::gate_up_swiglu")
def gate_up_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K], weight [2F, K] = [gate; up] -> [M, F] of x's type: the bits of ``matmul``, then ``swiglu``.

    Raises:
        ContractError: shapes or types.
        MissingSupport: a device without kernels.
    """
    check_gate_up(x, weight)
    return swiglu(matmul(x, weight, None, 1, x.dtype))


@gate_up_swiglu.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    check_gate_up(x, weight)
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def check_swiglu_backward(dy: Tensor, gate_up: Tensor) -> None:
    check_swiglu(gate_up)
    if dy.shape != (gate_up.shape[0], gate_up.shape[1] // 2) or dy.dtype != gate_up.dtype:
        raise ContractError(
            f"swiglu_backward got dy {tuple(dy.shape)} {dy.dtype} for gate_up {tuple(gate_up.shape)} {gate_up.dtype}; "
            "needs [M, F] of the same type"
        )


@opaque_op("rl_gemm::swiglu_backward")
def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """dy [M, F], gate_up [M, 2F] -> [M, 2F] of the same type, each element rounded once."""
    check_swiglu_backward(dy, gate_up)
    record_launch(Launch("swiglu", "rl_gemm.cpu_swiglu.backward"))
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype)
    dy_, source, target = as_array(dy), as_array(gate_up), as_array(out)
    for_ranges(lambda first, last: cpu_swiglu.backward(dy_, source, target, first, last), len(dy_), 100.0 * dy.numel())
    return out


@swiglu_backward.register_fake
def _(dy: Tensor, gate_up: Tensor) -> Tensor:
    check_swiglu_backward(dy, gate_up)
    return gate_up.new_empty(gate_up.shape)
