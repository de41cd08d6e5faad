"""The slow oracle: plain torch, fp32 elementwise steps in the order that the contract states, no kernels."""

import numpy as np
import torch
from numba import vectorize

from rl_contract import primitives

LOG2E = 1.4426950408889634
_EXP2 = vectorize(["float32(float32)"])(lambda x: primitives.exp2_f32(x))
_LOG = vectorize(["float32(float32)"])(lambda x: primitives.log_f32(x))


def _exp2(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_EXP2(x.numpy())))


def _shift(m: torch.Tensor, m_new: torch.Tensor) -> torch.Tensor:
    """exp2(m - m_new), 0 where m is the empty state."""
    return torch.where(m == -torch.inf, torch.zeros(()), _exp2(m - m_new))


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    key_tile: int = 64,
    segment: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [R, Hq, D] at ``positions`` [R], k and v [S, Hkv, D] -> out as q, lse fp32 [R, Hq]."""
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    q32 = q.float()
    k32 = k.float().repeat_interleave(group, dim=1)
    v32 = v.float().repeat_interleave(group, dim=1)
    c = torch.tensor(float(np.float32(float(scale) * LOG2E)))
    last = positions[:, None]

    scores = torch.zeros(rows, heads, k.shape[0])
    for d in range(head_dim):
        scores = scores + q32[:, :, d, None] * k32[:, :, d].T
    scores = scores * c

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        # the row sum is one more column of O: the same dot, with a value of one
        return torch.full((rows, heads), -torch.inf), torch.zeros(rows, heads, head_dim + 1)

    values = torch.cat([v32, torch.ones(*v32.shape[:2], 1)], dim=-1)
    total_m, total = empty()
    for begin in range(0, k.shape[0], segment):
        m, o = empty()
        for first in range(begin, min(begin + segment, k.shape[0]), key_tile):
            keys = torch.arange(first, min(first + key_tile, k.shape[0]))
            seen = keys <= last[..., None]  # [R, 1, keys]
            s = torch.where(seen, scores[:, :, keys], torch.tensor(-torch.inf))
            m_new = torch.maximum(m, s.amax(-1))
            p = _shift(s, m_new[..., None]).to(v.dtype).float()
            any_seen = seen.any(-1)[..., None]
            o = torch.where(any_seen, o * _shift(m, m_new)[..., None], o)
            for n, j in enumerate(keys.tolist()):
                o = torch.where(seen[:, :, n, None], o + p[:, :, n, None] * values[j], o)
            m = m_new
        m_new = torch.maximum(total_m, m)
        folded = total * _shift(total_m, m_new)[..., None] + o * _shift(m, m_new)[..., None]
        total = torch.where(last[..., None] >= begin, folded, total)
        total_m = m_new
    denominator = total[..., head_dim]
    out = torch.where(denominator[..., None] != 0, total[..., :head_dim] / denominator[..., None], torch.zeros(()))
    ln2 = torch.tensor(float(np.float32(0.6931471805599453)))
    lse = total_m * ln2 + torch.from_numpy(np.asarray(_LOG(denominator.numpy())))
    return out.to(q.dtype), lse


def rotary_reference(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] rotated by cos, sin fp32 [P, rotary_dim/2]."""
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    y = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1).to(x.dtype)
    return torch.cat([y, x[..., 2 * half :]], dim=-1)
