"""Launches of the rotation and of the cache writes on a GPU; order and rounding are those of ``triton_rotary``.

A call is decided once, and launched again where an equal one comes; None is one that has nothing to do.
"""

from typing import Any

import torch
from torch import Tensor

from rl_attn.calls import traits
from rl_attn.gpu import check, kernels, record, unit_last
from rl_contract.triton_launch import Prepared, keep

_decided: dict[Any, Prepared | None] = {}
_missing = object()
# of a program; with a norm in front threads have 16 bytes of each half
_HEADS = 8
_NORMED_HEADS = 16


def _token_head(**tensors: Tensor) -> dict[str, int]:
    """The strides ``s<name>_t`` and ``s<name>_h`` of kernels."""
    return {f"s{name}_{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate("th")}


def _cache_steps(**caches: Tensor) -> dict[str, int]:
    return {f"{name}_{axis}": x.stride(i) for name, x in caches.items() for i, axis in enumerate("bht")}


def _empty(like: Tensor) -> Tensor:
    """Contiguous, whatever ``like`` is."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, Hq, D] and k [T, Hkv, D] rotated, contiguous; cos, sin fp32 [P, rotary_dim/2]. Either may have no heads."""
    key = ("rotary", inverse, traits(q, k, positions), cos.shape, cos.dtype)
    launch: Any = _decided.get(key, _missing)
    if launch is _missing:
        check("rotary", q, k)
        q, k, positions = unit_last(q), unit_last(k), unit_last(positions)
    q_out, k_out = _empty(q), _empty(k)
    if launch is _missing:
        launch = _decide_rotary(q, k, q_out, k_out, cos, inverse)
        if key[2] == traits(q, k, positions):
            keep(_decided, key, launch)
    if launch is not None:
        launch(q, k, q_out, k_out, positions, cos, sin)
    record("rotary", "rl_attn.triton_rotary", "inverse" if inverse else "-")
    return q_out, k_out


def _decide_rotary(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, inverse: bool
) -> Prepared | None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    kv_heads, half = k.shape[1], cos.shape[1]
    rest = head_dim - 2 * half
    block = min(_HEADS, _power(max(heads, kv_heads, 1)))
    blocks = -(-heads // block) + -(-kv_heads // block)
    if not tokens or not blocks:
        return None
    fixed: dict[str, Any] = {"sign": -1.0 if inverse else 1.0, "table_rows": cos.shape[0]}
    fixed |= {"heads": heads, "kv_heads": kv_heads} | _token_head(q=q, k=k, qo=q_out, ko=k_out)
    fixed |= {"HALF": half, "BLOCK_HALF": _power(half), "REST": rest, "BLOCK_REST": _power(max(1, rest))}
    return Prepared(
        kernels().rotary.rotary_kernel, (tokens, blocks), fixed | {"HEADS": block}, num_warps=4, enable_fp_fusion=False
    )


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store k, v [T, Hkv, D] at their slots; slots outside the cache are skipped."""
    key = ("write", traits(k, v, k_cache, v_cache, slots))
    launch: Any = _decided.get(key, _missing)
    if launch is _missing:
        k, v, slots = unit_last(k), unit_last(v), unit_last(slots)
        launch = _decide_write(k_cache, v_cache, k, v, slots)
        if key[1] == traits(k, v, k_cache, v_cache, slots):
            keep(_decided, key, launch)
    if launch is not None:
        launch(k, v, k_cache, v_cache, slots)


def _decide_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Prepared | None:
    blocks, heads, page, head_dim = k_cache.shape
    block = min(_HEADS, _power(heads))
    if not slots.numel():
        return None
    fixed = {"room": blocks * page, "heads": heads} | _token_head(k=k, v=v) | _cache_steps(ck=k_cache, cv=v_cache)
    fixed |= {"PAGE": page, "D": head_dim, "BLOCK_D": _power(head_dim), "HEADS": block}
    return Prepared(
        kernels().rotary.write_slots_kernel, (slots.numel(), -(-heads // block)), fixed, num_warps=4
    )  # fmt: skip


def norm_rotary_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """q normed and rotated [T, Hq, D], contiguous; k likewise and v stored at their slots."""
    kind = None if q_weight is None else q_weight.dtype
    key = ("all", eps, kind, traits(q, k, v, k_cache, v_cache, positions, slots), cos.shape, cos.dtype)
    launch: Any = _decided.get(key, _missing)
    if launch is _missing:
        check("norm_rotary_write", q, k, v, k_cache)
        q, k, v, positions, slots = (unit_last(x) for x in (q, k, v, positions, slots))
    out = _empty(q)
    if launch is _missing:
        launch = _decide_all(q, k, v, q_weight is not None, eps, cos, k_cache, v_cache, out)
        if key[3] == traits(q, k, v, k_cache, v_cache, positions, slots):
            keep(_decided, key, launch)
    if launch is not None:
        # a kernel without norm reads neither, and takes any tensor of the type
        weights = (q, k) if q_weight is None or k_weight is None else (q_weight.contiguous(), k_weight.contiguous())
        launch(q, k, v, out, *weights, k_cache, v_cache, positions, slots, cos, sin)
    return out


def _decide_all(
    q: Tensor, k: Tensor, v: Tensor, norm: bool, eps: float, cos: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor
) -> Prepared | None:
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k_cache.shape
    half = cos.shape[1]
    block, kv_block = min(_NORMED_HEADS, _power(heads)), min(_NORMED_HEADS, _power(kv_heads))
    if not tokens:
        return None
    fixed: dict[str, Any] = {"eps": eps, "table_rows": cos.shape[0], "room": blocks * page}
    fixed |= {"heads": heads, "kv_heads": kv_heads} | _token_head(q=q, k=k, v=v, o=out)
    fixed |= _cache_steps(ck=k_cache, cv=v_cache) | {"PAGE": page, "D": head_dim, "BLOCK_D": _power(head_dim)}
    fixed |= {"HALF": half, "BLOCK_HALF": _power(half), "BLOCK_REST": _power(max(1, head_dim - 2 * half))}
    return Prepared(
        kernels().rotary.norm_rotary_write_kernel, (tokens, -(-heads // block) + -(-kv_heads // kv_block)),
        fixed | {"HEADS": block, "KV_HEADS": kv_block, "NORM": norm}, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
