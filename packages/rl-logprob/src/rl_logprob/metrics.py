"""How far train and rollout log-probabilities are apart: integers first, then figures named by what they average.

Everywhere d = train - rollout in fp64 over valid pairs, ratio = exp(d). A figure over nothing is ``None``, never 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError, compare
from rl_logprob.checks import check_tensor
from rl_logprob.frameworks import framework_figures

# Lower edges are included below 1, upper edges above it; exactly 1 has its own bucket.
_BELOW = (0.0, 0.5, 0.8, 0.99)
_ABOVE = (1.01, 1.25, 2.0)
RATIO_BUCKETS = (
    "[0, 0.5)",
    "[0.5, 0.8)",
    "[0.8, 0.99)",
    "[0.99, 1)",
    "exactly 1",
    "(1, 1.01]",
    "(1.01, 1.25]",
    "(1.25, 2]",
    "above 2",
)


def as_logprobs(values: Sequence[float | None]) -> Tensor:
    """fp32 log-probabilities in which ``None`` becomes NaN, the mark of an absent value."""
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float32)


def rollout_metrics(
    rollout_logprob: Tensor | None,
    train_logprob: Tensor,
    mask: Tensor,
    *,
    sample_ids: Tensor | None = None,
    rollout_tokens: Tensor | None = None,
    train_tokens: Tensor | None = None,
) -> dict[str, Any]:
    """Compare the two sides of a batch bit by bit, and describe the difference.

    Args:
        rollout_logprob: fp32, packed [T] or [samples, length]; NaN marks a value the engine did not return, ``None``
            that it returned none at all.
        train_logprob: fp32, same shape. With old and current policy at hand, call once for each.
        mask: bool, same shape: the tokens that bear loss, not the attention mask.
        sample_ids: int, same shape: the sample of each token. Default: the row for two dimensions, else one sample.
        rollout_tokens, train_tokens: ids each side scored, same shape.

    Returns:
        A dictionary ready for JSON:

        ``valid_count``: masked-in pairs of which the rollout value is present. ``mismatch_count``: those whose bits
        differ. ``nonfinite_count``: those with a nonfinite value. ``absent_count``: masked-in tokens without a rollout
        value. ``token_id_mismatch_count``: masked-in tokens whose ids differ, ``None`` when ids were not given.
        ``mismatched_sample_count``, ``sample_count``: samples with a mismatch, samples with a valid pair. One sample
        wholly off points to pairing, a little in every sample to arithmetic.
        ``bitwise_equal``: at least one valid pair, and every count of defects is 0.
        ``first_mismatch``: index, sample, token and both values of the first differing pair, or ``None``.
        ``max_abs_diff``, ``token_mean_abs_diff``, ``sample_mean_abs_diff``, ``p50_abs_diff``, ``p99_abs_diff``: of
        abs(d), over finite pairs, as is all below; a sample mean is the mean over samples of each one's token mean.
        ``kl_rollout_to_train`` (k1, mean of -d), ``k3`` (mean of exp(d) - d - 1), and ``sample_mean_`` of both.
        ``ratio_mean``, ``ratio_min``, ``ratio_max``, ``extreme_frac_2x`` (ratio outside [1/2, 2]).
        ``ratio_histogram``: count by bucket; ``exactly 1`` holds d == 0.
        ``frameworks``: see ``framework_figures``.

    Raises:
        ContractError: shapes or types that do not match.
    """
    absent_all = rollout_logprob is None
    check_tensor("train_logprob", train_logprob)
    rollout = torch.full_like(train_logprob, float("nan")) if rollout_logprob is None else rollout_logprob
    _check(rollout, train_logprob, mask, sample_ids, rollout_tokens, train_tokens)
    rollout, train, mask = (x.detach().cpu() for x in (rollout, train_logprob, mask))
    absent = mask & torch.isnan(rollout)
    valid = mask & ~absent
    verdict = compare(rollout, train, valid)
    samples = _sample_ids(train, sample_ids)

    token_id_mismatches = None
    if rollout_tokens is not None and train_tokens is not None:
        token_id_mismatches = int(((rollout_tokens.cpu() != train_tokens.cpu()) & mask).sum())

    differs = (rollout.contiguous().view(torch.int32) != train.contiguous().view(torch.int32)) & valid
    finite = valid & torch.isfinite(rollout) & torch.isfinite(train)
    out: dict[str, Any] = {
        "valid_count": verdict.valid_count,
        "mismatch_count": verdict.mismatch_count,
        "nonfinite_count": verdict.nonfinite_count,
        "absent_count": int(absent.sum()),
        "token_id_mismatch_count": token_id_mismatches,
        "mismatched_sample_count": len(samples[differs].unique()),
        "sample_count": len(samples[valid].unique()),
        "rollout_logprob_given": not absent_all,
    }
    defects = ("mismatch_count", "nonfinite_count", "absent_count", "token_id_mismatch_count")
    out["bitwise_equal"] = verdict.valid_count > 0 and not any(out[k] for k in defects)
    out["first_mismatch"] = None
    if verdict.first_mismatch is not None:
        at = verdict.first_mismatch.index
        out["first_mismatch"] = {
            "index": list(at),
            "sample": int(samples[at]),
            "token": None if train_tokens is None else int(train_tokens[at]),
            "rollout": _json_float(verdict.first_mismatch.a),
            "train": _json_float(verdict.first_mismatch.b),
            "rollout_bits": verdict.first_mismatch.a_bits,
            "train_bits": verdict.first_mismatch.b_bits,
        }
    r, t, owner = rollout[finite].double(), train[finite].double(), samples[finite]
    out.update(_figures(t - r, owner))
    out["frameworks"] = framework_figures(r, t, owner, verdict.mismatch_count)
    return out


def _figures(d: Tensor, owner: Tensor) -> dict[str, Any]:
    names = (
        "max_abs_diff",
        "token_mean_abs_diff",
        "sample_mean_abs_diff",
        "p50_abs_diff",
        "p99_abs_diff",
        "kl_rollout_to_train",
        "sample_mean_kl_rollout_to_train",
        "k3",
        "sample_mean_k3",
        "ratio_mean",
        "ratio_min",
        "ratio_max",
        "extreme_frac_2x",
    )
    out: dict[str, Any] = dict.fromkeys(names)
    out["ratio_histogram"] = ratio_histogram(d)
    if d.numel() == 0:
        return out
    size = d.abs()
    ratio = ratio_of(d)
    k3 = k3_of(d)
    ordered = size.sort().values
    out["max_abs_diff"] = float(size.max())
    out["token_mean_abs_diff"] = float(size.mean())
    out["sample_mean_abs_diff"] = sample_mean(size, owner)
    for name, q in (("p50_abs_diff", 0.5), ("p99_abs_diff", 0.99)):
        # the smallest value that at least a share q of the pairs does not exceed
        out[name] = float(ordered[max(0, -int(-q * len(ordered) // 1) - 1)])
    # adding +0 spares readers a negative zero
    out["kl_rollout_to_train"] = float(-d.mean() + 0.0)
    out["sample_mean_kl_rollout_to_train"] = sample_mean(-d, owner) + 0.0
    out["k3"] = float(k3.mean())
    out["sample_mean_k3"] = sample_mean(k3, owner)
    out["ratio_mean"], out["ratio_min"], out["ratio_max"] = (float(x) for x in (ratio.mean(), ratio.min(), ratio.max()))
    out["extreme_frac_2x"] = float(((ratio > 2) | (ratio < 0.5)).double().mean())
    return out


def ratio_of(d: Tensor) -> Tensor:
    """exp(d), held finite: d is capped at 700, where the ratio has lost its meaning anyway."""
    return torch.exp(d.clamp(max=700.0))


def k3_of(d: Tensor) -> Tensor:
    """exp(d) - d - 1 without cancellation at small d."""
    return torch.expm1(d.clamp(max=700.0)) - d


def sample_mean(values: Tensor, owner: Tensor) -> float:
    """Mean over samples of each sample's mean; ``owner`` names the sample of each value."""
    _, index = owner.unique(return_inverse=True)
    counts = torch.bincount(index).double()
    return float((torch.bincount(index, weights=values) / counts).mean())


