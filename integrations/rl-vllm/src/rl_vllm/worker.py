"""vLLM's CPU worker with a strict model inside.

The worker class is part of the engine's configuration, so a process that cannot import it does not start.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rl_contract import ContractError
from rl_vllm.generators import make_rewindable
from rl_vllm.reporting import Reporting, StrictLoading
from vime_sync import WEIGHT_DIGEST


class ReportingCPUWorker(Reporting, CPUWorker):
    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self.model_runner.get_model().register_forward_pre_hook(self._count_forward)

    def _count_forward(self, *_: Any) -> None:
        self._rl_forwards += 1

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        make_rewindable(self.model_runner)
        return super().sample_tokens(*args, **kwargs)


class AuditCPUWorker(ReportingCPUWorker):
    """vLLM's own operators, with the reports of a strict engine."""

    def rl_shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> tuple[int, dict[str, str]]:
        # stock CPU layers pack their weights away; what can be digested is what the last push handed to the loaders
        engine = self.weight_transfer_engine
        received = getattr(engine, "received", {}).get(algorithm)
        if not received:
            raise ContractError(
                "vLLM's CPU layers pack their weights, so an audited engine digests only what a push brought; "
                "push weights first"
            )
        return self.rank % self.parallel_config.tensor_parallel_size, dict(received)


class StrictCPUWorker(StrictLoading, ReportingCPUWorker):
    """Builds the model out of strict layers and the sampler out of strict log-probabilities."""

    def _complete(self) -> None:
        from rl_vllm.sampling import StrictSampler

        self.model_runner.sampler = StrictSampler(self.strict.profile, self.model_runner)
