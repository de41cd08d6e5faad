"""One trainer rank inside its worker process: Megatron-core behind plain calls, and the weights of a push."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_contract import Profile
from rl_contract.devices import host_array
from rl_megatron import LossConfig, OptimizerConfig, PackedBatch, ParallelConfig, TrainerRank, group_advantages
from rl_megatron.checkpoint import model_shape
from rl_parity import state
from vime_sync import WEIGHT_DIGEST, Loan, Manifest, PolicyVersion, lend_weights, shard_digests, write_weights

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


class TrainerWorker:
    """Built in a process of its own. Every rank gets the same calls in the same order; rank 0 answers for all.

    Args:
        device: ``cpu``, or ``cuda`` for the one GPU that this process sees.
        backend: ``gloo`` or ``nccl``, what moves bytes between ranks.
        arm: ``strict`` or ``native``.
        native_operators: of the native arm, see ``rl_megatron.build_model``.
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
        device: str = "cpu",
        backend: str = "gloo",
        native_operators: Any = "auto",
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
            native_operators=native_operators,
            **_placed(device, backend),
        )
        self._rank, self._device = rank, device
        self._answers = rank == 0
        self._cp = cp
        self._loan: Loan | None = None

    def start(self) -> None:
        """Join the world, load the model and keep it as the reference; the first call."""
        self._trainer.init()
        self._trainer.keep_reference()

    def export(
        self, directory: str, run_id: str, step: int, transport: str, tps: Sequence[int], algorithm: str = WEIGHT_DIGEST
    ) -> dict[str, str] | None:
        """Make the present weights ready for a push; rank 0 answers with the version and its digest.

        Args:
            transport: ``ipc`` lends memory of this process's GPU, ``host`` of the host, both until the next call;
                ``file`` writes files.
            tps: tensor-parallel sizes of the engines.
            algorithm: the digest that names weights; ``sha256-tree`` is made where they lie.
        """
        tensors = self._trainer.export_weights()
        if tensors is None:
            return None
        if transport != "file":
            where = "cuda:0" if transport == "ipc" else "cpu"
            if self._loan is None or str(self._loan.device) != where:
                # beside the pushes, where a mapped file goes with them however the run ends
                self._loan = Loan(where, Path(directory).parent)
            manifest = self._loan.fill(tensors, algorithm=algorithm)
            version = PolicyVersion(run_id, step, manifest.digest)
            shape = model_shape(self._trainer.model)
            lend_weights(directory, self._loan, version, shape, tps, source=tensors)
        else:
            manifest = Manifest.from_tensors(tensors, algorithm=algorithm)
            version = PolicyVersion(run_id, step, manifest.digest)
            write_weights(Path(directory), tensors, version, manifest)
        return {"path": directory, "version": str(version), "digest": manifest.digest}

    def digest(self, algorithm: str = WEIGHT_DIGEST) -> str | None:
        """Digest of the present weights, as a push would be called; rank 0 answers."""
        tensors = self._trainer.export_weights()
        return None if tensors is None else Manifest.from_tensors(tensors, algorithm=algorithm).digest

    def shard_digests(self, tp: int, algorithm: str = WEIGHT_DIGEST) -> dict[tuple[int, str], str] | None:
        """Digests of what every worker of an engine of this ``tp`` must hold now; rank 0 answers."""
        tensors = self._trainer.export_weights()
        return None if tensors is None else shard_digests(tensors, model_shape(self._trainer.model), tp, algorithm)

    def save_state(self, folder: str) -> dict[str, str]:
        """Write this rank's optimizer state (masters, moments, step count) to ``folder``; returns file and digest."""
        return state.write_rank(Path(folder), self._rank, self._trainer.optimizer.state_dict())

    def load_state(self, folder: str, digest: str) -> None:
        """Take up the state that this rank saved.

        Raises:
            ContractError: the file is missing or has another digest, or is of another model or tensor-parallel size.
        """
        self._trainer.optimizer.load_state_dict(state.read_rank(Path(folder), self._rank, digest))

    def rest(self, room: int = 0) -> dict[str, float]:
        """Give unused GPU memory back, for engines on the same GPU.

        Args:
            room: bytes that they need; where so much is free anyway, the next step finds its memory as it left it.
        """
        if self._device == "cuda" and not (room and torch.cuda.mem_get_info()[0] >= room):
            torch.cuda.empty_cache()
        return self.memory()

    def memory(self) -> dict[str, float]:
        """Peak GiB since the last call: what tensors took, and what the allocator held; {} on a CPU."""
        if self._device != "cuda":
            return {}
        peak = {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        }
        torch.cuda.reset_peak_memory_stats()
        return peak

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
        if self._loan is not None:
            self._loan.close()
        self._trainer.close()

    def _scored_tokens(self, samples: Sequence[Any]) -> np.ndarray:
        # taken from what each context parallel rank is asked to predict, not from the lists that came in
        config = self._trainer.model.rl.config
        batch = PackedBatch.pack(samples, vocab_size=config.vocab_size, max_positions=config.max_positions, cp=self._cp)
        tokens = np.full(sum(batch.response_lengths), -1, dtype=np.int64)
        for rank in range(self._cp):
            part = batch.for_rank(rank)
            tokens[host_array(part.slots.cpu())] = host_array(part.targets.cpu())
        return tokens


def _placed(device: str, backend: str) -> dict[str, Any]:
    # the trainer's own defaults are those of a CPU
    return {} if device == "cpu" else {"device": "cuda:0", "share_gpu": backend == "gloo"}
