"""A small random checkpoint of realistic scale, saved as a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vime_sync import ModelShape


def tiny_config(architecture: str = "Qwen3ForCausalLM", *, tied: bool = False, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": [architecture],
        "model_type": {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[architecture],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 96,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {**config, **changes}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices of std 1/sqrt(K) with a few outlier channels, norms near 1, embeddings with some -0.0; bf16."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in ModelShape.from_hf_config(config).hf_shapes():
        if len(shape) == 1:
            w = 1 + 0.1 * torch.randn(shape, generator=g)
        else:
            w = torch.randn(shape, generator=g) * shape[1] ** -0.5
            w[:, torch.randperm(shape[1], generator=g)[: shape[1] // 40]] *= 8
        if "embed" in name:
            w *= 2
            w[:, ::17] = -0.0
        out[name] = w.to(torch.bfloat16)
    return out


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