def ratio_histogram(d: Tensor) -> dict[str, int]:
    """Count of exp(d) by bucket."""
    ratio = ratio_of(d)
    one = d == 0
    # exp of a tiny d rounds to 1; the sign of d still says on which side it is
    below, above = ratio[(d < 0) & ~one], ratio[(d > 0) & ~one]
    low = torch.bucketize(below, torch.tensor(_BELOW, dtype=torch.float64), right=True) - 1
    high = torch.bucketize(above, torch.tensor(_ABOVE, dtype=torch.float64), right=False)
    counts = [*torch.bincount(low, minlength=4).tolist(), int(one.sum()), *torch.bincount(high, minlength=4).tolist()]
    return dict(zip(RATIO_BUCKETS, counts))


def _sample_ids(train: Tensor, sample_ids: Tensor | None) -> Tensor:
    if sample_ids is not None:
        return sample_ids.cpu()
    if train.dim() == 2:
        return torch.arange(len(train))[:, None].expand(train.shape)
    return torch.zeros(train.shape, dtype=torch.int64)


def _json_float(x: float) -> float | str:
    return x if x == x and abs(x) != float("inf") else str(x)


def _check(
    rollout: Tensor,
    train: Tensor,
    mask: Tensor,
    sample_ids: Tensor | None,
    rollout_tokens: Tensor | None,
    train_tokens: Tensor | None,
) -> None:
    for name, x in (("rollout_logprob", rollout), ("train_logprob", train), ("mask", mask)):
        check_tensor(name, x)
    for name, x in (("rollout_logprob", rollout), ("train_logprob", train)):
        if x.dtype != torch.float32:
            raise ContractError(f"{name} is {x.dtype}; supported: float32, what both engines return; do not convert it")
    if mask.dtype != torch.bool:
        raise ContractError(f"mask is {mask.dtype}; supported: bool, true where a token bears loss")
    others = {
        "rollout_logprob": rollout,
        "mask": mask,
        "sample_ids": sample_ids,
        "rollout_tokens": rollout_tokens,
        "train_tokens": train_tokens,
    }
    for name, other in others.items():
        if other is not None:
            check_tensor(name, other)
        if other is not None and other.shape != train.shape:
            raise ContractError(
                f"{name} has shape {tuple(other.shape)}, train_logprob {tuple(train.shape)}; all must have one shape"
            )
    if (rollout_tokens is None) != (train_tokens is None):
        raise ContractError("token ids of one side only; give rollout_tokens and train_tokens, or neither")
    for name, ids in (("sample_ids", sample_ids), ("rollout_tokens", rollout_tokens), ("train_tokens", train_tokens)):
        if ids is not None and ids.dtype not in (torch.int32, torch.int64):
            raise ContractError(f"{name} is {ids.dtype}; supported: int32 or int64")
