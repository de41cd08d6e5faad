"""Whether the rewards of a step are those that its completions earn, and its record their mean."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_contract import ContractError
from rl_parity import data
from rl_parity.jsonfile import REPAIR
from rl_parity.models import spec_of
from rl_parity.rundir import RunDirectory, StepSamples
from rl_parity.vocabulary import FolderTokenizer


class Rewards:
    """Computes the rewards of a run's samples again where everything for it is there.

    A reward of tokens always can be; one of text where prompts and model are built in, and the run's model is there.
    Otherwise the stored rewards, which are fp32, still say the mean up to their rounding.
    """

    def __init__(self, run: RunDirectory) -> None:
        config = run.manifest()["config"]
        self._name, prompts, folder = config.get("reward"), config.get("prompts"), run.root / "model"
        self._tokenizer: FolderTokenizer | None = None
        if self._name in data.REWARDS and prompts in data.BUILT_IN and spec_of(config.get("model", "")) is not None:
            self._answers = [example.answer for example in data.read_examples(prompts)]
            if (folder / "tokenizer.json").is_file():
                self._tokenizer = FolderTokenizer(folder)

    def of(self, held: StepSamples) -> list[float] | None:
        """Each sample's reward in fp64, or None where something for it is missing."""
        answers = np.split(held.tokens, np.cumsum(held.length)[:-1])
        if self._name in data.TOKEN_REWARDS:
            return [data.TOKEN_REWARDS[self._name](tokens.tolist()) for tokens in answers]
        if self._tokenizer is None or any(not 0 <= index < len(self._answers) for index in held.prompt_index):
            return None
        score = data.REWARDS[self._name]
        return [
            score(self._tokenizer.decode(tokens.tolist()), self._answers[index])
            for tokens, index in zip(answers, held.prompt_index)
        ]

    def check(self, path: Path, held: StepSamples, record: Mapping[str, Any], where: Path) -> None:
        """Raise ContractError where stored, earned and recorded rewards differ.

        Args:
            path: file of ``held``.
            where: file of ``record``.
        """
        step, told, earned = record["step"], record.get("reward"), self.of(held)
        if earned is not None:
            wrong = np.flatnonzero(np.array(earned, dtype=np.float32) != held.reward)
            if wrong.size:
                first = int(wrong[0])
                raise ContractError(
                    f"{path} has reward {float(held.reward[first])!r} of sample {first}, its completion earns "
                    f"{earned[first]!r}; {REPAIR}"
                )
        values = np.array(earned if earned is not None else held.reward, dtype=np.float64)
        mean = float(np.mean(values)) if values.size else math.nan
        # sums in another order differ by so much at the most, stored rewards by half a unit of fp32 each
        error = 2.0**-52 * values.size if earned is not None else 2.0**-24 + 2.0**-52 * values.size
        if not isinstance(told, int | float) or not abs(told - mean) <= error * float(np.abs(values).mean()):
            raise ContractError(
                f"{path} has reward {mean!r}, the record of step {step} in {where} says {told!r}; {REPAIR}"
            )
