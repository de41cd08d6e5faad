"""Distances of one step, next to the integer verdict; signs and directions are in the names."""

from typing import Any

import numpy as np

from rl_parity.config import RunConfig
from rl_parity.rundir import StepSamples

# edges of |train - rollout| in nats; the first bucket holds equal bits and nothing else
HISTOGRAM = (("<1e-6", 1e-6), ("<1e-4", 1e-4), ("<1e-3", 1e-3), ("<0.01", 1e-2), ("<0.1", 1e-1))


def semantics(config: RunConfig) -> dict[str, Any]:
    """What a log-probability of this run means; both engines must say the same."""
    return {
        "mode": "processed_logprobs",
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
    }


def step_metrics(samples: StepSamples) -> dict[str, Any]:
    """Means over valid tokens of d = train - rollout, in nats.

    ``kl_rollout_to_train`` is mean(-d) (k1), ``k3`` mean(exp(d) - d - 1), ``mean_abs_diff`` mean(|d|); ``ratio_histogram`` counts
    tokens by how far the ratio exp(d) is from one, equal bits in a bucket of their own.
    """
    valid = ~samples.absent
    rollout, train = samples.rollout[valid], samples.train[valid]
    d = train.astype(np.float64) - rollout.astype(np.float64)
    same = train.view(np.uint32) == rollout.view(np.uint32)
    counts: dict[str, int] = {"exactly 1": int(same.sum())}
    left = np.abs(d[~same])
    low = 0.0
    for name, edge in HISTOGRAM:
        counts[name] = int(((left >= low) & (left < edge)).sum())
        low = edge
    counts[">=0.1"] = int((~(left < low)).sum())
    if not d.size:
        return {"mean_abs_diff": None, "kl_rollout_to_train": None, "k3": None, "ratio_histogram": counts}
    return {
        "mean_abs_diff": float(np.abs(d).mean()),
        "kl_rollout_to_train": float((-d).mean()),
        "k3": float((np.expm1(d) - d).mean()),
        "ratio_histogram": counts,
    }
