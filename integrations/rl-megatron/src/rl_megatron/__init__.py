"""The strict operators inside stock Megatron-core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_megatron import imports
from rl_megatron.config import ModelConfig, ParallelConfig
from rl_megatron.cpu_device import cpu_device

if TYPE_CHECKING:
    from rl_megatron.batch import PackedBatch, Sample, micro_batches
    from rl_megatron.checkpoint import export_hf, load_hf, save_hf
    from rl_megatron.loss import LossConfig, group_advantages, grpo_loss
    from rl_megatron.model import build_model
    from rl_megatron.native import native_substitutions
    from rl_megatron.optimizer import OptimizerConfig, StrictOptimizer
    from rl_megatron.scoring import logprobs
    from rl_megatron.spec import strict_layer_spec
    from rl_megatron.trainer import TrainerRank

__all__ = [
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PackedBatch",
    "ParallelConfig",
    "Sample",
    "StrictOptimizer",
    "TrainerRank",
    "build_model",
    "cpu_device",
    "export_hf",
    "group_advantages",
    "grpo_loss",
    "load_hf",
    "logprobs",
    "micro_batches",
    "native_substitutions",
    "save_hf",
    "strict_layer_spec",
]

# importing these imports megatron, which a preflight on a checkpoint's config does not need
_HOMES = {
    "PackedBatch": "batch",
    "Sample": "batch",
    "micro_batches": "batch",
    "export_hf": "checkpoint",
    "load_hf": "checkpoint",
    "save_hf": "checkpoint",
    "logprobs": "scoring",
    "LossConfig": "loss",
    "group_advantages": "loss",
    "grpo_loss": "loss",
    "build_model": "model",
    "native_substitutions": "native",
    "OptimizerConfig": "optimizer",
    "StrictOptimizer": "optimizer",
    "strict_layer_spec": "spec",
    "TrainerRank": "trainer",
}

imports.install()

# modules that import megatron and are asked for by their own name, as in ``from rl_megatron import topology``
_MODULES = {*_HOMES.values(), "layers", "megatron_optimizer", "own_optimizer", "topology"}


# a type checker sees the names above alone
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None and name not in _MODULES:
            raise AttributeError(f"module 'rl_megatron' has no attribute {name!r}")
        try:
            module = import_module(f"rl_megatron.{home or name}")
        except Exception as error:
            if found := imports.missing(f"rl_megatron.{name}", error):
                raise found from found.__cause__
            if isinstance(error, AttributeError):
                # which Python would take for "there is no such name here", and drop
                raise ImportError(f"importing rl_megatron.{home or name} failed: AttributeError: {error}") from error
            raise
        return module if home is None else getattr(module, name)
