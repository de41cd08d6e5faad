"""The mismatch figures other frameworks plot, each under its own name and by its own formula.

d = train - rollout, ratio = exp(d). Names that look alike are not alike: verl's ``rollout_probs_diff`` compares
probabilities, slime averages sample means, NeMo-RL's ``token_mult_prob_error`` is ideal at 1.
"""

import torch
from torch import Tensor

_SAFETY = 20.0


def framework_figures(
    rollout: Tensor, train: Tensor, owner: Tensor, mismatch_count: int
) -> dict[str, float | int | None]:
    """Figures over finite pairs.

    Args:
        rollout, train: fp64 [n], log-probabilities.
        owner: int [n], the sample of each.
        mismatch_count: pairs whose bits differ.

    Returns:
        ``None`` for every figure over nothing, except verl's ``rollout_probs_diff_valid``, which is 0 then.
    """
    if rollout.numel() == 0:
        empty = torch.zeros(1, dtype=torch.float64)
        names = framework_figures(empty, empty, torch.zeros(1, dtype=torch.int64), 0)
        return {**dict.fromkeys(names), "training/rollout_probs_diff_valid": 0}
    d = train - rollout
    size, ratio, k3 = d.abs(), torch.exp(d.clamp(max=700.0)), torch.expm1(d.clamp(max=700.0)) - d
    _, index = owner.unique(return_inverse=True)
    counts = torch.bincount(index).double()

    def per_sample(x: Tensor) -> Tensor:
        return torch.bincount(index, weights=x) / counts

    probs_diff = (train.exp() - rollout.exp()).abs()
    train_mean, rollout_mean = per_sample(train), per_sample(rollout)
    log_ppl_diff = rollout_mean - train_mean
    sum_d = (per_sample(d) * counts).clamp(-_SAFETY, _SAFETY)
    mixture = torch.log(0.5 * train.exp() + 0.5 * rollout.exp())
    js = 0.5 * _k3(train - mixture) + 0.5 * _k3(rollout - mixture)
    slime = per_sample(size).mean()
    weight = torch.exp(d.clamp(-_SAFETY, _SAFETY))
    figures = {
        # slime, vime, miles: mean of sample means
        "train/train_rollout_logprob_abs_diff": slime,
        "train_current_rollout_logprob_abs_diff": slime,
        "train_current_rollout_logprob_max_abs_diff": size.max(),
        # slime: before its clip
        "train/tis": per_sample(ratio).mean(),
        "train/tis_abs": per_sample((ratio - 1).abs()).mean(),
        # verl: probabilities, sample standard deviation
        "training/rollout_probs_diff_max": probs_diff.max(),
        "training/rollout_probs_diff_mean": probs_diff.mean(),
        "training/rollout_probs_diff_std": probs_diff.std() if len(probs_diff) > 1 else None,
        "training/rollout_actor_probs_pearson_corr": _pearson(rollout.exp(), train.exp()),
        # verl, ms-swift
        "rollout_corr/kl": -d.mean(),
        "rollout_corr/k3_kl": k3.mean(),
        "rollout_corr/training_ppl": (-train_mean).exp().mean(),
        "rollout_corr/rollout_ppl": (-rollout_mean).exp().mean(),
        "rollout_corr/ppl_ratio": log_ppl_diff.exp().mean(),
        "rollout_corr/training_log_ppl": -train_mean.mean(),
        "rollout_corr/rollout_log_ppl": -rollout_mean.mean(),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "rollout_corr/log_ppl_diff_max": log_ppl_diff.max(),
        "rollout_corr/log_ppl_diff_min": log_ppl_diff.min(),
        "rollout_corr/chi2_token": torch.exp(2 * d.clamp(-_SAFETY, _SAFETY)).mean() - 1,
        "rollout_corr/chi2_seq": torch.exp(2 * sum_d).mean() - 1,
        # verl: token weights, before its thresholds
        "rollout_corr/rollout_is_mean": weight.mean(),
        "rollout_corr/rollout_is_min": weight.min(),
        "rollout_corr/rollout_is_max": weight.max(),
        "rollout_corr/rollout_is_eff_sample_size": 1 / (weight / weight.mean()).square().mean(),
        # NeMo-RL
        "train/token_mult_prob_error": torch.exp(size.clamp(max=700.0)).mean(),
        "train/gen_kl_error": k3.mean(),
        "train/policy_kl_error": _k3(-d).mean(),
        "train/js_divergence_error": js.mean(),
        # SkyRL
        "policy/rollout_train_logprobs_abs_diff_mean": size.mean(),
        "policy/rollout_train_logprobs_abs_diff_std": size.std() if len(size) > 1 else None,
        "policy/rollout_train_logprobs_abs_diff_max": size.max(),
        "policy/rollout_train_logprobs_abs_diff_min": size.min(),
        # TRL, token level, before its cap
        "sampling/sampling_logp_difference/mean": size.mean(),
        "sampling/sampling_logp_difference/max": size.max(),
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
        # prime-rl: mean of sample means
        "mismatch_kl/all/mean": per_sample(k3).mean(),
        # AReaL, without its cap
        "behave_imp_weight": ratio.mean(),
        "behave_approx_kl": d.mean(),
        "rollout_train_k3_kl": k3.mean(),
        "rollout_train_extreme_frac_tau2": ((ratio > 2) | (ratio < 0.5)).double().mean(),
        # torchtitan
        "logprob_diff/mean": size.mean(),
        "logprob_diff/max": size.max(),
        # open-instruct
        "vllm_vs_local_logprob_diff_mean": size.mean(),
    }
    out: dict[str, float | int | None] = {k: None if v is None else float(v) + 0.0 for k, v in figures.items()}
    out["training/rollout_probs_diff_valid"] = 1
    out["train_current_rollout_logprob_mismatch_count"] = mismatch_count
    return out


def _k3(x: Tensor) -> Tensor:
    return torch.expm1(x.clamp(max=700.0)) - x


def _pearson(a: Tensor, b: Tensor) -> Tensor | None:
    """Correlation of two vectors; None where one of them does not vary."""
    a, b = a - a.mean(), b - b.mean()
    scale = a.norm() * b.norm()
    return (a @ b) / scale if float(scale) > 0 else None
