"""What a decode step does between its projections and attention, as one operator: q/k norm, rotation, cache write.

Same bits as the three operators one after the other, contracts ``norm`` (of ``rl_norm``) and ``rotary``: the norm's
output is rounded to the model's type before it is rotated, and the cache receives what the rotation has rounded.
"""

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from rl_attn import cpu_rotary, eager, gpu, gpu_rotary, ops
from rl_attn.calls import looks, right
from rl_attn.checks import require_device, require_dtype, require_heads, require_indices, require_kind
from rl_attn.paged import PagedKV
from rl_attn.rope import RopeTable
from rl_contract import ContractError, Launch, record_launch
from rl_contract.checks import require_tensor
from rl_contract.opaque import opaque_op
from rl_contract.triton_launch import keep


@opaque_op("rl_attn::norm_rotary_write", mutates_args=("k_cache", "v_cache"))
def norm_rotary_write_op(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """q as attention takes it, contiguous [T, Hq, D]; k and v at their slots. Nothing is written after an error."""
    if q_weight is not None and k_weight is not None:
        q, k = _norm(q, q_weight, eps), _norm(k, k_weight, eps)
        record_launch(Launch("norm", "rl_attn.cpu_rotary.norm"))
    q, k = ops.rotary(q, k, positions, cos, sin, False)
    ops.write(k_cache, v_cache, k, v, slot_mapping)
    return q


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = ops.unit_last(x)
    out = x.new_empty(x.shape)
    cpu_rotary.norm(
        ops.flat(x), ops.strides(x.stride(0), x.stride(1)), ops.dense(weight.contiguous()), np.float32(eps),
        ops.dense(out),
    )  # fmt: skip
    return out


@norm_rotary_write_op.register_fake
def _(q, k, v, q_weight, k_weight, eps, positions, cos, sin, k_cache, v_cache, slot_mapping):
    return q.new_empty(q.shape)


@norm_rotary_write_op.register_kernel("cuda")
def _launch(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    result = gpu_rotary.norm_rotary_write(
        q, k, v, q_weight, k_weight, eps, positions, cos, sin, k_cache, v_cache, slot_mapping
    )
    if q_weight is not None:
        gpu.record("norm", "rl_attn.triton_rotary.norm_rotary_write")
    gpu.record("rotary", "rl_attn.triton_rotary.norm_rotary_write", "-", "paged")
    return result


def norm_rotary_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, table: RopeTable, cache: PagedKV, slot_mapping: Tensor, *,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float | None = None,
) -> Tensor:  # fmt: skip
    """Norm and rotate queries and keys, store keys and values; no gradient.

    Equal in every bit to ``rl_norm.rms_norm`` of q and of k (where weights are given), ``rotary``, ``write_paged``.

    Args:
        q: ``[T, Hq, D]``. k, v: ``[T, Hkv, D]`` of one dtype, the cache's, in memory apart from it; any strides whose
            last one is 1.
        positions: int ``[T]``, absolute. table: from ``rope_table``.
        cache: written in place. slot_mapping: int ``[T]``; a negative slot is padding, its key and value are skipped.
        q_weight, k_weight: ``[D]`` of the same dtype, both or none. eps: of the norm, with weights alone.

    Returns:
        q as ``attention_paged`` takes it: ``[T, Hq, D]``, contiguous.

    Raises:
        ContractError: shapes, dtypes, one weight without the other or without eps, a position outside the table, a slot
            beyond the cache; nothing is written then. On a GPU the last two are not looked at: what is rotated
            becomes NaN, the slot is skipped.
        MissingSupport: a device without kernels.
    """
    where = "norm_rotary_write"
    plain = type(table) is RopeTable and type(cache) is PagedKV
    direct = plain and gpu.direct(q, k, v, cache.k, positions, slot_mapping)
    weights = [x for x in (q_weight, k_weight) if x is not None]
    key = None
    if direct and type(eps) in (float, type(None)) and all(type(x) in (Tensor, Parameter) for x in weights):
        key = (where, eps, q_weight is None, k_weight is None, table.on(q.device)[0].shape,
               *looks(q, k, v, cache.k, positions, slot_mapping, *weights))  # fmt: skip
    if key is None or key not in right:
        _check(where, q, k, v, positions, table, cache, slot_mapping, q_weight, k_weight, eps)
        if key is not None:
            keep(right, key, None)
    if not q.is_cuda and q.shape[0]:
        _check_values(where, positions, table.max_positions, slot_mapping, cache.num_blocks * cache.block_size)
    cache.refuse_overlap(where, q=q, k=k, v=v)
    cos, sin = table.on(q.device)
    rest = (float(eps or 0.0), positions, cos, sin, cache.k, cache.v, slot_mapping)
    if direct:
        result = _launch(q, k, v, q_weight, k_weight, *rest)
        eager.count_writes(cache.k, cache.v)
        return result
    both = (None, None) if q_weight is None or k_weight is None else (q_weight.detach(), k_weight.detach())
    found: Tensor = norm_rotary_write_op(q.detach(), k.detach(), v.detach(), *both, *rest)
    return found


def _check(
    where: str, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, table: RopeTable, cache: PagedKV,
    slot_mapping: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None,
) -> None:  # fmt: skip
    require_kind(where, "table", table, RopeTable, "build it with rope_table")
    require_kind(where, "cache", cache, PagedKV, "view the engine's cache with PagedKV(k, v)")
    pages = {"cache.k": cache.k, "cache.v": cache.v}
    require_device(where, q=q, k=k, v=v, positions=positions, slot_mapping=slot_mapping, **pages)
    require_dtype(where, q=q, k=k, v=v, cache=cache.k)
    require_indices(where, positions=positions, slot_mapping=slot_mapping)
    tokens = q.shape[0] if q.dim() else 0
    keys = (tokens, cache.num_kv_heads, cache.head_dim)
    if q.dim() != 3 or q.shape[2] != cache.head_dim or tuple(k.shape) != keys or tuple(v.shape) != keys:
        raise ContractError(
            f"{where} got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; supported for this cache: "
            f"[T, Hq, {cache.head_dim}] and twice [T, {cache.num_kv_heads}, {cache.head_dim}]"
        )
    require_heads(where, q.shape[1], k.shape[1], q.shape[2])
    if positions.shape != (tokens,) or slot_mapping.shape != (tokens,):
        raise ContractError(
            f"{where} got positions {tuple(positions.shape)}, slot_mapping {tuple(slot_mapping.shape)} for {tokens} "
            "tokens; supported: one of each a token, slice padding rows off first"
        )
    if table.rotary_dim > cache.head_dim:
        raise ContractError(
            f"{where} got rotary_dim={table.rotary_dim} for head_dim={cache.head_dim}; build another table"
        )
    _check_norm(where, q, q_weight, k_weight, eps)


def _check_norm(where: str, q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None) -> None:
    given = [x for x in (q_weight, k_weight, eps) if x is not None]
    if len(given) not in (0, 3):
        raise ContractError(
            f"{where} got q_weight, k_weight, eps as {[x is not None for x in (q_weight, k_weight, eps)]} (given or "
            "not); supported: all three, or none for a model without q/k norm"
        )
    if q_weight is None or k_weight is None or eps is None:
        return
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        require_tensor(where, name, weight)
        if weight.shape != q.shape[2:] or weight.dtype != q.dtype or weight.device != q.device:
            raise ContractError(
                f"{where} got {name} {tuple(weight.shape)} {weight.dtype} on {weight.device}; supported: "
                f"[{q.shape[2]}] {q.dtype} on {q.device}"
            )
    real = isinstance(eps, (int, float, np.floating)) and not isinstance(eps, bool)
    if not real or not 2.0**-126 <= eps < 2.0**128:
        raise ContractError(f"{where} got eps={eps!r}; supported: a positive normal fp32, the module's own")


def _check_values(where: str, positions: Tensor, longest: int, slots: Tensor, room: int) -> None:
    low, high, slot = int(positions.min()), int(positions.max()), int(slots.max())
    if low < 0 or high >= longest:
        raise ContractError(
            f"{where} got positions from {low} to {high}; the table holds 0 to {longest - 1}; build a longer rope_table"
        )
    if slot >= room:
        raise ContractError(
            f"{where} got slot {slot}; supported: below {room} (num_blocks * block_size), or negative for padding"
        )
