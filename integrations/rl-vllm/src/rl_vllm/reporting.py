"""What every worker of ours answers by RPC, whatever device it runs on; all names start with ``rl_``."""

import inspect
import os
from importlib.metadata import version
from typing import Any

import torch

from rl_contract import ContractError, launches, reset_launches
from rl_vllm.config import profile_of
from rl_vllm.scope import Strict, building, communicator
from rl_vllm.settings import hf_config_dict
from rl_vllm.versions import SampledTokens
from vime_sync import WEIGHT_DIGEST, ModelShape, digests, from_vllm

BOUNDARIES = ("LinearBase", "VocabParallelEmbedding", "CustomOp", "Attention")


class Reporting:
    """Mixed in before a worker class of vLLM."""

    rl_mode = "audit"
    _rl_session: str | None = None
    _rl_poison: str | None = None
    _rl_forwards = 0
    _rl_transferred = False

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)  # type: ignore[misc]
        self._rl_sampled = SampledTokens()
        bind = getattr(getattr(self, "weight_transfer_engine", None), "bind", None)
        if bind is not None:
            bind(self.vllm_config)  # type: ignore[attr-defined]

    def rl_shape(self) -> ModelShape:
        config = hf_config_dict(self.model_config.hf_config)  # type: ignore[attr-defined]
        config.pop("quantization_config", None)
        return ModelShape.from_hf_config(config)

    def rl_report(self) -> dict[str, Any]:
        """What this process has installed and launched since the last ``rl_reset_launches``."""
        runner = self.model_runner  # type: ignore[attr-defined]
        classes: dict[str, int] = {}
        for module in runner.get_model().modules():
            if {c.__name__ for c in type(module).__mro__} & set(BOUNDARIES):
                label = f"{type(module).__module__}.{type(module).__qualname__}"
                method = getattr(module, "quant_method", None) or getattr(module, "impl", None)
                if method is not None:
                    label += f" + {type(method).__module__}.{type(method).__qualname__}"
                classes[label] = classes.get(label, 0) + 1
        config = self.vllm_config  # type: ignore[attr-defined]
        profile = profile_of(config)
        shape = self.rl_shape()
        return {
            "mode": self.rl_mode,
            "rank": self.rank,  # type: ignore[attr-defined]
            "tp": config.parallel_config.tensor_parallel_size,
            "pid": os.getpid(),
            "vllm": _vllm_version(),
            "torch": str(torch.__version__),
            "profile": None if profile is None else profile.fingerprint,
            "contracts": {} if profile is None else {k: c.fingerprint for k, c in profile.contracts.items()},
            "layers": shape.layers,
            "qk_norm": shape.qk_norm,
            "modules": dict(sorted(classes.items())),
            "sampler": f"{type(runner.sampler).__module__}.{type(runner.sampler).__qualname__}",
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "logprobs": {
                "mode": config.model_config.logprobs_mode,
                "temperature": "of the request, divided in fp32",
            },
            "compilation": self.rl_compilation(),
            "forwards": self._rl_forwards,
            "launches": self.rl_launches(),
            "graphs": {"captures": 0, "replays": 0},
            "poison": self._rl_poison,
        }

    def rl_compilation(self) -> dict[str, Any]:
        """How the model is compiled, and what strict mode has switched off there."""
        from rl_vllm.arguments import rewriting_passes

        compilation = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        passes = compilation.pass_config
        return {
            "mode": getattr(compilation.mode, "name", str(compilation.mode)),
            "graphs": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
            "passes_off": [n for n in rewriting_passes(passes) if not getattr(passes, n)],
            "passes_on": [n for n in rewriting_passes(passes) if getattr(passes, n)],
        }

    def rl_launches(self) -> list[dict[str, Any]]:
        return launches()

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
        self._rl_session, self._rl_transferred = session, False

    def rl_cancel(self, session: str) -> None:
        """Give up a claim under which nothing was transferred."""
        active = self._weight_update_active  # type: ignore[has-type]
        if self._rl_session != session or active:
            raise ContractError(
                f"session {session!r} can't be cancelled: open is {self._rl_session!r}, "
                f"weights {'have' if active else 'have not'} been transferred"
            )
        self._rl_session = None

    def rl_transfer(self, path: str, version: str) -> None:
        """Load a pushed directory into the live parameters; a failure poisons this worker."""
        if self._rl_session is None:
            raise ContractError("no weight update is open; begin one before transferring")
        try:
            self.start_weight_update()
            self.update_weights({"path": path, "version": version})  # type: ignore[attr-defined]
        except BaseException as error:
            self.rl_poison(f"transfer of {version or path} failed: {error}")
            raise
        self._rl_transferred = True

    def rl_finish(self) -> dict[str, int]:
        """Close the update; an engine healed by a whole update serves again. Returns tokens sampled, by request."""
        if self._rl_session is None:
            raise ContractError("no weight update is open; begin one before finishing it")
        if not self._rl_transferred:
            raise ContractError("the update brought no weights; transfer them before finishing")
        self.finish_weight_update()  # type: ignore[attr-defined]
        self._rl_session = None
        self._rl_poison = None
        return self._rl_sampled.pushed()

    def rl_kept(self) -> dict[str, int]:
        """Tokens with which requests in flight at the last push have come back since, by request."""
        return self._rl_sampled.kept()

    def rl_poison(self, reason: str) -> None:
        """Refuse to run until a later update has finished; abandons an open one."""
        self._rl_poison = reason
        self._rl_session = None
        self._weight_update_active = False

    def rl_open_session(self) -> str | None:
        return self._rl_session

    def rl_shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> tuple[int, dict[str, str]]:
        """``(tp rank, {hf name: digest})`` of the bytes this worker computes with."""
        shape, tp = self.rl_shape(), self.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]
        rank = self.rank % tp  # type: ignore[attr-defined]
        parameters = dict(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]
        return rank, digests(algorithm, from_vllm(parameters, shape, rank, tp))

    def start_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, except that strict weights are never taken apart for its layerwise reload (0.24 asks here)."""
        stock = super().start_weight_update  # type: ignore[misc]
        if self.rl_mode == "strict" and "is_checkpoint_format" in inspect.signature(stock).parameters:
            return stock(is_checkpoint_format=False)
        return stock(*args, **kwargs)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if self._rl_poison is not None:
            raise RuntimeError(
                f"this engine is poisoned and must not serve: {self._rl_poison}; push whole weights and finish"
            )
        result = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        schedule = args[0] if args else kwargs["scheduler_output"]
        self._rl_sampled.observe(schedule)
        return result


class StrictLoading:
    """Mixed in before ``Reporting``: builds the model out of strict layers."""

    rl_mode = "strict"

    def load_model(self, **kwargs: Any) -> None:
        from vllm.distributed import get_tp_group

        profile = profile_of(self.vllm_config)  # type: ignore[attr-defined]
        if profile is None:
            name = type(self).__name__
            raise ContractError(f"{name} needs a profile; start the engine with rl_vllm.engine_args(profile)")
        self.strict = Strict(profile, communicator(get_tp_group(), profile))
        with building(self.strict):
            super().load_model(**kwargs)  # type: ignore[misc]
        self._check_loaded()
        self._complete()

    def _check_loaded(self) -> None:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        bad = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if bad:
            raise ContractError(
                f"after loading, {', '.join(bad)} hold NaN or infinity: "
                "the checkpoint lacks these tensors or holds such values; give a complete, finite checkpoint"
            )

    def _complete(self) -> None:
        raise NotImplementedError


def _vllm_version() -> str:
    import vllm

    return getattr(vllm, "__version__", None) or version("vllm")
