"""The built-in models: small seeded Hugging Face checkpoints with weights of realistic scale.

Unlike an engine's dummy weights they have a few outlier channels, so that a change of order or rounding shows.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError
from rl_parity.rundir import write_json
from rl_parity.vocabulary import VOCABULARY, write_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a built-in model. The tiny ones' real vocabulary (77) is no multiple of any padding."""

    architecture: str
    model_type: str
    tied: bool
    qk_norm: bool
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 512
    vocab_size: int = len(VOCABULARY)
    logit_std: float = 2.0
    outlier_channels: int = 3
    outlier_gain: float = 6.0


TINY: dict[str, ModelSpec] = {
    "tiny-qwen3": ModelSpec(architecture="Qwen3ForCausalLM", model_type="qwen3", tied=False, qk_norm=True),
    "tiny-llama": ModelSpec(
        architecture="LlamaForCausalLM", model_type="llama", tied=True, qk_norm=False, rms_norm_eps=1e-5
    ),
}


def spec_of(name: str) -> ModelSpec | None:
    """The built-in model of that name, tiny or ``random:...``; None where the name is a path."""
    if name in TINY:
        return TINY[name]
    from rl_parity.random_models import RANDOM

    return RANDOM.get(name)


def weight_bytes(spec: ModelSpec) -> int:
    """Bytes of the model in bf16."""
    h, d = spec.hidden_size, spec.head_dim
    layer = h * d * (2 * spec.num_heads + 2 * spec.num_kv_heads) + 3 * h * spec.intermediate_size + 2 * h + 2 * d
    return 2 * (spec.num_layers * layer + spec.vocab_size * h * (1 if spec.tied else 2) + h)


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of a built-in model."""
    return {
        "architectures": [spec.architecture],
        "model_type": spec.model_type,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index("<eos>"),
        "pad_token_id": VOCABULARY.index("<pad>"),
    }


def tensors(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Seeded bf16 weights by Hugging Face name.

    Projections have standard deviation ``1/sqrt(fan_in)``; norm weights lie near 1 with a few channels ``outlier_gain``
    times larger; the head is scaled so that the logits have standard deviation ``logit_std``.
    """
    generator = torch.Generator().manual_seed(seed)
    h, f, d, v = spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.vocab_size

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm_weight(width: int, outliers: int) -> torch.Tensor:
        weight = 1.0 + 0.1 * torch.randn(width, generator=generator)
        at = torch.randperm(width, generator=generator)[:outliers]
        weight[at] *= spec.outlier_gain
        return weight

    out: dict[str, torch.Tensor] = {}
    embedding = normal(v, h, std=1.0)
    out["model.embed_tokens.weight"] = embedding
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = norm_weight(h, spec.outlier_channels)
        out[p + "self_attn.q_proj.weight"] = normal(spec.num_heads * d, h, std=1 / math.sqrt(h))
        out[p + "self_attn.k_proj.weight"] = normal(spec.num_kv_heads * d, h, std=1 / math.sqrt(h))
        out[p + "self_attn.v_proj.weight"] = normal(spec.num_kv_heads * d, h, std=1 / math.sqrt(h))
        out[p + "self_attn.o_proj.weight"] = normal(h, spec.num_heads * d, std=1 / math.sqrt(spec.num_heads * d))
        if spec.qk_norm:
            out[p + "self_attn.q_norm.weight"] = norm_weight(d, 0)
            out[p + "self_attn.k_norm.weight"] = norm_weight(d, 0)
        out[p + "post_attention_layernorm.weight"] = norm_weight(h, spec.outlier_channels)
        out[p + "mlp.gate_proj.weight"] = normal(f, h, std=1 / math.sqrt(h))
        out[p + "mlp.up_proj.weight"] = normal(f, h, std=1 / math.sqrt(h))
        out[p + "mlp.down_proj.weight"] = normal(h, f, std=1 / math.sqrt(f))
    final = norm_weight(h, spec.outlier_channels)
    out["model.norm.weight"] = final
    # the final norm makes hidden of RMS 1 before its weight, hence logits of std |weight| * head_std
    head_std = spec.logit_std / float(final.norm())
    if spec.tied:
        embedding *= head_std
    else:
        out["lm_head.weight"] = normal(v, h, std=head_std)
    return {name: t.to(torch.bfloat16).contiguous() for name, t in out.items()}


def write_model(name: str, folder: Path | str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a built-in model as a Hugging Face folder: config.json, model.safetensors, tokenizer.json.

    Args:
        name: ``tiny-qwen3``, ``tiny-llama`` or ``random:NAME``.
        changes: fields of ``ModelSpec`` to replace, for tests.

    Raises:
        ContractError: no built-in model has that name, or the folder cannot be made.
    """
    from safetensors.torch import save_file

    from rl_parity.random_models import RANDOM, random_tensors

    found = spec_of(name)
    if found is None:
        raise ContractError(
            f"no built-in model {name!r}; built in are {[*TINY, *RANDOM]}, or give the path of a checkpoint"
        )
    spec, folder = replace(found, **changes), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ContractError(f"{folder} cannot be made ({error}); give a directory that can be") from error
    weights = tensors(spec, seed) if name in TINY else random_tensors(spec, seed)
    # a reader must never find half a model
    partial = folder / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    write_description(spec, folder)
    return folder


def write_description(spec: ModelSpec, folder: Path) -> None:
    """Write what a built-in model has beside its weights: its tokenizer and ``config.json``."""
    write_tokenizer(folder)
    write_json(folder / "config.json", hf_config(spec))
