"""vLLM's CPU worker with a strict model inside, and what it answers by RPC.

The worker class is part of the engine's configuration, so a process that cannot import it does not start.
"""

import os
from importlib.metadata import version
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rl_contract import Communicator, ContractError, SingleRank, launches, reset_launches
from rl_vllm.config import profile_of
from rl_vllm.generators import make_rewindable
from rl_vllm.scope import Strict, building
from rl_vllm.settings import hf_config_dict
from vime_sync import ModelShape, digests, from_vllm

BOUNDARIES = ("LinearBase", "VocabParallelEmbedding", "CustomOp", "Attention")


class ReportingCPUWorker(CPUWorker):
    """RPC methods shared by strict and audited engines; all names start with ``rl_``."""

    rl_mode = "audit"
    _rl_session: str | None = None
    _rl_poison: str | None = None
    _rl_forwards = 0

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self.model_runner.get_model().register_forward_pre_hook(self._count_forward)

    def _count_forward(self, *_: Any) -> None:
        self._rl_forwards += 1

    def rl_shape(self) -> ModelShape:
        config = hf_config_dict(self.model_config.hf_config)
        config.pop("quantization_config", None)
        return ModelShape.from_hf_config(config)

    def rl_report(self) -> dict[str, Any]:
        """What this process has installed and launched since the last ``rl_reset_launches``."""
        model = self.model_runner.get_model()
        classes: dict[str, int] = {}
        for module in model.modules():
            if {c.__name__ for c in type(module).__mro__} & set(BOUNDARIES):
                label = f"{type(module).__module__}.{type(module).__qualname__}"
                method = getattr(module, "quant_method", None) or getattr(module, "impl", None)
                if method is not None:
                    label += f" + {type(method).__module__}.{type(method).__qualname__}"
                classes[label] = classes.get(label, 0) + 1
        profile = profile_of(self.vllm_config)
        return {
            "mode": self.rl_mode,
            "rank": self.rank,
            "tp": self.parallel_config.tensor_parallel_size,
            "pid": os.getpid(),
            "vllm": _vllm_version(),
            "torch": str(torch.__version__),
            "profile": None if profile is None else profile.fingerprint,
            "contracts": {} if profile is None else {k: c.fingerprint for k, c in profile.contracts.items()},
            "layers": self.rl_shape().layers,
            "qk_norm": self.rl_shape().qk_norm,
            "modules": dict(sorted(classes.items())),
            "sampler": f"{type(self.model_runner.sampler).__module__}.{type(self.model_runner.sampler).__qualname__}",
            "logprobs": {"mode": self.model_config.logprobs_mode, "temperature": "of the request, divided in fp32"},
            "forwards": self._rl_forwards,
            "launches": launches(),
            "poison": self._rl_poison,
        }

    def rl_reset_launches(self) -> None:
        reset_launches()
        self._rl_forwards = 0

    def rl_begin(self, session: str) -> None:
        """Claim the engine for one weight update. Raises, changing nothing, when another session holds it."""
        if self._rl_session is not None:
            raise ContractError(
                f"a weight update is open for session {self._rl_session!r}, asked was {session!r}; "
                "finish or poison the first one"
            )
        self._rl_session = session

    def rl_cancel(self, session: str) -> None:
        """Give up a claim under which nothing was transferred."""
        if self._rl_session != session or self._weight_update_active:
            raise ContractError(
                f"session {session!r} can't be cancelled: open is {self._rl_session!r}, "
                f"weights {'have' if self._weight_update_active else 'have not'} been transferred"
            )
        self._rl_session = None

    def rl_transfer(self, path: str, version: str) -> None:
        """Load a pushed directory into the live parameters; a failure poisons this worker."""
        if self._rl_session is None:
            raise ContractError("no weight update is open; begin one before transferring")
        try:
            self.start_weight_update()
            self.update_weights({"path": path, "version": version})
        except BaseException as error:
            self.rl_poison(f"transfer of {version or path} failed: {error}")
            raise

    def rl_finish(self) -> None:
        """Close the update; an engine healed by a whole update serves again."""
        if self._rl_session is None:
            raise ContractError("no weight update is open; begin one before finishing it")
        self.finish_weight_update()
        self._rl_session = None
        self._rl_poison = None

    def rl_poison(self, reason: str) -> None:
        """Refuse to run until a later update has finished; abandons an open one."""
        self._rl_poison = reason
        self._rl_session = None
        self._weight_update_active = False

    def rl_open_session(self) -> str | None:
        return self._rl_session

    def rl_shard_digests(self, algorithm: str = "sha256") -> tuple[int, dict[str, str]]:
        """``(tp rank, {hf name: digest})`` of the bytes this worker computes with."""
        shape = self.rl_shape()
        tp = self.parallel_config.tensor_parallel_size
        parameters = dict(self.model_runner.get_model().named_parameters())
        return self.rank % tp, digests(algorithm, from_vllm(parameters, shape, self.rank % tp, tp))

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if self._rl_poison is not None:
            raise RuntimeError(
                f"this engine is poisoned and must not serve: {self._rl_poison}; push whole weights and finish"
            )
        return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        make_rewindable(self.model_runner)
        return super().sample_tokens(*args, **kwargs)


class AuditCPUWorker(ReportingCPUWorker):
    """vLLM's own operators, with the reports of a strict engine."""

    def rl_shard_digests(self, algorithm: str = "sha256") -> tuple[int, dict[str, str]]:
        # stock CPU layers pack their weights away; what can be digested is what the last push handed to the loaders
        engine = self.weight_transfer_engine
        received = getattr(engine, "received", {}).get(algorithm)
        if not received:
            raise ContractError(
                "vLLM's CPU layers pack their weights, so an audited engine digests only what a push brought; "
                "push weights first"
            )
        return self.rank % self.parallel_config.tensor_parallel_size, dict(received)


class StrictCPUWorker(ReportingCPUWorker):
    """Builds the model out of strict layers and the sampler out of strict log-probabilities."""

    rl_mode = "strict"

    def load_model(self, **kwargs: Any) -> None:
        from vllm.distributed import get_tp_group

        from rl_vllm.sampling import StrictSampler

        profile = profile_of(self.vllm_config)
        if profile is None:
            raise ContractError("StrictCPUWorker needs a profile; start the engine with rl_vllm.engine_args(profile)")
        group = get_tp_group()
        comm: Communicator = SingleRank()
        if group.world_size > 1:
            from rl_comm import TreeCommunicator

            comm = TreeCommunicator(group.cpu_group)
        self.strict = Strict(profile, comm)
        with building(self.strict):
            super().load_model(**kwargs)
        self._check_loaded()
        self.model_runner.sampler = StrictSampler(profile, self.model_runner)

    def _check_loaded(self) -> None:
        model = self.model_runner.get_model()
        bad = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if bad:
            raise ContractError(
                f"after loading, {', '.join(bad)} hold NaN or infinity: "
                "the checkpoint lacks these tensors or holds such values; give a complete, finite checkpoint"
            )


def _vllm_version() -> str:
    import vllm

    return getattr(vllm, "__version__", None) or version("vllm")
