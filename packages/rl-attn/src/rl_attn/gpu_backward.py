"""Launches of the backward kernels: shapes, strides and the frozen plan of each call, on what ``gpu`` says of a device.

Order and rounding are those of ``triton_backward``. A call is decided once, and launched again where its equal comes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_attn import plans
from rl_attn.calls import traits
from rl_attn.gpu import block_rows, check, current_plans, exponent_factor, kernels, options, padded, record, unit_last
from rl_contract.triton_launch import Prepared, keep


class _Call(NamedTuple):
    """A decided launch, None where there is nothing to do; its plan, and the plans that it was chosen from."""

    launch: Prepared | None
    plan: str
    own: plans.Plans | None = None


_decided: dict[Any, _Call] = {}
_ROWS = 32


def _empty(like: Tensor) -> Tensor:
    """Contiguous, whatever ``like`` is."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _token_head(**tensors: Tensor) -> dict[str, int]:
    """The strides ``s<name>_t`` and ``s<name>_h`` of kernels."""
    return {f"s{name}_{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate("th")}


def row_delta(grad: Tensor, out: Tensor) -> Tensor:
    key = ("delta", traits(grad, out))
    call = _decided.get(key)
    if call is None:
        check("attention_packed backward", grad, out)
        grad, out = unit_last(grad), unit_last(out)
    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    if call is None:
        tokens, heads, head_dim = out.shape
        launch = None
        if tokens:
            fixed = {"rows": tokens, "heads": heads, "D": head_dim, "BLOCK_D": padded(head_dim), "ROWS": _ROWS}
            launch = Prepared(
                kernels().backward.attn_delta_kernel, (-(-tokens * heads // _ROWS),),
                fixed | _token_head(g=grad, o=out), num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        call = _Call(launch, "")
        if key[1] == traits(grad, out):
            keep(_decided, key, call)
    if call.launch is not None:
        call.launch(grad, out, delta)
    return delta


def grad_queries(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_q: Tensor, cu_k: Tensor,
    positions: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    own = current_plans(q)
    kinds = (cu_q.dtype, cu_q.shape, cu_k.dtype, positions.dtype)
    lse, delta = lse.contiguous(), delta.contiguous()
    key = ("queries", id(own), scale, kinds, traits(grad, q, k, v, lse, delta))
    call = _decided.get(key)
    if call is None:
        check("attention_packed backward", grad, q, k, v)
        grad, q, k, v = (unit_last(x) for x in (grad, q, k, v))
    dq = _empty(q)
    if call is None:
        call = _decide_queries(own, grad, q, k, v, cu_q.numel() - 1, scale)
        if key[-1] == traits(grad, q, k, v, lse, delta):
            keep(_decided, key, call)
    if call.launch is not None:
        call.launch(grad, q, k, v, dq, lse, delta, cu_q, cu_k, positions)
        record("attention", "rl_attn.triton_backward.grad_queries", call.plan, "packed")
    return dq


def _decide_queries(
    own: plans.Plans, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: int, scale: float
) -> _Call:
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return _Call(None, "", own)
    kv_heads = k.shape[1]
    group = heads // kv_heads
    row = own.choose("grad_queries", head_dim)
    block_m = block_rows(row, group)
    fixed = {"c": exponent_factor(scale), "scale": float(scale), "sequences": sequences, "heads": heads}
    fixed |= _token_head(g=grad, q=q, k=k, v=v) | {"GROUP": group, "D": head_dim, "BLOCK_D": padded(head_dim)}
    launch = Prepared(
        kernels().backward.attn_grad_queries_kernel, (tokens // (block_m // group) + sequences, kv_heads),
        fixed | {"BLOCK_M": block_m, "BLOCK_N": row.block_n}, **options(row),
    )  # fmt: skip
    return _Call(launch, f"{own.arch}:{row.name}", own)


def grad_keys(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_q: Tensor, cu_k: Tensor,
    positions: Tensor, key_positions: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    own = current_plans(q)
    kinds = (cu_q.dtype, cu_k.shape, cu_k.dtype, positions.dtype, key_positions.dtype)
    lse, delta = lse.contiguous(), delta.contiguous()
    key = ("keys", id(own), scale, kinds, traits(grad, q, k, v, lse, delta))
    call = _decided.get(key)
    if call is None:
        check("attention_packed backward", grad, q, k, v)
        grad, q, k, v = (unit_last(x) for x in (grad, q, k, v))
    dk, dv = _empty(k), _empty(v)
    if call is None:
        call = _decide_keys(own, grad, q, k, v, cu_k.numel() - 1, scale)
        if key[-1] == traits(grad, q, k, v, lse, delta):
            keep(_decided, key, call)
    if call.launch is not None:
        call.launch(grad, q, k, v, dk, dv, lse, delta, cu_q, cu_k, positions, key_positions)
        record("attention", "rl_attn.triton_backward.grad_keys", call.plan, "packed")
    return dk, dv


def _decide_keys(
    own: plans.Plans, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: int, scale: float
) -> _Call:
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return _Call(None, "", own)
    row = own.choose("grad_keys", head_dim, tokens // max(1, sequences))
    fixed = {"c": exponent_factor(scale), "scale": float(scale), "sequences": sequences, "kv_heads": kv_heads}
    fixed |= _token_head(g=grad, q=q, k=k, v=v)
    fixed |= {"GROUP": q.shape[1] // kv_heads, "D": head_dim, "BLOCK_D": padded(head_dim)}
    launch = Prepared(
        kernels().backward.attn_grad_keys_kernel, (kv_heads, tokens // row.block_n + sequences),
        fixed | {"BLOCK_M": row.block_m, "BLOCK_N": row.block_n}, **options(row),
    )  # fmt: skip
    return _Call(launch, f"{own.arch}:{row.name}", own)
