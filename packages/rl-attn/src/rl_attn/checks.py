"""Refusals shared by the public functions: what was given, what is supported, what to do."""

from typing import Any

import numpy as np
import torch

from rl_contract import ContractError, MissingSupport
from rl_contract.checks import require_tensor, whole_number

FAMILIES = ("segments", "nosplit")
# kernels take scale, and scale * log2(e), as normal fp32 numbers
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
INDEX_DTYPES = (torch.int32, torch.int64)
DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float16)}


def require_device(where: str, **tensors: torch.Tensor) -> None:
    """Dense tensors that hold values, all on one device, and that device has kernels."""
    for name, x in tensors.items():
        require_tensor(where, name, x)
    devices = {x.device for x in tensors.values()}
    if len(devices) != 1:
        raise ContractError(f"{where} got tensors on {sorted(map(str, devices))}; all must be on one device")
    device = next(iter(devices)).type
    if device not in DTYPES:
        raise MissingSupport(
            f"{where} got tensors on {device!r}; kernels exist for {list(DTYPES)}, move the tensors there"
        )


def require_on(where: str, device: torch.device, **tensors: torch.Tensor) -> None:
    """Each a tensor on ``device``."""
    for name, x in tensors.items():
        require_tensor(where, name, x)
        if x.device != device:
            raise ContractError(
                f"{where} got {name} on {x.device} beside tensors on {device}; all must be on one device, pass "
                f"{name}.to({str(device)!r})"
            )


def require_kind(where: str, name: str, x: Any, kind: type, remedy: str) -> None:
    if not isinstance(x, kind):
        raise ContractError(
            f"{where} got {name} as {type(x).__name__} {str(x)[:40]!r}; supported: a {kind.__name__}, {remedy}"
        )


def require_dtype(where: str, **tensors: torch.Tensor) -> None:
    dtypes = {name: x.dtype for name, x in tensors.items()}
    supported = DTYPES.get(next(iter(tensors.values())).device.type, DTYPES["cpu"])
    if len(set(dtypes.values())) != 1 or next(iter(dtypes.values())) not in supported:
        raise ContractError(f"{where} got {dtypes}; supported: one dtype for all, one of {supported}, cast first")


def require_heads(where: str, q_heads: int, kv_heads: int, head_dim: int) -> None:
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ContractError(f"{where} got {q_heads} query heads and {kv_heads} kv heads; Hq must be a multiple of Hkv")
    if head_dim < 8 or head_dim > 256 or head_dim % 8:
        raise ContractError(f"{where} got head_dim={head_dim}; supported: multiples of 8 up to 256, pad q, k and v")


def require_indices(where: str, **tensors: torch.Tensor) -> None:
    """int32 or int64 each; no value is looked at, so nothing waits for a GPU."""
    for name, x in tensors.items():
        require_tensor(where, name, x)
        if x.dtype not in INDEX_DTYPES:
            raise ContractError(f"{where} got {name} of {x.dtype}; supported: {INDEX_DTYPES}, make them as integers")


def require_tiles(where: str, scale: float, key_tile: int, segment: int) -> None:
    if not (whole_number(key_tile) and whole_number(segment)):
        raise ContractError(
            f"{where} got key_tile={key_tile!r}, segment={segment!r}; supported: integers; take both from the profile"
        )
    if key_tile < 16 or key_tile % 16 or not key_tile <= segment < 2**31 or segment % key_tile:
        raise ContractError(
            f"{where} got key_tile={key_tile}, segment={segment}; supported: key_tile a multiple of 16, segment a "
            "multiple of key_tile below 2**31; take both from the profile"
        )
    real = isinstance(scale, (int, float, np.floating)) and not isinstance(scale, bool)
    if not real or not MIN_SCALE <= scale <= MAX_SCALE:
        raise ContractError(
            f"{where} got scale={scale!r}; supported: a positive number from {MIN_SCALE:g} to {MAX_SCALE:g}, which "
            "fp32 holds, usually head_dim ** -0.5"
        )


def require_family(where: str, family: str) -> None:
    if not isinstance(family, str) or family not in FAMILIES:
        raise ContractError(f"{where} got family={family!r}; supported: {FAMILIES}, take it from the profile")


def refuse_variants(where: str, options: dict[str, Any]) -> None:
    """Name the attention variants that an engine may ask for and that the contract does not cover."""
    neutral: dict[str, tuple[Any, ...]] = {
        "causal": (True,),
        "sliding_window": (None, -1, (-1, -1)),
        "window_size": (None, (-1, -1)),
        "softcap": (None, 0, 0.0),
        "alibi_slopes": (None,),
        "sinks": (None,),
        "dropout": (None, 0, 0.0),
    }
    for name, value in options.items():
        if name not in neutral:
            known = ", ".join(f"{option}={values[0]!r}" for option, values in neutral.items())
            raise ContractError(f"{where} got an unknown option {name}={value!r}; supported: {known}; leave it out")
        # what is no plain value, a tensor or an array, is none of these, and may not be comparable
        plain = isinstance(value, (int, float, tuple, np.generic))
        if not any(value is x or (plain and value == x) for x in neutral[name]):
            raise ContractError(
                f"{where} got {name}={value!r}; supported: causal attention over the full context, "
                f"{name} in {neutral[name]}; use a model without it"
            )


def require_cu_seqlens(where: str, name: str, cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Starts at 0, never falls, ends at the number of tokens."""
    require_tensor(where, name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in INDEX_DTYPES:
        raise ContractError(
            f"{where} got {name} {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; supported: int32 or int64 "
            "[sequences + 1]"
        )
    falls = bool((cu_seqlens[1:] < cu_seqlens[:-1]).any())
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or falls:
        raise ContractError(
            f"{where} got {name}={cu_seqlens.tolist()[:16]} for {tokens} tokens; it must start at 0, never fall and "
            "end at the number of tokens; slice padding rows off first"
        )


def check_call(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    key_tile: int,
    segment: int,
    variants: dict[str, Any],
) -> None:
    """Refuse what the contract does not cover in tensors, tiles and variants of a packed call."""
    refuse_variants(where, variants)
    require_device(where, q=q, k=k, v=v)
    require_dtype(where, q=q, k=k, v=v)
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ContractError(
            f"{where} got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; supported: q [Tq, Hq, D], "
            "k and v [Tk, Hkv, D]"
        )
    require_heads(where, q.shape[1], k.shape[1], q.shape[2])
    require_tiles(where, scale, key_tile, segment)
