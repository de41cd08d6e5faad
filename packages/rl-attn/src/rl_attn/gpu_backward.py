"""Launches of the backward kernels: shapes, strides and the frozen plan of each call, on what ``gpu`` says of a device.

Order and rounding are those of ``triton_backward``.
"""

import torch
from torch import Tensor

from rl_attn.gpu import block_rows, check, current_plans, exponent_factor, kernels, options, padded, record, unit_last


def row_delta(grad: Tensor, out: Tensor) -> Tensor:
    check("attention_packed backward", grad, out)
    grad, out = unit_last(grad), unit_last(out)
    tokens, heads, head_dim = out.shape
    delta = out.new_empty((tokens, heads), dtype=torch.float32)
    rows = 32
    if tokens:
        kernels().backward.attn_delta_kernel[(-(-tokens * heads // rows),)](
            grad, out, delta, tokens, heads, grad.stride(0), grad.stride(1), out.stride(0), out.stride(1),
            D=head_dim, BLOCK_D=padded(head_dim), ROWS=rows, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return delta


def _token_head(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in (x.stride(0), x.stride(1)))


def grad_queries(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_q: Tensor, cu_k: Tensor,
    positions: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    check("attention_packed backward", grad, q, k, v)
    grad, q, k, v = (unit_last(x) for x in (grad, q, k, v))
    lse, delta = lse.contiguous(), delta.contiguous()
    tokens, heads, head_dim = q.shape
    group, sequences = heads // k.shape[1], cu_q.numel() - 1
    dq = q.new_empty(q.shape)
    if tokens == 0:
        return dq
    own = current_plans(q)
    row = own.choose("grad_queries", head_dim)
    block_m = block_rows(row, group)
    kernels().backward.attn_grad_queries_kernel[(tokens // (block_m // group) + sequences, k.shape[1])](
        grad, q, k, v, dq, lse, delta, cu_q, cu_k, positions, exponent_factor(scale), float(scale), sequences, heads,
        *_token_head(grad, q, k, v),
        GROUP=group, D=head_dim, BLOCK_D=padded(head_dim), BLOCK_M=block_m, BLOCK_N=row.block_n, **options(row),
    )  # fmt: skip
    record("attention", "rl_attn.triton_backward.grad_queries", f"{own.arch}:{row.name}", "packed")
    return dq


def grad_keys(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_q: Tensor, cu_k: Tensor,
    positions: Tensor, key_positions: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check("attention_packed backward", grad, q, k, v)
    grad, q, k, v = (unit_last(x) for x in (grad, q, k, v))
    lse, delta = lse.contiguous(), delta.contiguous()
    tokens, kv_heads, head_dim = k.shape
    group, sequences = q.shape[1] // kv_heads, cu_k.numel() - 1
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    if tokens == 0:
        return dk, dv
    own = current_plans(q)
    row = own.choose("grad_keys", head_dim, tokens // max(1, sequences))
    kernels().backward.attn_grad_keys_kernel[(kv_heads, tokens // row.block_n + sequences)](
        grad, q, k, v, dk, dv, lse, delta, cu_q, cu_k, positions, key_positions, exponent_factor(scale), float(scale),
        sequences, kv_heads, *_token_head(grad, q, k, v),
        GROUP=group, D=head_dim, BLOCK_D=padded(head_dim), BLOCK_M=row.block_m, BLOCK_N=row.block_n, **options(row),
    )  # fmt: skip
    record("attention", "rl_attn.triton_backward.grad_keys", f"{own.arch}:{row.name}", "packed")
    return dk, dv
