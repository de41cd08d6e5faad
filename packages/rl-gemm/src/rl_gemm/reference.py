"""Slow oracles in plain torch, written from the contracts alone. Any device, any shape; for tests."""

import torch
from torch import Tensor

from rl_gemm.contract import TOKEN_BLOCK


def chain(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K], b [N, K] -> fp32 [M, N]: from +0, k ascending, multiply rounded, then add rounded."""
    a, b = a.float(), b.float()
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[:, k]
    return total


def join(parts: list[Tensor]) -> Tensor:
    """The balanced binary tree over a power of two of parts, lower index on the left."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def tree(a: Tensor, b: Tensor, leaves: int, fused: int = 1) -> Tensor:
    """a [M, K], b [N, K] -> fp32 [M, N]; leaf g is the g-th part of each of the ``fused`` sections of K."""
    k = torch.arange(a.shape[1]).view(fused, leaves, -1)
    return join([chain(a[:, k[:, g].flatten()], b[:, k[:, g].flatten()]) for g in range(leaves)])


def grad_input(dy: Tensor, weight: Tensor, leaves: int = 1, fused: int = 1) -> Tensor:
    """dy [M, N], weight [N, K] -> fp32 [M, K]."""
    return tree(dy, weight.t(), leaves, fused)


def grad_weight(dy: Tensor, x: Tensor) -> Tensor:
    """dy [T, N], x [T, K] -> fp32 [N, K]: token blocks folded left from +0."""
    total = torch.zeros(dy.shape[1], x.shape[1])
    for start in range(0, dy.shape[0], TOKEN_BLOCK):
        total = total + chain(dy[start : start + TOKEN_BLOCK].t(), x[start : start + TOKEN_BLOCK].t())
    return total


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, leaves: int = 1, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N]."""
    total = tree(x, weight, leaves)
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype or x.dtype)


def _exp(x: Tensor) -> Tensor:
    return torch.exp(x.double()).float()


def swiglu(gate_up: Tensor) -> Tensor:
    """[M, 2F] -> [M, F]. exp is fp64's, rounded: the named primitive may differ by 1 ulp in about 1 of 1e8 values."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + _exp(-gate)) * up).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """dy [M, F], gate_up [M, 2F] -> [M, 2F]."""
    dy_, (gate, up) = dy.float(), gate_up.float().chunk(2, dim=-1)
    below = 1.0 + _exp(-gate)
    s = 1.0 / below
    return torch.cat([(dy_ * up) * (s * (1.0 + gate * (1.0 - s))), dy_ * (gate / below)], dim=-1).to(gate_up.dtype)
