"""Launches of the rotation and of the cache writes on a GPU; order and rounding are those of ``triton_rotary``."""

from torch import Tensor

from rl_attn.gpu import check, kernels, unit_last


def token_head(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in (x.stride(0), x.stride(1)))


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """x [T, H, D] rotated, contiguous; cos, sin fp32 [P, rotary_dim/2]."""
    check("rotary", x)
    x = unit_last(x)
    tokens, heads, head_dim = x.shape
    out = x.new_empty(x.shape)
    half = cos.shape[1]
    rest = head_dim - 2 * half
    block = min(8, _power(heads))
    if tokens:
        kernels().rotary.rotary_kernel[(tokens, -(-heads // block))](
            x, out, positions, cos, sin, -1.0 if inverse else 1.0, cos.shape[0], tokens, heads, *token_head(x, out),
            HALF=half, BLOCK_HALF=_power(half), REST=rest, BLOCK_REST=_power(max(1, rest)), HEADS=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store k, v [T, Hkv, D] at their slots; slots outside the cache are skipped."""
    k, v = unit_last(k), unit_last(v)
    blocks, heads, page, head_dim = k_cache.shape
    block = min(8, _power(heads))
    if slots.numel():
        kernels().rotary.write_slots_kernel[(slots.numel(), -(-heads // block))](
            k, v, k_cache, v_cache, slots, blocks * page, heads, *token_head(k, v), *k_cache.stride()[:3],
            *v_cache.stride()[:3], PAGE=page, D=head_dim, BLOCK_D=_power(head_dim), HEADS=block, num_warps=4,
        )  # fmt: skip


def norm_rotary_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """q normed and rotated [T, Hq, D], contiguous; k likewise and v stored at their slots."""
    check("norm_rotary_write", q, k, v, k_cache)
    q, k, v = unit_last(q), unit_last(k), unit_last(v)
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k_cache.shape
    out = q.new_empty(q.shape)
    half = cos.shape[1]
    rest = head_dim - 2 * half
    block = min(8, _power(kv_heads))
    if tokens:
        kernels().rotary.norm_rotary_write_kernel[(tokens, -(-heads // block) + -(-kv_heads // block))](
            q, k, v, out, q if q_weight is None else q_weight.contiguous(),
            k if k_weight is None else k_weight.contiguous(), k_cache, v_cache, positions,
            slots, cos, sin, eps, cos.shape[0], blocks * page, heads, kv_heads, *token_head(q, k, v, out),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            PAGE=page, D=head_dim, BLOCK_D=_power(head_dim), HALF=half, BLOCK_HALF=_power(half),
            BLOCK_REST=_power(max(1, rest)), HEADS=block, NORM=q_weight is not None, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
