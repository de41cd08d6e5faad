"""Opaque ops of the backward, and the autograd registration of ``rl_attn::packed``."""

import sys

import numpy as np
import torch

from rl_attn import cpu, cpu_backward
from rl_attn.metadata import positions_of_all_keys
from rl_attn.ops import LOG2E, dense, flat, int64, packed, spread, strides, unit_last
from rl_contract import Launch, record_launch
from rl_contract.opaque import opaque_op


def _token_head(*tensors: torch.Tensor) -> np.ndarray:
    return strides(*(s for x in tensors for s in (x.stride(0), x.stride(1))))


@opaque_op("rl_attn::row_delta")
def row_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H]: chain over head_dim of grad_out * out."""
    grad_out, out = unit_last(grad_out), unit_last(out)
    delta = out.new_empty(out.shape[:2], dtype=torch.float32)
    cpu_backward.row_delta(
        flat(grad_out), _token_head(grad_out), flat(out), _token_head(out), out.shape[2], dense(delta)
    )
    return delta


@row_delta.register_fake
def _(grad_out, out):
    return out.new_empty(out.shape[:2], dtype=torch.float32)


@opaque_op("rl_attn::grad_queries")
def grad_queries(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """dQ as q; arguments as in the forward, with grad_out as q, lse and delta fp32 [Tq, Hq]."""
    grad_out, q, k, v = (unit_last(x) for x in (grad_out, q, k, v))
    lse, delta = lse.contiguous(), delta.contiguous()
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    at = int64(positions)
    tasks = cpu.plan_tasks(int64(cu_seqlens_q), max(1, cpu.ROWS_PER_TASK // group))
    dq = q.new_empty(q.shape)
    arguments = (
        flat(grad_out), flat(q), flat(k), flat(v), _token_head(grad_out, q, k, v), dense(lse), dense(delta),
        int64(cu_seqlens_k), at, tasks, kv_heads, group, head_dim, np.float32(float(scale) * LOG2E), np.float32(scale),
        dense(dq),
    )  # fmt: skip
    flops = 6.0 * head_dim * heads * float(at.sum() + tokens)
    spread(lambda first, step: cpu_backward.grad_queries(*arguments, first, step), tasks.shape[0] * kv_heads, flops)
    record_launch(Launch("attention", "rl_attn.cpu_backward.grad_queries", layout="packed"))
    return dq


@grad_queries.register_fake
def _(grad_out, q, k, v, lse, delta, cu_seqlens_q, cu_seqlens_k, positions, scale):
    return q.new_empty(q.shape)


@opaque_op("rl_attn::grad_keys")
def grad_keys(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK, dV of the given keys over the given queries; key_positions int [Tk], ascending inside each sequence."""
    grad_out, q, k, v = (unit_last(x) for x in (grad_out, q, k, v))
    lse, delta = lse.contiguous(), delta.contiguous()
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    cu_rows, at = int64(cu_seqlens_q), int64(positions)
    sequence = np.repeat(np.arange(cu_rows.size - 1), np.diff(cu_rows))
    order = np.lexsort((at, sequence))
    tasks = cpu.plan_tasks(int64(cu_seqlens_k), cpu_backward.KEYS_PER_TASK)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    arguments = (
        flat(grad_out), flat(q), flat(k), flat(v), _token_head(grad_out, q, k, v), dense(lse), dense(delta), cu_rows,
        order, at, int64(key_positions), tasks, kv_heads, group, head_dim, np.float32(float(scale) * LOG2E),
        np.float32(scale), dense(dk), dense(dv),
    )  # fmt: skip
    flops = 8.0 * head_dim * heads * float(at.sum() + tokens)
    spread(lambda first, step: cpu_backward.grad_keys(*arguments, first, step), tasks.shape[0] * kv_heads, flops)
    record_launch(Launch("attention", "rl_attn.cpu_backward.grad_keys", layout="packed"))
    return dk, dv


@grad_keys.register_fake
def _(grad_out, q, k, v, lse, delta, cu_seqlens_q, cu_seqlens_k, positions, key_positions, scale):
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _packed_context(ctx, inputs, output):
    q, k, v, cu_q, cu_k, positions, ctx.scale, _, _ = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, positions)


def gradients(kernels, ctx, grad_out, positions_of_keys=positions_of_all_keys):
    """dQ, dK, dV as far as they are needed, from what a forward of either family has saved.

    Args:
        kernels: where ``row_delta``, ``grad_queries`` and ``grad_keys`` are: this module, or ``gpu_backward``.
        positions_of_keys: gives int64 [Tk], the index of each key inside its sequence, from cu_seqlens_k and Tk.
    """
    # once: each look unpacks anew, and activation checkpointing allows one
    q, k, v, out, lse, cu_q, cu_k, positions = ctx.saved_tensors
    delta = kernels.row_delta(grad_out, out)
    dq = dk = dv = None
    if ctx.needs_input_grad[0]:
        dq = kernels.grad_queries(grad_out, q, k, v, lse, delta, cu_q, cu_k, positions, ctx.scale)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        at = positions_of_keys(cu_k, k.shape[0])
        dk, dv = kernels.grad_keys(grad_out, q, k, v, lse, delta, cu_q, cu_k, positions, at, ctx.scale)
    return dq, dk, dv


def packed_gradients(ctx, grad_out):
    """``gradients`` by these ops."""
    return gradients(sys.modules[__name__], ctx, grad_out)


def _packed_backward(ctx, grad_out, _):
    return *packed_gradients(ctx, grad_out), None, None, None, None, None, None


packed.register_autograd(_packed_backward, setup_context=_packed_context)
