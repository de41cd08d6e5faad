"""How the profile travels: as a quantisation config, which vLLM carries from its arguments to every layer of a worker.

Nothing is quantised. An engine is strict exactly when its model configuration names ``rl_strict``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rl_contract import ContractError, MissingSupport, Profile, check_built

METHOD = "rl_strict"


def read_profile(value: Any) -> Profile:
    """A profile from a mapping, or from a JSON file.

    Raises:
        ContractError: neither, a mapping that is no profile, or one whose contracts are not those of its settings.
    """
    profile = _parsed(value)
    if profile.fingerprint not in _PROVEN:
        check_built(profile)
        _PROVEN.add(profile.fingerprint)
    return profile


# an engine reads its profile several times
_PROVEN: set[str] = set()


def _parsed(value: Any) -> Profile:
    if isinstance(value, Profile):
        return value
    try:
        if isinstance(value, str):
            value = json.loads(Path(value).read_text())
        if not isinstance(value, Mapping):
            raise TypeError(f"got {type(value).__name__}")
        return Profile.from_dict(value)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ContractError(
            f"rl_strict needs 'profile': the JSON of an rl_contract.Profile, or the path of such a file; {error!r}"
        ) from error


def carried(hf_overrides: Any) -> Profile | None:
    """The profile inside an engine's ``hf_overrides``, or None where the engine is not strict."""
    if not isinstance(hf_overrides, Mapping):
        return None
    config = hf_overrides.get("quantization_config")
    if not isinstance(config, Mapping) or config.get("quant_method") != METHOD:
        return None
    return read_profile(config.get("profile"))


def carrier(profile: Profile) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": METHOD, "profile": profile.to_dict()}}


class StrictConfig(QuantizationConfig):
    """Hands each layer its strict method; refuses layers that no strict operator serves."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.profile = profile

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "StrictConfig":
        return cls(read_profile(config.get("profile")))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from rl_vllm.layers import StrictEmbeddingMethod, StrictLinearMethod
        from rl_vllm.scope import active

        if isinstance(layer, LinearBase):
            active()
            return StrictLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            active()
            return StrictEmbeddingMethod()
        if type(layer).__name__ == "Attention":
            return None
        raise MissingSupport(f"{prefix}: no strict operator for {type(layer).__name__}; see rl_vllm.check_engine")


def profile_of(vllm_config: Any) -> Profile | None:
    """The profile an engine runs under, or None."""
    return vllm_config.quant_config.profile if isinstance(vllm_config.quant_config, StrictConfig) else None


def register() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(StrictConfig)
