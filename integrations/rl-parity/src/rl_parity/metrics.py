"""What a step's log-probabilities mean and how far apart they are, in the terms of rl-logprob."""

from typing import Any

import numpy as np
import torch

from rl_logprob import SamplingSemantics, rollout_metrics
from rl_parity.config import RunConfig
from rl_parity.rundir import StepSamples

_KEPT = (
    "mismatched_sample_count",
    "token_mean_abs_diff",
    "sample_mean_abs_diff",
    "p50_abs_diff",
    "p99_abs_diff",
    "kl_rollout_to_train",
    "sample_mean_kl_rollout_to_train",
    "k3",
    "ratio_min",
    "ratio_max",
    "extreme_frac_2x",
    "ratio_histogram",
    "frameworks",
)


def semantics(config: RunConfig, mode: str = "processed") -> SamplingSemantics:
    """The distribution that a log-probability of this run belongs to; both engines must say the same."""
    return SamplingSemantics(
        mode=mode,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        penalties=(config.repetition_penalty, config.presence_penalty, config.frequency_penalty),
    )


def step_metrics(samples: StepSamples) -> dict[str, Any]:
    """``rl_logprob.rollout_metrics`` of rollout against train, without the counts, which the verdict has already.

    Figures average over tokens unless their name says ``sample_mean``; d = train - rollout, in nats.
    """
    found = rollout_metrics(
        torch.from_numpy(samples.rollout),
        torch.from_numpy(samples.train),
        torch.from_numpy(~samples.absent),
        sample_ids=torch.from_numpy(np.repeat(np.arange(len(samples.length)), samples.length)),
    )
    return {"mean_abs_diff": found["token_mean_abs_diff"], **{name: found[name] for name in _KEPT}}
