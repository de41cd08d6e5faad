"""GRPO's loss over response tokens in packed order: fp64 terms, one fixed order of addition, the same on every rank.

ratio = exp(logp - logp_old); loss of a token = -min(ratio A, clip(ratio) A) + kl_coef * k3, with
k3 = exp(ref - logp) - (ref - logp) - 1 (Schulman, "Approximating KL Divergence": KL(policy || reference)).
"""

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.primitives import LOG2E, exp2_f64


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The ratio is kept in ``[1 - clip_low, 1 + clip_high]``; ``kl_coef`` weighs the reference KL."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low < 1 and self.clip_high >= 0 and self.kl_coef >= 0):
            raise ContractError(f"{self}; supported: 0 <= clip_low < 1, clip_high >= 0, kl_coef >= 0")


@dataclass(frozen=True)
class Loss:
    """``value`` is an fp64 scalar with gradient; the rest are sums over valid tokens, to be added over batches."""

    value: Tensor
    valid_count: int
    clipped_count: int
    policy_sum: float
    kl_sum: float
    ratio_sum: float


def grpo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    ref_logprob: Tensor | None = None,
    config: LossConfig | None = None,
) -> Loss:
    """Sum of token losses over ``denominator``.

    Args:
        logprob: fp32 ``[n]``, with gradient.
        old_logprob, advantages: ``[n]``, fp32.
        mask: bool ``[n]``; masked tokens add nothing to value and gradient, whatever they hold.
        denominator: valid tokens of the whole step, over all micro-batches; 0 where there is none, which gives a loss
        of 0.
        ref_logprob: fp32 ``[n]``; needed where ``config.kl_coef`` is above 0.

    Raises:
        ContractError: shapes differ, or the reference is missing.
    """
    config = config or LossConfig()
    given = [old_logprob, advantages, mask] + ([] if ref_logprob is None else [ref_logprob])
    if any(t.shape != logprob.shape for t in given):
        raise ContractError(
            f"grpo_loss got shapes {[tuple(t.shape) for t in (logprob, *given)]}; all must be alike, one entry a token"
        )
    if config.kl_coef > 0 and ref_logprob is None:
        raise ContractError(f"kl_coef={config.kl_coef} needs ref_logprob; score the reference model or set kl_coef=0")
    # a masked token may hold anything, also a NaN: it leaves before any arithmetic
    logp = logprob[mask].double()
    gain = advantages[mask].double()
    ratio = _Exp.apply(logp - old_logprob[mask].double())
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    free, held = ratio * gain, clipped * gain
    policy = -torch.where(free <= held, free, held)
    terms = policy
    kl = torch.zeros_like(policy)
    if ref_logprob is not None:
        gap = ref_logprob[mask].double() - logp
        kl = _Exp.apply(gap) - gap - 1.0
        if config.kl_coef > 0:
            terms = terms + config.kl_coef * kl
    value = _FixedSum.apply(terms) / max(denominator, 1.0)
    return Loss(
        value=value,
        valid_count=int(mask.sum()),
        clipped_count=int((held < free).sum()),
        policy_sum=fixed_sum(policy),
        kl_sum=fixed_sum(kl),
        ratio_sum=fixed_sum(ratio),
    )


def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (std + eps)`` inside groups of ``group_size`` consecutive samples, fp32 ``[n]``.

    ``scale=False`` leaves out the division. A group of equal rewards gives exactly 0. std is the population's.

    Raises:
        ContractError: the number of rewards is not a multiple of ``group_size``.
    """
    if group_size < 1 or rewards.numel() % group_size:
        raise ContractError(f"{rewards.numel()} rewards, group_size={group_size}; give whole groups")
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    centred = torch.where(equal, torch.zeros_like(centred), centred)
    if scale:
        centred = centred / (centred.square().mean(1, keepdim=True).sqrt() + eps)
    return centred.flatten().float()


def fixed_sum(x: Tensor) -> float:
    """Sum of an fp64 vector in an order its length alone decides."""
    return float(_pairwise(x.detach().cpu().numpy().astype(np.float64)))


@nb.njit(cache=True, nogil=True)
def _pairwise(x: np.ndarray) -> float:
    # balanced tree: neighbours are joined level by level, a last odd element moves up as it is
    if x.size == 0:
        return 0.0
    level = x.copy()
    n = level.size
    while n > 1:
        half = n // 2
        for i in range(half):
            level[i] = level[2 * i] + level[2 * i + 1]
        if n % 2:
            level[half] = level[n - 1]
            n = half + 1
        else:
            n = half
    return level[0]


@nb.njit(cache=True, nogil=True)
def _exp(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = exp2_f64(x[i] * LOG2E)
    return out


class _Exp(torch.autograd.Function):
    """e**x in fp64 by the named primitive, so that a value does not depend on its place in the vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(_exp(x.detach().contiguous().cpu().numpy())).to(x.device)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


class _FixedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.tensor(fixed_sum(x), dtype=torch.float64, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)
