"""The verdict of one step: token ids, weight version, log-prob semantics, contract, and then the bits, in this order.

Numbers are compared only when everything before them agrees, so that kernels are never blamed for a wrong pairing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from rl_contract import Profile, Verdict, compare
from rl_logprob import SamplingSemantics
from rl_parity.rundir import StepSamples


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What each side says about itself before its numbers mean anything.

    Attributes:
        semantics: what a log-probability means on that side.
        profiles: the contract fingerprint that each worker reported; empty where none holds a contract (native arm).
    """

    semantics: SamplingSemantics
    profiles: Sequence[str]


@dataclass(kw_only=True)
class StepVerdict:
    """Integer counts first. ``not_compared`` is the reason why the numbers were not looked at, or None."""

    valid_count: int = 0
    mismatch_count: int = 0
    nonfinite_count: int = 0
    absent_count: int = 0
    token_id_mismatch_count: int = 0
    weight_version_mismatch_count: int = 0
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    not_compared: str | None = None
    first_mismatch: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The fields as they stand in ``steps.jsonl``."""
        out = asdict(self)
        return {**out.pop("metrics"), **out}


def judge(
    samples: StepSamples,
    *,
    step: int,
    scored_tokens: np.ndarray,
    versions: Sequence[Sequence[tuple[str, int, int]]],
    expected_version: str,
    rollout: Identity,
    train: Identity,
    profile: Profile | None,
) -> StepVerdict:
    """Compare what the engine sampled and reported with what the trainer scored.

    Args:
        scored_tokens: int [tokens], the ids that the trainer scored, in the order of ``samples.tokens``.
        versions: each sample's weight version spans (version, first token, end).
        profile: the contracts both sides must hold; None in the native arm, which holds none.
    """
    verdict = StepVerdict(absent_count=int(samples.absent.sum()))
    verdict.token_id_mismatch_count = _count_token_ids(samples.tokens, scored_tokens)
    verdict.weight_version_mismatch_count = sum(
        foreign_tokens(spans, int(length), expected_version) for spans, length in zip(versions, samples.length)
    )
    verdict.not_compared = _first_obstacle(verdict, expected_version, rollout, train, profile)
    if verdict.not_compared:
        return verdict
    numbers = compare_logprobs(samples, samples.rollout, samples.train, step, ("rollout", "train"))
    verdict.valid_count = numbers[0].valid_count
    verdict.mismatch_count = numbers[0].mismatch_count
    verdict.nonfinite_count = numbers[0].nonfinite_count
    verdict.max_abs_diff = numbers[0].max_abs_diff
    verdict.first_mismatch = numbers[1]
    return verdict


def _first_obstacle(
    v: StepVerdict, expected_version: str, rollout: Identity, train: Identity, profile: Profile | None
) -> str | None:
    if v.token_id_mismatch_count:
        return f"{v.token_id_mismatch_count} token ids differ between what was sampled and what was scored"
    if v.weight_version_mismatch_count:
        return f"{v.weight_version_mismatch_count} tokens were not made by weights {expected_version}"
    different = rollout.semantics.differences(train.semantics)
    if different:
        return f"log-prob semantics differ, rollout against train: {', '.join(different)}"
    if profile is not None:
        for side, identity in (("rollout", rollout), ("train", train)):
            foreign = sorted({f for f in identity.profiles if f != profile.fingerprint})
            if foreign or not identity.profiles:
                return f"{side} holds contract {', '.join(foreign) or 'none'}, the run needs {profile.fingerprint}"
    return None


def _count_token_ids(sampled: np.ndarray, scored: np.ndarray) -> int:
    if sampled.shape != scored.shape:
        return max(sampled.size, scored.size)
    return int((sampled != scored).sum())


def foreign_tokens(spans: Sequence[tuple[str, int, int]], length: int, expected: str) -> int:
    """How many of a sample's tokens no span attributes to ``expected``."""
    own = np.zeros(length, dtype=bool)
    for version, start, end in spans:
        if version == expected:
            own[start:end] = True
    return int(length - own.sum())


def compare_logprobs(
    samples: StepSamples, left: np.ndarray, right: np.ndarray, step: int, names: tuple[str, str]
) -> tuple[Verdict, dict[str, Any] | None]:
    """Bit comparison of two log-probabilities per token, and where the first mismatch is."""
    mask = torch.from_numpy(~samples.absent)
    verdict = compare(torch.from_numpy(left), torch.from_numpy(right), mask)
    if verdict.first_mismatch is None:
        return verdict, None
    flat = verdict.first_mismatch.index[0]
    sample, position = samples.locate(flat)
    first = verdict.first_mismatch
    return verdict, {
        "step": step,
        "sample": sample,
        "position": position,
        "token": int(samples.tokens[flat]),
        "left_name": names[0],
        "right_name": names[1],
        "left": first.a,
        "right": first.b,
        "left_bits": first.a_bits,
        "right_bits": first.b_bits,
    }


def describe_mismatch(first: Mapping[str, Any], text: str = "") -> str:
    """One line for people: where, which token, both values with their bits."""
    shown = f" {text!r}" if text else ""
    return (
        f"first mismatch: step {first['step']}, sample {first['sample']}, position {first['position']}, "
        f"token {first['token']}{shown}: {first['left_name']} {first['left']!r} ({first['left_bits']}), "
        f"{first['right_name']} {first['right']!r} ({first['right_bits']})"
    )
