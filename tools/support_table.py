"""Write docs/support.md: what both engines accept on a CPU, as their gates answer when this runs.

Nothing here states what is supported. Each case is a checkpoint's configuration and a cut; the page shows what
``rl_vllm.engine_violations`` and ``rl_megatron.ModelConfig.check`` say about it. No engine is started.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_contract import ContractError, MissingSupport, Profile, build_profile
from vime_sync.rope import ROPE_TYPES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
LEAVES = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """``changes`` to the base configuration, and a cut; ``named`` must appear in a refusal."""

    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    cp: int = 1
    dtype: str = "bfloat16"
    named: str = ""


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
# the spelling of transformers 5, which older readers of rope_scaling pass over
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}


def other(label: str, architecture: str, **changes: Any) -> Case:
    """Another architecture; its refusal names it."""
    changes = {"architectures": [architecture], "model_type": architecture.lower(), **changes}
    return Case(label=label, changes=changes, named=architecture)


LINEAR_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
SECTIONS: dict[str, list[Case]] = {
    "Models": [
        Case(label="Qwen3, dense"),
        Case(label="Qwen3, dense, tied head", changes={"tie_word_embeddings": True}),
        Case(label="Llama", changes=LLAMA),
        Case(label="Llama, tied head", changes={**LLAMA, "tie_word_embeddings": True}),
        Case(label="Llama, llama3 positions", changes={**LLAMA, "rope_scaling": LLAMA3}),
        Case(label="YaRN positions", changes={"rope_scaling": YARN}, named="yarn"),
        Case(
            label="rope_scaling (llama3) beside another rope_parameters",
            changes={**LLAMA, "rope_scaling": LLAMA3, "rope_parameters": DEFAULT},
            named="rope_parameters",
        ),
        Case(
            label="rope_scaling (YaRN) beside another rope_parameters",
            changes={"rope_scaling": YARN, "rope_parameters": DEFAULT},
            named="yarn",
        ),
        Case(label="partial rotary factor", changes={"partial_rotary_factor": 0.5}, named="partial_rotary_factor"),
        other("Qwen2 (bias in q, k, v)", "Qwen2ForCausalLM"),
        Case(label="sliding window", changes={"use_sliding_window": True, "sliding_window": 128}, named="sliding"),
        Case(label="attention bias", changes={"attention_bias": True}, named="attention_bias"),
        Case(label="another activation", changes={"hidden_act": "gelu"}, named="gelu"),
        Case(label="FP8 weights", changes={"quantization_config": {"quant_method": "fp8"}}, named="quantis"),
        other("mixture of experts: Qwen3-MoE", "Qwen3MoeForCausalLM", num_experts=8),
        other("mixture of experts: Mixtral", "MixtralForCausalLM", num_local_experts=8),
        other("latent attention: DeepSeek-V3", "DeepseekV3ForCausalLM"),
        other("vision: Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration"),
        other("vision: Qwen3-VL", "Qwen3VLForConditionalGeneration"),
        other("state space: Mamba-2", "Mamba2ForCausalLM"),
        other("hybrid: Nemotron-H", "NemotronHForCausalLM"),
        Case(label="hybrid: linear-attention layers", changes=LINEAR_LAYERS, named="linear_attention"),
    ],
    "Types": [Case(label=t, dtype=t, named=t) for t in ("bfloat16", "float32", "float16")],
    "Tensor parallel": [Case(label=f"TP {tp}", tp=tp, named=str(tp)) for tp in (1, 2, 4, 8, 3, 16)],
    "Context parallel (trainer)": [Case(label=f"CP {cp}", cp=cp, named=f"cp={cp}") for cp in (1, 2, 4, 3, 8)],
}


def base() -> dict[str, Any]:
    """A small dense Qwen3 whose heads every tensor-parallel size up to 8 divides."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "vocab_size": 96,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def profile_for(config: Mapping[str, Any], dtype: str) -> Profile:
    """The profile of this checkpoint; where no profile can be made of it, that of the base."""
    from rl_vllm import settings_from_hf

    try:
        return build_profile("support", settings_from_hf(config, leaves=LEAVES, dtype=dtype))
    except ContractError:
        return build_profile("support", settings_from_hf(base(), leaves=LEAVES, dtype=dtype))


def answers(case: Case) -> tuple[str, str]:
    """Why the rollout engine and the trainer refuse the case; empty where they accept it."""
    from rl_megatron import ModelConfig, ParallelConfig
    from rl_vllm import engine_violations

    config = {**base(), **case.changes}
    try:
        profile = profile_for(config, case.dtype)
    except ContractError as error:
        return str(error), str(error)
    rollout = "; ".join(engine_violations(profile, config, case.tp))
    try:
        ModelConfig.from_hf(config).check(profile, ParallelConfig(tp=case.tp, cp=case.cp))
    except (ContractError, MissingSupport) as error:
        return rollout, str(error)
    return rollout, ""


def build() -> str:
    """The page."""
    lines = [
        "# What is supported on a CPU",
        "",
        "What both engines' gates answer when `python tools/support_table.py` runs; a test fails when this page says "
        "something else. A refusal comes before any weight is loaded and names its reason.",
        "",
        "Accepted means that a run may start. Bits are compared on whole trainers at TP 1 to 8 and CP 1 to 4 and on "
        "whole engines at TP 1 to 4, TP 8 operator by operator; see [field reports](field-reports.md) for the tests.",
        "",
        f"Positions have one rule for both engines, `vime_sync.rope`: {' and '.join(ROPE_TYPES)}. Where a config.json "
        "states them twice (`rope_scaling`, `rope_parameters`), both must say the same.",
        "",
        "What was measured on H200 GPUs is in [results](results/h200); no other accelerator has results.",
    ]
    for title, cases in SECTIONS.items():
        lines += ["", f"## {title}", "", "| case | vLLM | Megatron-core |", "|---|---|---|"]
        for case in cases:
            cells = ["refused" if reason else "accepted" for reason in answers(case)]
            if "trainer" in title:
                cells[0] = "-"
            lines.append(f"| {case.label} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Write the page; there is nothing to ask for."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    PAGE.write_text(build(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
