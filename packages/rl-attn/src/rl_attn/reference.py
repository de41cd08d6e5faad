"""The slow oracle: plain torch, fp32 elementwise steps in the order that the contract states, no kernels."""

import numpy as np
import torch
from numba import vectorize

from rl_contract import primitives
from rl_contract.devices import host_array
from rl_contract.profile import KEY_TILE, SEGMENT

LOG2E = 1.4426950408889634
_EXP2 = vectorize(["float32(float32)"])(lambda x: primitives.exp2_f32(x))
_LOG = vectorize(["float32(float32)"])(lambda x: primitives.log_f32(x))


def _exp2(x: torch.Tensor) -> torch.Tensor:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(_EXP2(host_array(x))))


def _shift(m: torch.Tensor, m_new: torch.Tensor) -> torch.Tensor:
    """exp2(m - m_new), 0 where m is the empty state."""
    return torch.where(m == -torch.inf, torch.zeros(()), _exp2(m - m_new))


State = tuple[torch.Tensor, torch.Tensor]  # m [R, H], O with the row sum as one more column [R, H, D + 1]


def _exact(x: float) -> torch.Tensor:
    """A number rounded to fp32, as a scalar tensor that does not promote."""
    return torch.tensor(float(np.float32(x)))


def empty_state(rows: int, heads: int, head_dim: int) -> State:
    return torch.full((rows, heads), -torch.inf), torch.zeros(rows, heads, head_dim + 1)


def scores_reference(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 [R, Hq, S]: chain over head_dim, then times fp32(scale * log2(e)); q [R, Hq, D], k [S, Hkv, D]."""
    q32, k32 = q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.zeros(q.shape[0], q.shape[1], k.shape[0])
    for d in range(q.shape[2]):
        scores = scores + q32[:, :, d, None] * k32[:, :, d].T
    return scores * _exact(float(scale) * LOG2E)


def segment_reference(
    scores: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, begin: int, end: int, key_tile: int
) -> State:
    """Keys begin..end-1 from the empty state, in tiles; v [S, Hkv, D]."""
    rows, heads, _ = scores.shape
    # the row sum is one more column of O: the same dot, with a value of one
    values = torch.cat([v.float().repeat_interleave(heads // v.shape[1], dim=1), torch.ones(v.shape[0], heads, 1)], -1)
    m, o = empty_state(rows, heads, v.shape[2])
    for first in range(begin, end, key_tile):
        keys = torch.arange(first, min(first + key_tile, end))
        seen = (keys <= positions[:, None])[:, None]  # [R, 1, keys]
        s = torch.where(seen, scores[:, :, keys], torch.tensor(-torch.inf))
        m_new = torch.maximum(m, s.amax(-1))
        p = _shift(s, m_new[..., None]).to(v.dtype).float()
        o = torch.where(seen.any(-1)[..., None], o * _shift(m, m_new)[..., None], o)
        for n, j in enumerate(keys.tolist()):
            o = torch.where(seen[:, :, n, None], o + p[:, :, n, None] * values[j], o)
        m = m_new
    return m, o


def fold_reference(total: State, part: State) -> State:
    """total (+) part; a part without a visible key changes nothing."""
    m = torch.maximum(total[0], part[0])
    folded = total[1] * _shift(total[0], m)[..., None] + part[1] * _shift(part[0], m)[..., None]
    return m, torch.where((part[0] == -torch.inf)[..., None], total[1], folded)


def finish_reference(total: State, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out = O / l rounded to ``dtype``, and lse fp32."""
    m, o = total
    l = o[..., -1:]  # noqa: E741  the row sum
    out = torch.where(l != 0, o[..., :-1] / l, torch.zeros(()))
    lse = m * _exact(0.6931471805599453) + torch.from_numpy(np.asarray(_LOG(host_array(l[..., 0]))))
    return out.to(dtype), lse


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    key_tile: int = KEY_TILE,
    segment: int = SEGMENT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [R, Hq, D] at ``positions`` [R], k and v [S, Hkv, D] -> out as q, lse fp32 [R, Hq]."""
    scores = scores_reference(q, k, scale)
    total = empty_state(*q.shape)
    for begin in range(0, k.shape[0], segment):
        end = min(begin + segment, k.shape[0])
        total = fold_reference(total, segment_reference(scores, v, positions, begin, end, key_tile))
    return finish_reference(total, q.dtype)


def rotary_reference(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] rotated by cos, sin fp32 [P, rotary_dim/2]."""
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    y = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1).to(x.dtype)
    return torch.cat([y, x[..., 2 * half :]], dim=-1)
