"""One rank of the trainer behind plain calls: numbers, lists and numpy arrays in, the same out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import megatron.core
import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_contract import ContractError, Profile, launches
from rl_contract.devices import host_array
from rl_megatron import arguments, checkpoint, checks, te, topology
from rl_megatron.batch import PackedBatch, micro_batches
from rl_megatron.config import ModelConfig, ParallelConfig
from rl_megatron.cpu_device import cpu_device
from rl_megatron.cpu_device import device as current_device
from rl_megatron.loss import Loss, LossConfig, fixed_sum, grpo_loss
from rl_megatron.model import Mode, Recompute, build_model, check_recompute, module_classes
from rl_megatron.native import native_substitutions
from rl_megatron.optimizer import Optimizer, OptimizerConfig, check_optimizer, make_optimizer
from rl_megatron.scoring import check_temperature, refuse_nan, token_logprobs
from rl_megatron.step_inputs import StepInputs


class TrainerRank:
    """A trainer process. Every rank of the world makes the same calls with the same arguments, in the same order.

    Args:
        rank: 0 to ``parallel.world_size - 1``.
        init_method: torch.distributed URL all ranks share, ``tcp://host:port`` or ``file:///path``.
        hf_path: Hugging Face folder.
        profile: both engines' profile.
        parallel: tensor and context parallel sizes.
        mode: ``strict`` or ``native``.
        optimizer, loss: hyper-parameters.
        token_budget: most tokens of a micro-batch, padding of CP not counted; None packs everything at once.
        threads: torch's threads in this process; None leaves them.
        device, share_gpu: see ``topology.start``; a CPU is not shared.
        recompute, recompute_modules, native_operators: see ``build_model``.
        keep_logits: bytes of GPU memory in which the head's fp32 logits may wait for the backward.

    Nothing heavy happens before ``init``, so an instance can be made anywhere.

    Raises:
        ContractError: every argument that is none of its kind, all at once.
    """

    def __init__(
        self,
        *,
        rank: int,
        init_method: str,
        hf_path: str | Path,
        profile: Profile,
        parallel: ParallelConfig | None = None,
        mode: Mode = "strict",
        optimizer: OptimizerConfig | None = None,
        loss: LossConfig | None = None,
        token_budget: int | None = None,
        threads: int | None = 1,
        device: str = "cpu",
        share_gpu: bool = False,
        recompute: Recompute = "none",
        recompute_modules: Sequence[str] = ("core_attn",),
        keep_logits: int = 4 << 30,
        native_operators: te.NativeOperators = "auto",
    ) -> None:
        self.rank = rank
        self.init_method = init_method
        self.hf_path = hf_path
        self.profile = profile
        self.parallel = ParallelConfig() if parallel is None else parallel
        self.mode = mode
        self.optimizer_config = OptimizerConfig() if optimizer is None else optimizer
        self.loss_config = LossConfig() if loss is None else loss
        self.token_budget = token_budget
        self.threads = threads
        self.device = device
        self.share_gpu = share_gpu
        self.recompute = recompute
        self.recompute_modules = recompute_modules
        self.keep_logits = keep_logits
        self.native_operators = native_operators
        self._model: GPTModel | None = None
        self._optimizer: Optimizer | None = None
        self._reference: list[Tensor] | None = None
        # how often one was kept, and after how many optimizer steps
        self._kept = (0, 0)
        self._fallback: str | None = None
        self._hf_config: dict[str, Any] = {}
        if problems := arguments.problems(self):
            raise ContractError("TrainerRank: " + "; ".join(problems))
        self.recompute_modules = tuple(recompute_modules)

    def init(self) -> dict[str, Any]:
        """Check everything, join the world, build and load the model; returns ``report()``.

        Raises:
            ContractError: an unsupported cut or an ``init_method`` at which ranks can't meet, before the world is
                joined; no checkpoint, an unsupported config, another model's profile, and ranks that differ, in their
                arguments or in the weight files of their folders (see ``checkpoint.open_hf``), before anything is
                built; a defective weight file.
            MissingSupport: a device that is not there, before the world is joined; ``native_operators="te"`` without
                TransformerEngine, or recomputation or Megatron's optimizer on a CPU, before anything is built.

        What one rank refuses once its cut and device are supported, the others do too: it joins them and says so. A
        world of one is not joined then. In a process group that was joined before, ranks are told of all that one of
        them refuses, its cut and device too.
        """
        joined = topology.ranks() > 1
        operators: Literal["te", "local"] | None = None
        config: ModelConfig | None = None
        refusal: Exception | None = None
        try:
            self._hf_config = checkpoint.read_config(self.hf_path)
            operators = self._operators()
            config = ModelConfig.from_hf(self._hf_config)
            config.check_profile(self.profile)
            if joined:
                config.check(self.profile, self.parallel)
        except Exception as error:
            if self.parallel.world_size == 1 and not joined:
                raise
            refusal = error
        if config is not None and refusal is None and not joined:
            config.check(self.profile, self.parallel)

        def agreed() -> None:
            if refusal is not None:
                raise refusal

        if joined:
            topology.together(agreed, lambda _: {"call": b"TrainerRank.init"})
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        topology.start(self.rank, self.parallel, self.init_method, device=self.device, share_gpu=self.share_gpu)
        try:
            topology.together(agreed)
            topology.agree(arguments.identity(self) | {"config.json": self._hf_config, "native operators": operators})
            tensors = checkpoint.open_hf(self.hf_path)
            model = topology.together(lambda: self._build(operators or "auto"))
            topology.together(lambda: checkpoint.load_tensors(model, tensors))
            self._optimizer = topology.together(lambda: make_optimizer(model, self.optimizer_config))
            self._model = model
        except BaseException:
            self.close()
            raise
        return self.report()

    def _build(self, operators: te.NativeOperators) -> GPTModel:
        model = build_model(
            self._hf_config,
            self.profile,
            self.parallel,
            mode=self.mode,
            recompute=self.recompute,
            recompute_modules=self.recompute_modules,
            native_operators=operators,
        )
        model.train()
        return model

    def _operators(self) -> Literal["te", "local"] | None:
        """The native arm's operators, once the options that a device may lack are sound."""
        kind = str(self.device).partition(":")[0]
        check_recompute(self.recompute, self.recompute_modules, kind)
        check_optimizer(self.optimizer_config, kind)
        if self.mode == "strict":
            return None
        staged = self.share_gpu and self.parallel.world_size > 1
        chosen = te.choose(self.native_operators, device=kind, dtype=self.profile.settings.dtype, staged=staged)
        self._fallback = chosen.fallback
        return chosen.operators

    def logprobs(
        self, samples: Sequence[Any], *, temperature: float = 1.0, with_entropy: bool = False
    ) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
        """Score without gradients: one fp32 array a sample, as long as its response (and a list of entropies).

        Args:
            samples: ``Sample``, mappings or ``(prompt, response[, mask])``, see ``rl_megatron.Sample.of``.

        Raises:
            ContractError: bad samples or a bad temperature, ranks that were given different ones or are not after the
                same number of optimizer steps, on every rank before anything is computed; in the strict arm a
                log-probability that is NaN.
        """
        return self._scores("logprobs", samples, temperature, with_entropy)

    def _scores(
        self, call: str, samples: Sequence[Any], temperature: float, with_entropy: bool
    ) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
        def prepare() -> list[PackedBatch]:
            if problem := checks.instance_problem("with_entropy", with_entropy, bool):
                raise ContractError(f"{call}: {problem}")
            if of_reference and self._reference is None:
                raise ContractError(
                    "no reference is kept; call keep_reference() while the model holds the reference weights"
                )
            return self._batches(samples, temperature)

        def given(found: list[PackedBatch]) -> dict[str, bytes]:
            same = self._given(f"{call}, with_entropy={with_entropy}", found, temperature)
            return same | ({"reference": repr(self._kept).encode()} if of_reference else {})

        of_reference = call == "reference_logprobs"
        batches = topology.together(prepare, given)
        found: list[tuple[Tensor, ...]] = []
        with torch.no_grad(), self._reference_weights() if of_reference else nullcontext():
            for batch in batches:
                out = token_logprobs(
                    self.model, batch, temperature=temperature, with_entropy=with_entropy, nonfinite=self._nonfinite
                )
                found.append(out if with_entropy else (out,))
        # nothing has waited for the device until here
        values, *rest = (
            [host_array(v) for batch, part in zip(batches, column) for v in batch.split(part.cpu())]
            for column in zip(*found)
        )
        self._refuse_nan(values)
        return (values, rest[0]) if with_entropy else values

    def keep_reference(self) -> None:
        """Take the present weights as the reference policy of ``reference_logprobs`` and of the KL term.

        Nothing is asked of the other ranks here: ``reference_logprobs`` compares how often each has kept one, and after
        how many optimizer steps.
        """
        self._reference = [p.detach().clone() for p in self.model.parameters()]
        self._kept = (self._kept[0] + 1, self.optimizer.steps)

    def reference_logprobs(self, samples: Sequence[Any], *, temperature: float = 1.0) -> list[np.ndarray]:
        """As ``logprobs``, under the reference; the policy's weights come back untouched.

        Raises:
            ContractError: as ``logprobs``; on every rank too where one has kept no reference, or has kept its own at
                another point than rank 0.
        """
        out = self._scores("reference_logprobs", samples, temperature, False)
        assert isinstance(out, list)
        return out

    def train_step(
        self,
        samples: Sequence[Any],
        advantages: Sequence[float],
        old_logprobs: Sequence[np.ndarray],
        *,
        ref_logprobs: Sequence[np.ndarray] | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Any]:
        """One optimizer step on all samples, micro-batch by micro-batch.

        Args:
            advantages: one finite number a sample.
            old_logprobs, ref_logprobs: one array a sample, as long as its response, finite in fp32 where the token
                counts in the loss.

        Returns:
            ``loss``, ``policy_loss``, ``kl`` (mean k3), ``ratio_mean``, ``clip_fraction``, ``grad_norm``,
            ``clip_coef``, ``valid_count``, ``tokens``, ``skipped`` and ``logprobs`` (of the training forward, one array
            a sample).
            A step without a valid token has loss 0 and changes nothing.

        Raises:
            ContractError: samples, numbers or a temperature outside of that, or ranks that were given different ones,
                have another ``loss_config`` or are not after the same number of optimizer steps, on every rank before
                anything is computed: the rank that refuses says why, the others name the rank.
        """
        batches, given = topology.together(
            lambda: self._step(samples, advantages, old_logprobs, ref_logprobs, temperature),
            lambda found: (
                self._given("train_step", found[0], temperature)
                | found[1].content(found[0])
                | {"loss": repr([float(x) for x in astuple(self.loss_config)]).encode()}
            ),
        )
        total = sum(int(b.loss_mask.sum()) for b in batches)
        self.optimizer.zero_grad()
        losses: list[Loss] = []
        found: list[Tensor] = []
        first = 0
        for batch in batches:
            old, gains, ref = given.packed(first, batch, current_device())
            logp = token_logprobs(
                self.model, batch, temperature=temperature, nonfinite=self._nonfinite, keep_logits=self._keep_logits
            )
            loss = grpo_loss(
                logp, old, gains, batch.loss_mask, denominator=total, ref_logprob=ref,
                config=self.loss_config,
            )  # fmt: skip
            if loss.valid_count:
                with cpu_device():
                    loss.value.backward()
                self.optimizer.collect()
            losses.append(loss)
            found.append(logp.detach())
            first += len(batch.samples)
        # nothing has waited for the device until here
        logps = [host_array(v) for batch, part in zip(batches, found) for v in batch.split(part.cpu())]
        self._refuse_nan(logps)
        update = self.optimizer.step() if total else {"grad_norm": 0.0, "clip_coef": 1.0, "skipped": True}
        sums = torch.stack([x.sums for x in losses]).cpu().tolist()
        policy, kl, ratio, clipped = (sum(column) / max(total, 1) for column in zip(*sums))
        return {
            "loss": fixed_sum(torch.stack([x.value.detach() for x in losses])),
            "policy_loss": policy,
            "kl": kl,
            "ratio_mean": ratio,
            "clip_fraction": clipped,
            "valid_count": total,
            "tokens": sum(b.tokens for b in batches),
            "logprobs": logps,
            **update,
        }

    @property
    def _nonfinite(self) -> Literal["raise", "nan"]:
        # on a GPU a look at each batch would stop the stream; all are looked at once
        return "nan" if current_device().type == "cuda" else "raise"

    @property
    def _keep_logits(self) -> int:
        return self.keep_logits if current_device().type == "cuda" else 0

    def _refuse_nan(self, values: Sequence[np.ndarray]) -> None:
        if self.mode == "strict":
            refuse_nan(values)

    def export_weights(self) -> dict[str, Tensor] | None:
        """All weights by Hugging Face name on rank 0, None on the others; every rank must call it.

        They are copies on the trainer's device.
        """
        topology.together(lambda: self.model, lambda _: self._call("export_weights"))
        tensors = checkpoint.export_hf(self.model)
        return tensors if self.rank == 0 else None

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face folder; every rank must call it, the first one writes, all wait for it.

        Raises:
            ContractError: on every rank if on one: no path, a folder that holds weights or cannot be written to, a rank
                that is not initialised or not after the same number of optimizer steps.
        """

        def prepare() -> GPTModel:
            if problem := checks.folder_problem("path", path):
                raise ContractError(f"save: {problem}")
            return self.model

        model = topology.together(prepare, lambda _: self._call("save"))
        checkpoint.save_hf(model, path, self._hf_config)

    def report(self) -> dict[str, Any]:
        """What this rank runs: profile fingerprint, versions, the class at each boundary, launches so far."""
        operators, optimizer = self.model.rl.native_operators, self.optimizer.ran()
        return {
            "rank": self.rank,
            "tp": self.parallel.tp,
            "cp": self.parallel.cp,
            "mode": self.mode,
            "profile": self.profile.name,
            "fingerprint": self.profile.fingerprint,
            "megatron": megatron.core.__version__,
            "torch": torch.__version__,
            "modules": module_classes(self.model),
            "device": str(current_device()),
            "recompute": self.recompute,
            "optimizer": optimizer,
            "transports": topology.transports(),
            "native": te.report(operators, self._fallback) | {"optimizer": optimizer} if operators else None,
            "substitutions": native_substitutions(operators) if operators else [],
            "launches": launches(),
            "steps": self.optimizer.steps,
        }

    def close(self) -> None:
        """Leave the world and free the model; safe to call twice."""
        self._model = self._optimizer = self._reference = None
        self._kept = (0, 0)
        topology.stop()

    @property
    def model(self) -> GPTModel:
        if self._model is None:
            raise ContractError("this TrainerRank is not initialised; call init() first")
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise ContractError("this TrainerRank is not initialised; call init() first")
        return self._optimizer

    def _batches(self, samples: Sequence[Any], temperature: float) -> list[PackedBatch]:
        config = self.model.rl.config
        check_temperature(temperature)
        return micro_batches(
            samples,
            self.token_budget,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            cp=self.parallel.cp,
        )

    def _call(self, name: str) -> dict[str, bytes]:
        """What every call of all ranks compares: which one it is, and whose weights it reads or changes."""
        return {"call": name.encode(), "optimizer steps": str(self.optimizer.steps).encode()}

    def _given(self, call: str, batches: Sequence[PackedBatch], temperature: float) -> dict[str, bytes]:
        """What all ranks must have been given alike: each packs all samples, and takes its part of the tokens then."""
        # where one batch ends and the next begins is among its lengths
        content = b"".join(len(b.samples).to_bytes(8, "little") + b.content() for b in batches)
        return self._call(call) | {"samples": content, "temperature": float(temperature).hex().encode()}

    def _step(
        self, samples: Sequence[Any], advantages: Any, old_logprobs: Any, ref_logprobs: Any, temperature: float
    ) -> tuple[list[PackedBatch], StepInputs]:
        batches = self._batches(samples, temperature)
        kl_coef = self.loss_config.kl_coef
        return batches, StepInputs.of(batches, advantages, old_logprobs, ref_logprobs, kl_coef=kl_coef)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        parameters = list(self.model.parameters())
        held = [p.data for p in parameters]
        try:
            for p, reference in zip(parameters, self._reference or []):
                p.data = reference
            yield
        finally:
            for p, data in zip(parameters, held):
                p.data = data
