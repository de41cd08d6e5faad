"""GRPO's loss over response tokens in packed order: fp64 terms, one fixed order of addition, the same on every rank.

ratio = exp(logp - logp_old); loss of a token = -min(ratio A, clip(ratio) A) + kl_coef * k3, with
k3 = exp(ref - logp) - (ref - logp) - 1 (Schulman, "Approximating KL Divergence": KL(policy || reference)).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.checks import whole_number
from rl_contract.devices import to_device
from rl_megatron.checks import instance_problem, real, tensor_problem

_LOG2E = 1.4426950408889634
# Taylor coefficients of exp(r ln 2), highest first: at |r| <= 0.5 the first omitted term is below 2**-60
_EXP2 = [0.6931471805599453**k / math.factorial(k) for k in range(13, 0, -1)]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The ratio is kept in ``[1 - clip_low, 1 + clip_high]``; ``kl_coef`` weighs the reference KL."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        given = (self.clip_low, self.clip_high, self.kl_coef)
        if not all(map(real, given)) or not (
            0 <= self.clip_low < 1 and self.clip_high >= 0 and 0 <= self.kl_coef < math.inf
        ):
            raise ContractError(f"{self}; supported: 0 <= clip_low < 1, clip_high >= 0, finite kl_coef >= 0")


@dataclass(frozen=True)
class Loss:
    """``value`` is an fp64 scalar with gradient; the rest are sums over valid tokens, to be added over batches.

    ``sums`` is fp64 [4] on the device of the log-probabilities: policy, kl, ratio, clipped tokens. The named properties
    wait for it.
    """

    value: Tensor
    valid_count: int
    sums: Tensor

    @property
    def policy_sum(self) -> float:
        return float(self.sums[0])

    @property
    def kl_sum(self) -> float:
        return float(self.sums[1])

    @property
    def ratio_sum(self) -> float:
        return float(self.sums[2])

    @property
    def clipped_count(self) -> int:
        return int(self.sums[3])


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
        mask: bool ``[n]``; masked tokens add nothing to value and gradient, whatever they hold. On a GPU nothing waits
            for the device if the mask lies on the CPU.
        denominator: a finite number above 0, as the valid tokens of the whole step, over all micro-batches; 0 only
            where there is none, which gives a loss of 0.
        ref_logprob: fp32 ``[n]``; needed where ``config.kl_coef`` is above 0.

    Raises:
        ContractError: what is no dense tensor or no LossConfig, shapes differ, the mask is not bool, the denominator is
            none, the reference is missing, or a valid token has an old or reference log-probability or an advantage on
            the CPU that is not finite; a GPU is not waited for.
    """
    config = LossConfig() if config is None else config
    tensors = {"logprob": logprob, "old_logprob": old_logprob, "advantages": advantages, "mask": mask}
    tensors |= {} if ref_logprob is None else {"ref_logprob": ref_logprob}
    kinds = [instance_problem(n, value, Tensor) or tensor_problem(n, value) for n, value in tensors.items()]
    if wrong := [p for p in (*kinds, instance_problem("config", config, LossConfig)) if p]:
        raise ContractError("grpo_loss: " + "; ".join(wrong))
    given = [old_logprob, advantages, mask] + ([] if ref_logprob is None else [ref_logprob])
    if any(t.shape != logprob.shape for t in given):
        raise ContractError(
            f"grpo_loss got shapes {[tuple(t.shape) for t in (logprob, *given)]}; all must be alike, one entry a token"
        )
    if config.kl_coef > 0 and ref_logprob is None:
        raise ContractError(f"kl_coef={config.kl_coef} needs ref_logprob; score the reference model or set kl_coef=0")
    if mask.dtype != torch.bool:
        raise ContractError(f"grpo_loss got a mask of {mask.dtype}, supported: torch.bool; say which tokens count")
    # a masked token may hold anything, also a NaN: it leaves before any arithmetic
    valid = mask.nonzero().flatten()
    number = real(denominator) and math.isfinite(denominator)
    if not number or denominator < 0 or (denominator == 0 and valid.numel()):
        raise ContractError(
            f"grpo_loss got denominator={denominator!r} for {valid.numel()} valid tokens; supported: a finite number "
            "above 0, and 0 where no token is valid; give the number of valid tokens of the whole step"
        )
    for name in ("old_logprob", "advantages", "ref_logprob"):
        _refuse_nonfinite(name, tensors.get(name), valid)
    kept = to_device(valid, logprob.device)
    logp = logprob.index_select(0, kept).double()
    gain = advantages[kept].double()
    ratio = _Exp.apply(logp - old_logprob[kept].double())
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    free, held = ratio * gain, clipped * gain
    policy = -torch.where(free <= held, free, held)
    terms = policy
    kl = torch.zeros_like(policy)
    if ref_logprob is not None:
        gap = ref_logprob[kept].double() - logp
        kl = _Exp.apply(gap) - gap - 1.0
        if config.kl_coef > 0:
            terms = terms + config.kl_coef * kl
    beside = torch.stack([x.detach() for x in (policy, kl, ratio, (held < free).double())])
    total, sums = _FixedSum.apply(terms, beside)
    # a GPU would multiply by a number's reciprocal; a tensor it divides by
    value = total / torch.full_like(total, denominator or 1.0)
    return Loss(
        value=value,
        valid_count=valid.numel(),
        sums=sums,
    )


