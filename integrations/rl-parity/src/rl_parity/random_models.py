"""Seeded random weights in the dimensions of real models: no download, realistic scale, the same bits every time.

Blocks of a tensor are drawn from generators of their own, keyed by (seed, tensor, block), so that threads share the
work and neither their number nor their order shows in the bits.
"""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rl_parity.models import ModelSpec

PREFIX = "random:"
_BLOCK = 1 << 20


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool, vocab: int = 151936) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        tied=tied,
        qk_norm=True,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=min(heads, 8),
        head_dim=128,
        rope_theta=1e6,
        max_positions=40960,
        vocab_size=vocab,
        outlier_channels=max(3, hidden // 128),
    )


# the figures of the published config.json of Qwen3-0.6B, -1.7B and -8B; "small" is for a first try of everything
RANDOM: dict[str, ModelSpec] = {
    PREFIX + "qwen3-small": _qwen3(512, 1024, 4, 8, tied=True, vocab=8192),
    PREFIX + "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    PREFIX + "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    PREFIX + "qwen3-8b-8layers": _qwen3(4096, 12288, 8, 32, tied=False),
    PREFIX + "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
}


@dataclass(frozen=True)
class _Recipe:
    """One tensor: ``std`` of a matrix, or a norm weight near 1 with ``outliers`` channels ``gain`` times larger."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    outliers: int = 0
    gain: float = 1.0


def _recipes(spec: ModelSpec) -> Iterator[_Recipe]:
    h, f, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    wide, narrow = spec.num_heads * d, spec.num_kv_heads * d
    matrices = (
        ("self_attn.q_proj", (wide, h)),
        ("self_attn.k_proj", (narrow, h)),
        ("self_attn.v_proj", (narrow, h)),
        ("self_attn.o_proj", (h, wide)),
        ("mlp.gate_proj", (f, h)),
        ("mlp.up_proj", (f, h)),
        ("mlp.down_proj", (h, f)),
    )
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _Recipe(f"{p}{name}.weight", (h,), outliers=spec.outlier_channels, gain=spec.outlier_gain)
        if spec.qk_norm:
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                yield _Recipe(f"{p}{name}.weight", (d,))
        for name, shape in matrices:
            yield _Recipe(f"{p}{name}.weight", shape, std=1 / math.sqrt(shape[1]))


def random_tensors(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Seeded bf16 weights by Hugging Face name, scaled as ``models.tensors`` scales those of the tiny models.

    The generator is numpy's SFC64 with its fp32 normals; a value may differ on a machine whose C library rounds
    ``expf`` or ``logf`` differently, which the digest of a run's first weights would show.
    """
    norm = _Recipe("model.norm.weight", (spec.hidden_size,), outliers=spec.outlier_channels, gain=spec.outlier_gain)
    out: dict[str, torch.Tensor] = {}
    jobs: list[tuple[_Recipe, int]] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        out[norm.name] = _norm_weight(norm, seed, 0)
        # the final norm makes hidden of RMS 1 before its weight, hence logits of std |weight| * head_std
        head_std = spec.logit_std / float(out[norm.name].float().norm())
        table = (spec.vocab_size, spec.hidden_size)
        recipes = [*_recipes(spec), _Recipe("model.embed_tokens.weight", table, std=head_std if spec.tied else 1.0)]
        if not spec.tied:
            recipes.append(_Recipe("lm_head.weight", table, std=head_std))
        for place, recipe in enumerate(recipes, start=1):
            if recipe.std:
                out[recipe.name] = torch.empty(recipe.shape, dtype=torch.bfloat16)
                jobs.append((recipe, place))
            else:
                out[recipe.name] = _norm_weight(recipe, seed, place)
        work = [
            pool.submit(_fill, out[recipe.name].view(-1), start, recipe.std, seed, place)
            for recipe, place in jobs
            for start in range(0, out[recipe.name].numel(), _BLOCK)
        ]
        for done in work:
            done.result()
    return out


def _generator(seed: int, place: int, block: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed % 2**64, place, block])))


def _fill(flat: torch.Tensor, start: int, std: float, seed: int, place: int) -> None:
    part = flat[start : start + _BLOCK]
    values = _generator(seed, place, start // _BLOCK).standard_normal(part.numel(), dtype=np.float32)
    values *= np.float32(std)
    part.copy_(torch.from_numpy(values))


def _norm_weight(recipe: _Recipe, seed: int, place: int) -> torch.Tensor:
    generator = _generator(seed, place, 0)
    weight = np.float32(1) + np.float32(0.1) * generator.standard_normal(recipe.shape[0], dtype=np.float32)
    weight[generator.permutation(recipe.shape[0])[: recipe.outliers]] *= np.float32(recipe.gain)
    return torch.from_numpy(weight).to(torch.bfloat16)
