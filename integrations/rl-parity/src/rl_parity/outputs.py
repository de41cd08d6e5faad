"""What engines answered, as the rest of a step takes it: rewards, arrays, entries of the ledger."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_parity import data
from rl_parity.config import RunConfig
from rl_parity.data import Prompt
from rl_parity.rundir import StepSamples
from rl_parity.vocabulary import FolderTokenizer, NoText
from vime_sync import PolicyVersion, StepLedger

# prompt and tokens (ids), logprobs (None where there is none), versions (spans), in prompt order, ``group`` a prompt
Outputs = Sequence[Mapping[str, Any]]


def rewards_of(
    config: RunConfig, tokenizer: FolderTokenizer | NoText, prompts: Sequence[Prompt], outputs: Outputs
) -> list[float]:
    """One number an output."""
    if config.reward in data.TOKEN_REWARDS:
        return [data.TOKEN_REWARDS[config.reward](out["tokens"]) for out in outputs]
    score = data.REWARDS[config.reward]
    answers = [prompt.answer for prompt in prompts for _ in range(config.group)]
    return [score(tokenizer.decode(out["tokens"]), answer) for out, answer in zip(outputs, answers)]


def samples_of(
    prompts: Sequence[Prompt], group: int, outputs: Outputs, scored: Sequence[np.ndarray], rewards: Sequence[float]
) -> StepSamples:
    """The arrays of a step that was scored and not yet trained: ``forward`` is NaN."""
    flat = [value for out in outputs for value in out["logprobs"]]
    absent = np.array([value is None for value in flat], dtype=bool)
    rollout = np.array([np.nan if value is None else value for value in flat], dtype=np.float32)
    return StepSamples(
        prompt_index=np.repeat(np.array([p.index for p in prompts], dtype=np.int32), group),
        sample_index=np.tile(np.arange(group, dtype=np.int32), len(prompts)),
        prompt_length=np.array([len(out["prompt"]) for out in outputs], dtype=np.int32),
        length=np.array([len(out["tokens"]) for out in outputs], dtype=np.int32),
        prompt_tokens=np.array([t for out in outputs for t in out["prompt"]], dtype=np.int32),
        tokens=np.array([t for out in outputs for t in out["tokens"]], dtype=np.int32),
        rollout=rollout,
        train=np.concatenate([np.asarray(v, dtype=np.float32) for v in scored]),
        forward=np.full(len(flat), np.nan, dtype=np.float32),
        absent=absent,
        reward=np.array(rewards, dtype=np.float32),
    )


def enter(ledger: StepLedger, version: PolicyVersion, outputs: Outputs, scored: np.ndarray) -> None:
    """Enter a step's version and samples, and that training consumes them.

    Args:
        scored: ids [tokens] that the trainer scored, flat over the completions.
    """
    ledger.add_version(version)
    consumed: dict[str, list[int]] = {}
    start = 0
    for i, out in enumerate(outputs):
        end = start + len(out["tokens"])
        ledger.add_sample(
            f"{version.step}-{i}",
            generated=len(out["tokens"]),
            spans=out["versions"],
            token_ids=out["prompt"] + out["tokens"],
        )
        consumed[f"{version.step}-{i}"] = out["prompt"] + scored[start:end].tolist()
        start = end
    ledger.consume(version.step, consumed, token_ids=consumed)
