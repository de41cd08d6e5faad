"""One trainer rank inside its worker process: Megatron-core behind plain calls, and the weights of a push."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_contract import Profile
from rl_megatron import LossConfig, OptimizerConfig, PackedBatch, ParallelConfig, TrainerRank, group_advantages
from vime_sync import Manifest, PolicyVersion, write_weights

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


class TrainerWorker:
    """Built in a process of its own. Every rank gets the same calls in the same order; rank 0 answers for all.

    Args:
        arm: ``strict`` or ``native``.
        hyper: ``lr``, ``kl``, ``clip``, ``max_grad_norm``, ``weight_decay``.
        plant: name of a mis-ordered kernel to install first, see ``rl_parity.plant``.
    """

    def __init__(
        self,
        *,
        rank: int,
        tp: int,
        cp: int,
        init_method: str,
        arm: str,
        model: str,
        profile: dict[str, Any],
        hyper: dict[str, float],
        token_budget: int | None,
        plant: str | None = None,
    ) -> None:
        if plant is not None:
            from rl_parity.plant import install

            install(plant)
        self._trainer = TrainerRank(
            rank=rank,
            init_method=init_method,
            hf_path=model,
            profile=Profile.from_dict(profile),
            parallel=ParallelConfig(tp=tp, cp=cp),
            mode="strict" if arm == "strict" else "native",
            optimizer=OptimizerConfig(
                lr=hyper["lr"], weight_decay=hyper["weight_decay"], clip_grad=hyper["max_grad_norm"]
            ),
            loss=LossConfig(clip_low=hyper["clip"], clip_high=hyper["clip"], kl_coef=hyper["kl"]),
            token_budget=token_budget,
        )
        self._answers = rank == 0
        self._cp = cp
        self._trainer.init()
        self._trainer.keep_reference()

    def export(self, directory: str, run_id: str, step: int) -> dict[str, str] | None:
        """Write the present weights for a push; rank 0 answers with the version and its manifest."""
        tensors = self._trainer.export_weights()
        if tensors is None:
            return None
        manifest = Manifest.from_tensors(tensors)
        version = PolicyVersion(run_id, step, manifest.digest)
        write_weights(Path(directory), tensors, version, manifest)
        return {"path": directory, "version": str(version), "digest": manifest.digest, "manifest": manifest.to_json()}

    def score(self, sequences: Sequences, temperature: float) -> dict[str, Any] | None:
        """Log-probabilities under the policy and the reference, and the token ids that were scored."""
        samples = list(sequences)
        policy = self._trainer.logprobs(samples, temperature=temperature)
        reference = self._trainer.reference_logprobs(samples, temperature=temperature)
        if not self._answers:
            return None
        return {"logprobs": policy, "reference": reference, "tokens": self._scored_tokens(samples)}

    def train(
        self,
        sequences: Sequences,
        rewards: Sequence[float],
        group: int,
        old: Sequence[np.ndarray],
        reference: Sequence[np.ndarray],
        temperature: float,
    ) -> dict[str, Any] | None:
        """One GRPO update; rank 0 answers with ``TrainerRank.train_step``'s figures.

        Args:
            rewards: one a sample; ``group`` consecutive samples answer one prompt.
        """
        advantages = group_advantages(torch.tensor(rewards, dtype=torch.float32), group).tolist()
        out = self._trainer.train_step(
            list(sequences), advantages, old, ref_logprobs=reference, temperature=temperature
        )
        return out if self._answers else None

    def report(self) -> dict[str, Any]:
        return self._trainer.report()

    def close(self) -> None:
        self._trainer.close()

    def _scored_tokens(self, samples: Sequence[Any]) -> np.ndarray:
        # taken from what each context parallel rank is asked to predict, not from the lists that came in
        config = self._trainer.model.rl.config
        batch = PackedBatch.pack(samples, vocab_size=config.vocab_size, max_positions=config.max_positions, cp=self._cp)
        tokens = np.full(sum(batch.response_lengths), -1, dtype=np.int64)
        for rank in range(self._cp):
            part = batch.for_rank(rank)
            tokens[part.slots.numpy()] = part.targets.numpy()
        return tokens
