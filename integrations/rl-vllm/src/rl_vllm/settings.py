"""From a Hugging Face checkpoint's configuration to the settings of a profile."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_contract import ContractError, Settings
from vime_sync import rope as rope_rules
from vime_sync.shape import architectures, head_dim, value_problems

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


def hf_config_dict(source: Any) -> dict[str, Any]:
    """The configuration as a plain dict.

    Args:
        source: a checkpoint folder, a mapping, or a transformers configuration.

    Raises:
        ContractError: none of these, or the folder holds no readable config.json.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    if not source or not isinstance(source, (str, os.PathLike)):
        raise ContractError(
            f"got {source!r:.80} as a model config; supported: a checkpoint folder, a dict or an HF config"
        )
    file = Path(source) / "config.json"
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise ContractError(
            f"{file}: {error}; give a Hugging Face checkpoint folder with a readable config.json"
        ) from error


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """``theta``, ``rotary_dim`` and, where the model scales its positions, the keys of that rule.

    Raises:
        ContractError: a rule that no strict table implements, or one whose figures are missing or make no sense.
    """
    if problems := value_problems(config):
        raise ContractError(f"the model config has {'; '.join(problems)}")
    rope = rope_rules.rope_settings(config, head_dim(config))
    # imported here: every vLLM process loads this file with the plugin, and a worker's start walks all loaded modules,
    # where it stumbles over llvmlite's, which come with the kernels
    from rl_attn.rope import inverse_frequencies

    # the table's own checks, before anything is loaded
    inverse_frequencies(rope["rotary_dim"], rope["theta"], rope_scaling(rope))
    return rope


def rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scaling rule inside ``Settings.rope``, or None."""
    return {k: v for k, v in rope.items() if k not in ("theta", "rotary_dim")} or None


def settings_from_hf(source: Any, *, leaves: int, dtype: str | None = None, **overrides: Any) -> Settings:
    """Settings of a Qwen3 or Llama checkpoint.

    Args:
        source: checkpoint folder, mapping or transformers configuration.
        leaves: G of the row-parallel trees, at least the larger TP size of the two engines.
        dtype: ``bfloat16`` or ``float32``; default is the checkpoint's.
        overrides: any other field of ``Settings``.

    Raises:
        ContractError: an unsupported architecture, rope rule or value.
    """
    config = hf_config_dict(source)
    architecture = (architectures(config) or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise ContractError(f"architecture {architecture!r} is not supported; supported: {ARCHITECTURES}")
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    if missing := [key for key in needed if config.get(key) is None]:
        raise ContractError(f"the model config lacks {', '.join(missing)}; give the checkpoint's whole config.json")
    own = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    values: dict[str, Any] = {
        "arch": "cpu",
        "dtype": dtype or str(own).removeprefix("torch."),
        "hidden_size": int(config["hidden_size"]),
        "vocab_size": int(config["vocab_size"]),
        "norm_eps": float(config["rms_norm_eps"]),
        "rope": rope_settings(config),
        "leaves": leaves,
    }
    return Settings(**{**values, **overrides})