def _refuse_nonfinite(name: str, values: Tensor | None, valid: Tensor) -> None:
    # a look at a GPU would wait for it; a trainer looks at its numbers on the host, before they travel
    if values is None or values.is_cuda or valid.is_cuda:
        return
    bad = valid[~values[valid].isfinite()]
    if bad.numel():
        raise ContractError(
            f"grpo_loss got {name}[{int(bad[0])}]={values[bad[0]].item()} ({bad.numel()} such), supported: finite "
            "numbers where the mask is True; mask such tokens, or leave their sample out"
        )


def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (std + eps)`` inside groups of ``group_size`` consecutive samples, fp32 ``[n]``.

    ``scale=False`` leaves out the division. A group of equal rewards gives exactly 0. std is the population's.

    Raises:
        ContractError: the rewards are no dense tensor of finite numbers, their number is not a multiple of
            ``group_size``, or ``eps`` is no number of 0 and above.
    """
    if problem := tensor_problem("rewards", rewards):
        raise ContractError(f"group_advantages: {problem}")
    if not isinstance(rewards, Tensor) or rewards.is_complex():
        raise ContractError(f"rewards={rewards!r:.80}, supported: a tensor of numbers, torch.tensor(rewards)")
    if not real(eps) or not 0 <= eps < math.inf:
        raise ContractError(f"eps={eps!r}, supported: a finite number of 0 and above")
    if not whole_number(group_size) or group_size < 1:
        raise ContractError(f"group_size={group_size!r}, supported: an integer of 1 and above; give samples a prompt")
    if rewards.numel() % group_size:
        raise ContractError(f"{rewards.numel()} rewards, group_size={group_size}; give whole groups")
    finite = rewards.isfinite().flatten()
    if not finite.all():
        at = int(finite.logical_not().nonzero()[0])
        raise ContractError(
            f"the reward of sample {at} is {rewards.flatten()[at].item()}, supported: finite numbers; a sample without "
            "a reward takes no part, leave its group out"
        )
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    centred = torch.where(equal, torch.zeros_like(centred), centred)
    if scale:
        centred = centred / (centred.square().mean(1, keepdim=True).sqrt() + eps)
    return centred.flatten().float()


def tree_total(x: Tensor) -> Tensor:
    """Sums of fp64 ``[..., n]`` along its last dimension by a balanced tree that n alone decides, on its device.

    Neighbours are joined level by level, a last odd element moves up as it is.
    """
    n = x.shape[-1]
    if n == 0:
        return x.new_zeros(x.shape[:-1])
    # -0.0 is the identity of addition: what is joined with it moves up as it is
    whole = 1 << (n - 1).bit_length()
    x = x.clone() if whole == n else torch.nn.functional.pad(x, (0, whole - n), value=-0.0)
    while whole > 1:
        whole //= 2
        left, right = x.reshape(*x.shape[:-1], whole, 2).unbind(-1)
        x = left + right
    return x.squeeze(-1)


def fixed_sum(x: Tensor) -> float:
    """``tree_total`` as a number; waits for a GPU."""
    return float(tree_total(x.detach().double()))


def exp_f64(x: Tensor) -> Tensor:
    """e**x in fp64 by additions, multiplications and a power of two, each rounded by itself: one value on any device.

    x is clamped to +-1000 / log2(e), which log-probabilities never see. NaN in gives NaN out.
    """
    x = (x * _LOG2E).clamp(-1000.0, 1000.0)
    n = (x + 0.5).floor()
    r = x - n
    p = r * _EXP2[0] + _EXP2[1]
    for c in (*_EXP2[2:], 1.0):
        p = p * r + c
    # a NaN must not reach the integer conversion, whose result would be undefined
    exponent = torch.where(n == n, n, 0.0).to(torch.int64) + 1023
    return p * (exponent << 52).view(torch.float64)


class _Exp(torch.autograd.Function):
    """e**x whose value does not depend on its place in the vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = exp_f64(x.detach())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


class _FixedSum(torch.autograd.Function):
    """``tree_total`` of x [n], and without a gradient of each row of ``beside`` [m, n], by one tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        ctx.shape = x.shape
        total, *others = tree_total(torch.cat([x.detach()[None], beside])).unbind()
        sums = torch.stack(others)
        ctx.mark_non_differentiable(sums)
        return total.clone(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].expand(ctx.shape), None
