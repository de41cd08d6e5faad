"""Weight-transfer backend ``vime_sync``: every worker reads the pushed directory into its live parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import vime_sync
from rl_contract import ContractError
from rl_vllm.config import profile_of
from rl_vllm.settings import hf_config_dict


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to set up: the path of a push travels with it."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A directory written by ``vime_sync.write_weights``, readable by every worker."""

    path: str
    version: str = ""


class VimeSyncTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Strict engines: checked whole, then copied byte for byte. Audited engines: vLLM's own reload, which packs."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    # vLLM 0.24 constructs its engines without the configuration, the worker hands it in
    vllm_config: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, dict[str, str]] = {}
        self._loaded = False
        if self.vllm_config is not None:
            self.bind(self.vllm_config)

    def bind(self, vllm_config: Any) -> None:
        """Learn what this engine serves."""
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        config = hf_config_dict(self.model_config.hf_config)
        config.pop("quantization_config", None)
        self.shape = vime_sync.ModelShape.from_hf_config(config)
        self.tp = self.parallel_config.tensor_parallel_size
        self.tp_rank = self.parallel_config.rank % self.tp

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._loaded = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any = None) -> None:
        """Load a pushed directory. ``load_weights``: what vLLM 0.24 hands in for an audited engine, inside its reload.

        Raises:
            ContractError: a missing, unknown, mis-shaped, mistyped or nonfinite tensor; nothing is written then.
        """
        expected = vime_sync.PolicyVersion.parse(update_info.version) if update_info.version else None
        # vLLM 0.24 calls this inside a context that makes new tensors on the device: right for its loaders alone
        outer = torch.get_default_device()
        with torch.device("cpu"), vime_sync.read_weights(Path(update_info.path), expected) as weights:
            vime_sync.layout.check_hf(weights, self.shape)
            self._check_types(weights)
            if profile_of(self.vllm_config) is not None:
                self._copy(vime_sync.vllm_shards(weights, self.shape, self.tp_rank, self.tp))
            else:
                with torch.device(outer):
                    if load_weights is None:
                        self._reload(weights)
                    else:
                        load_weights(list(weights.items()))
                shards = vime_sync.vllm_shards(weights, self.shape, self.tp_rank, self.tp)
                self.received = {weights.algorithm: vime_sync.digests(weights.algorithm, shards)}
        self._loaded = True

    def finish_weight_update(self) -> None:
        if not self._loaded:
            raise ContractError("the update brought no weights; transfer them before finishing")

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not the way this backend works: the trainer writes a directory (``vime_sync.write_weights``)."""
        raise ContractError("vime_sync pushes a written directory; use vime_sync.write_weights and VllmEngineClient")

    def _check_types(self, weights: vime_sync.Weights) -> None:
        want = str(self.model_config.dtype).removeprefix("torch.")
        wrong = [f"{entry.name} is {entry.dtype}" for entry in weights.manifest.entries if entry.dtype != want]
        if wrong:
            raise ContractError(
                f"pushed weights: {'; '.join(wrong)}; the engine computes in {want} and casts nothing, push that type"
            )

    def _copy(self, shards: Any) -> None:
        parameters = dict(self.model.named_parameters())
        live = dict(vime_sync.from_vllm(parameters, self.shape, self.tp_rank, self.tp))
        with torch.no_grad():
            for name, shard in shards:
                mine = live[name]
                if shard.is_cuda and shard.device != mine.device:
                    # the memory of an engine that can sleep is mapped on its own GPU alone, and a copy between two
                    # GPUs runs on the one it comes from
                    shard = shard.to(mine.device)
                mine.copy_(shard)

    def _reload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        finalize_layerwise_reload(self.model, self.model_config)
