"""What a training step is given beside its samples: looked at on the host, before anything is computed or travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.devices import host_array, to_device
from rl_megatron import checks
from rl_megatron.batch import PackedBatch

# of one message
_MOST = 8


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """fp32 on the host. Masked tokens may hold anything in their log-probabilities.

    Attributes:
        advantages: ``[samples]``.
        old, reference: one array a sample, as long as its response.
    """

    advantages: np.ndarray
    old: list[np.ndarray]
    reference: list[np.ndarray] | None

    @classmethod
    def of(
        cls, batches: Sequence[PackedBatch], advantages: Any, old_logprobs: Any, ref_logprobs: Any, *, kl_coef: float
    ) -> "StepInputs":
        """What ``TrainerRank.train_step`` was given.

        Raises:
            ContractError: everything that is no number, too many or too few, or, where it counts in the loss, NaN or
                infinite in fp32; and a KL term without a reference.
        """
        lengths = [n for b in batches for n in b.response_lengths]
        problems = []
        if odd := checks.numbers_problem("advantages", advantages):
            problems.append(odd)
        elif len(advantages) != len(lengths):
            problems.append(f"{len(advantages)} advantages for {len(lengths)} samples")
        for name, given in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs)):
            if given is None and name == "ref_logprobs":
                continue
            kinds = [checks.sequence_problem(name, given, "arrays, one a sample")]
            if not kinds[0]:
                kinds += [checks.numbers_problem(f"{name}[{i}]", x) for i, x in enumerate(given)]
            if wrong := [problem for problem in kinds if problem]:
                problems += wrong[:_MOST]
            elif [len(x) for x in given] != lengths:
                problems.append(f"{name} has lengths {[len(x) for x in given][:8]}, the responses {lengths[:8]}")
        if ref_logprobs is None and kl_coef > 0:
            problems.append(f"kl_coef={kl_coef} needs ref_logprobs")
        if problems:
            remedy = "give one number a sample in advantages, one a response token in an array of log-probabilities"
            raise ContractError(f"train_step: {'; '.join(problems)}; {remedy}")
        found = cls(
            advantages=_fp32(advantages),
            old=[_fp32(x) for x in old_logprobs],
            reference=None if ref_logprobs is None else [_fp32(x) for x in ref_logprobs],
        )
        found._refuse_nonfinite(batches, advantages, old_logprobs, ref_logprobs)
        return found

    def _refuse_nonfinite(self, batches: Sequence[PackedBatch], *given: Any) -> None:
        advantages, old_logprobs, ref_logprobs = given
        problems = [
            f"the advantage of sample {i} is {_shown(advantages[i])}"
            for i in np.flatnonzero(~np.isfinite(self.advantages))
        ]
        masks = [host_array(mask) for b in batches for mask in b.split(b.loss_mask)]
        for name, values, said in (
            ("old", self.old, old_logprobs),
            ("reference", self.reference or [], ref_logprobs),
        ):
            for i, (value, mask) in enumerate(zip(values, masks)):
                bad = np.flatnonzero(~np.isfinite(value) & mask)
                if bad.size:
                    problems.append(
                        f"the {name} log-probability of response token {bad[0]} of sample {i} is "
                        f"{_shown(said[i][bad[0]])} ({bad.size} such in this sample)"
                    )
        if problems:
            more = f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
            raise ContractError(
                f"train_step: {'; '.join(problems[:_MOST])}{more}; supported: finite numbers that fp32 holds; leave "
                "such a sample out, or mask the tokens that have no log-probability; nothing was computed"
            )

    def content(self, batches: Sequence[PackedBatch]) -> dict[str, bytes]:
        """What tells these numbers from others, by name; without those of masked tokens, which may be anything."""
        masks = [host_array(mask) for b in batches for mask in b.split(b.loss_mask)]

        def of(values: list[np.ndarray] | None) -> bytes:
            return b"none" if values is None else b"".join(v[m].tobytes() for v, m in zip(values, masks))

        return {
            "advantages": self.advantages.tobytes(),
            "old_logprobs": of(self.old),
            "ref_logprobs": of(self.reference),
        }

    def packed(self, first: int, batch: PackedBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Old log-probabilities, advantages and reference of the response tokens of a batch whose first sample is
        ``first``; each fp32 ``[n]`` in packed order on ``device``, which is not waited for.
        """
        some = slice(first, first + len(batch.samples))

        def there(values: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(values), device)

        gains = np.repeat(self.advantages[some], batch.response_lengths)
        reference = None if self.reference is None else there(np.concatenate(self.reference[some]))
        return there(np.concatenate(self.old[some])), there(gains), reference


def _shown(value: Any) -> str:
    return str(value.item() if isinstance(value, (Tensor, np.generic)) else value)


def _fp32(values: Any) -> np.ndarray:
    """A list, an array or a tensor of numbers as fp32; what it does not hold becomes infinite."""
    if isinstance(values, Tensor):
        values = host_array(values.detach().double().cpu())
    elif not isinstance(values, np.ndarray):
        values = [x.item() if isinstance(x, Tensor) else float(x) for x in values]
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)
