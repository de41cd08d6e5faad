"""vLLM's GPU worker with a strict model inside: CUDA graphs counted, sleep and wake guarded, both model runners."""

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from rl_contract import ContractError
from rl_vllm import graphs
from rl_vllm.generators import make_seed_holders
from rl_vllm.reporting import Reporting, StrictLoading
from vime_sync import WEIGHT_DIGEST

if TYPE_CHECKING:
    from rl_vllm.sampling_graphs import SamplingGraphs


def share_kernel_cache() -> str:
    """Where Triton keeps compiled kernels: the user's directory, whatever is compiled around them.

    Inductor moves it below vLLM's cache of one model and one configuration unless it is set, and then every strict
    kernel, the same for every engine and for the trainer, would be compiled again for each.
    """
    from triton import knobs

    return os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


class ReportingGPUWorker(Reporting, Worker):
    _rl_asleep: frozenset[str] = frozenset()
    _rl_trace: str | None = None

    def load_model(self, **kwargs: Any) -> None:
        # before the first capture
        graphs.count_graphs(torch.cuda.CUDAGraph)
        super().load_model(**kwargs)

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        # what was launched to warm up and to capture belongs to no forward pass
        self.rl_reset_launches()
        return result

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        schedule = args[0] if args else kwargs["scheduler_output"]
        if not schedule.total_num_scheduled_tokens:
            return super().execute_model(*args, **kwargs)
        self._rl_forwards += 1
        if self._rl_trace is None:
            return super().execute_model(*args, **kwargs)
        from rl_vllm.trace import recording

        path, self._rl_trace = self._rl_trace, None
        with recording(path, self.model_runner.get_model()):
            return super().execute_model(*args, **kwargs)

    def rl_trace(self, path: str) -> None:
        """Profile the next forward pass and write its trace to ``path`` + ``.rank``; see ``rl_vllm.trace``."""
        self._rl_trace = f"{path}.{self.rank}"

    def rl_report(self) -> dict[str, Any]:
        # since the last report; what graphs and CUDA itself hold is no tensor's
        memory = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)}
        torch.cuda.reset_peak_memory_stats()
        return super().rl_report() | {"graphs": graphs.summary(), "memory": memory}

    def rl_launches(self) -> list[dict[str, Any]]:
        return [*super().rl_launches(), *graphs.replayed()]

    def rl_reset_launches(self) -> None:
        super().rl_reset_launches()
        graphs.reset_replays()

    def sleep(self, level: int = 1) -> None:
        try:
            super().sleep(level)
        except AssertionError as error:
            # raised when all is done: vLLM looks at the whole GPU, which another process may have filled meanwhile
            if "Memory usage increased" not in str(error):
                raise
        self._rl_asleep = frozenset({"weights", "kv_cache"})
        if level >= 2:
            self.rl_poison("sleep level 2 dropped its weights")

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self._rl_asleep = frozenset() if tags is None else self._rl_asleep - set(tags)

    def rl_transfer(self, path: str, version: str) -> None:
        # memory that is not mapped would end the process
        if "weights" in self._rl_asleep:
            raise ContractError("the weights are asleep; wake them (wake_up(tags=['weights'])) before a push")
        super().rl_transfer(path, version)

    def rl_shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> tuple[int, dict[str, str]]:
        if "weights" in self._rl_asleep:
            raise ContractError("the weights are asleep; wake them (wake_up(tags=['weights'])) before reading them")
        return super().rl_shard_digests(algorithm)


class AuditGPUWorker(ReportingGPUWorker):
    """vLLM's own operators, with the reports of a strict engine."""


class StrictGPUWorker(StrictLoading, ReportingGPUWorker):
    """Builds the model out of strict layers and the sampler out of strict log-probabilities."""

    _sampling: "SamplingGraphs | None" = None

    def init_device(self) -> None:
        # vLLM's all-reduce through symmetric memory is never called, and would keep its buffers and multicast objects
        os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        share_kernel_cache()
        super().load_model(**kwargs)

    def _complete(self) -> None:
        from rl_vllm import fusing, prefill_graphs, sampling_graphs
        from rl_vllm.gpu_sampling import install

        if fusing.decided(self.vllm_config):
            fusing.fuse(self.model_runner.get_model())
        self._v2 = bool(getattr(self, "use_v2_model_runner", False))
        self._draws = install(self.strict.profile, self.model_runner, self._v2)
        if self._v2:
            prefill_graphs.install(self.model_runner, self.vllm_config)
            self._sampling = sampling_graphs.install(self.model_runner, self.vllm_config, self.strict.comm)

    def rl_reset_launches(self) -> None:
        super().rl_reset_launches()
        if self._sampling is not None:
            self._sampling.reset()

    def compile_or_warm_up_model(self) -> Any:
        from rl_vllm import warming

        result = super().compile_or_warm_up_model()
        warming.warm(self)
        self.rl_reset_launches()
        self._draws.forget()
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if not self._v2:
            make_seed_holders(self.model_runner)
        return super().sample_tokens(*args, **kwargs)

    def rl_report(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        self._draws.check()
        return super().rl_report() | {"sampling": {} if self._sampling is None else self._sampling.report()}
