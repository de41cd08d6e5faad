"""The stock ``GPTModel``, built for one checkpoint in one of two arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_contract import ContractError, MissingSupport, Profile
from rl_gemm.gpu import arch as gpu_arch
from rl_logprob import padded_vocab_size
from rl_megatron import layers, spec, te, topology
from rl_megatron.checks import choice_problem, sequence_problem
from rl_megatron.config import ModelConfig, ParallelConfig
from rl_megatron.cpu_device import cpu_device, device

Mode = Literal["strict", "native"]
Recompute = Literal["none", "full", "selective"]
# what Megatron can compute again in a dense layer; its "layernorm" needs TransformerEngine
RECOMPUTE_MODULES = ("core_attn", "mlp")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Built:
    """How a model was built; ``GPTModel.rl`` holds it."""

    config: ModelConfig
    profile: Profile
    parallel: ParallelConfig
    mode: Mode
    padded_vocab: int
    recompute: Recompute = "none"
    native_operators: Literal["te", "local"] | None = None
    native_fallback: str | None = None
    """Why ``auto`` took ``local``."""


def build_model(
    hf_config: Mapping[str, Any],
    profile: Profile,
    parallel: ParallelConfig,
    *,
    mode: Mode = "strict",
    recompute: Recompute = "none",
    recompute_modules: Sequence[str] = ("core_attn",),
    native_operators: te.NativeOperators = "auto",
) -> GPTModel:
    """Build this rank's part of the model on ``topology.start``'s device; every weight is NaN until ``load_hf``.

    Args:
        mode: ``strict`` uses the strict operators, ``native`` Megatron's own.
        recompute: which activations the backward computes again: ``none``, ``full`` (every layer from its input) or
            ``selective`` (``recompute_modules``, of ``core_attn`` and ``mlp``). Bits stay as they are.
        native_operators: of ``mode="native"``: ``te`` is Megatron's TransformerEngine spec with its fused rotary
            positions, SwiGLU and cross entropy, ``local`` its own modules and torch's attention, ``auto`` takes ``te``
            on a GPU where TransformerEngine can be imported.

    Raises:
        ContractError: an unsupported config, cut or profile, all problems at once, before anything is allocated.
        MissingSupport: recomputation on a CPU, or ``te`` without TransformerEngine.
    """
    config = ModelConfig.from_hf(hf_config)
    config.check(profile, parallel)
    _check_topology(parallel)
    if problem := choice_problem("mode", mode, ("strict", "native")):
        raise ContractError(problem)
    if profile.settings.dtype not in DTYPES:
        raise ContractError(f"dtype={profile.settings.dtype!r}, supported by the trainer: {sorted(DTYPES)}")
    if problem := te.option_problem(native_operators, mode):
        raise ContractError(problem)
    place = device()
    _check_device(place, profile, mode)
    check_recompute(recompute, recompute_modules, place.type)
    dtype = DTYPES[profile.settings.dtype]
    strict = mode == "strict"
    chosen = None if strict else _choose(native_operators, place, profile)
    operators = None if chosen is None else chosen.operators
    if operators == "te":
        te.name_random_state()
    padded = (
        padded_vocab_size(config.vocab_size, profile.settings.vocab_tile)
        if strict
        else _pad(config.vocab_size, parallel.tp)
    )
    with cpu_device():
        model = GPTModel(
            config=_transformer_config(config, parallel, dtype, operators, place, recompute, recompute_modules),
            transformer_layer_spec=spec.strict_block_spec(
                profile, num_layers=config.num_layers, qk_norm=config.qk_norm, max_positions=config.max_positions
            )
            if operators is None
            else spec.native_block_spec(num_layers=config.num_layers, qk_norm=config.qk_norm, operators=operators),
            vocab_size=padded,
            max_sequence_length=config.max_positions,
            share_embeddings_and_output_weights=config.tied,
            # strict attention rotates by absolute position itself
            position_embedding_type="none" if strict else "rope",
            **({} if strict else _native_rope(config)),
        )
    model.to(place, dtype)
    if strict:
        model.embedding.word_embeddings = layers.StrictEmbedding(model.embedding.word_embeddings, profile.settings)
        model.output_layer = layers.StrictHead(model.output_layer, profile.settings)
        te.refuse_in(model.named_modules())
    for name, parameter in model.named_parameters():
        _mark_shard(name, parameter)
        # a weight that loading forgets must be noticed
        parameter.data.fill_(float("nan"))
    model.rl = Built(
        config=config,
        profile=profile,
        parallel=parallel,
        mode=mode,
        padded_vocab=padded,
        recompute=recompute,
        native_operators=operators,
        native_fallback=None if chosen is None else chosen.fallback,
    )
    return model


def module_classes(model: GPTModel) -> dict[str, str]:
    """Which class serves each boundary of the first layer, the embedding, the head and the final norm."""
    layer = model.decoder.layers[0]
    parts = {
        "embedding": model.embedding.word_embeddings,
        "input_norm": layer.input_layernorm,
        "qkv": layer.self_attention.linear_qkv,
        "q_norm": layer.self_attention.q_layernorm,
        "attention": layer.self_attention.core_attention,
        "o": layer.self_attention.linear_proj,
        "pre_mlp_norm": layer.pre_mlp_layernorm,
        "fc1": layer.mlp.linear_fc1,
        "activation": layer.mlp.activation_func,
        "fc2": layer.mlp.linear_fc2,
        "final_norm": model.decoder.final_layernorm,
        "head": model.output_layer,
    }
    return {name: _qualified(part) for name, part in parts.items()}


def shard_dim(name: str) -> int | None:
    """The dimension along which TP ranks cut a parameter of this name; None where every rank holds all of it."""
    if name.endswith(("linear_qkv.weight", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")):
        return 0
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    return None


def _mark_shard(name: str, parameter: torch.nn.Parameter) -> None:
    # Megatron marks shards while it initialises weights, which is skipped here
    dim = shard_dim(name)
    if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, dim, 2 if "linear_fc1" in name else 1)


def _choose(wanted: str, place: torch.device, profile: Profile) -> te.Choice:
    staged = not all(transport.startswith("nccl") for transport in topology.transports().values())
    return te.choose(wanted, device=place.type, dtype=profile.settings.dtype, staged=staged)


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _qualified(part: Any) -> str:
    kind = part if callable(part) and not isinstance(part, torch.nn.Module) else type(part)
    return f"{kind.__module__}.{getattr(kind, '__qualname__', kind)}"


def _native_rope(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rotary_base": config.rope["theta"]}
    rule = {k: v for k, v in config.rope.items() if k not in ("theta", "rotary_dim")}
    if not rule:
        return rope
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if rule["rope_type"] != "llama3" or any(rule.get(k) != v for k, v in fixed.items()):
        raise ContractError(
            f"Megatron-core's own rotary module does not know {rule}; supported natively: llama3 with {fixed}; "
            "run the strict arm alone"
        )
    return rope | {"rope_scaling": True, "rope_scaling_factor": float(rule["factor"])}


def _check_device(place: torch.device, profile: Profile, mode: Mode) -> None:
    wanted = profile.settings.arch
    found = "cpu"
    if place.type == "cuda":
        # the native arm runs on any GPU
        found = gpu_arch(place.index or 0) if mode == "strict" or wanted == "cpu" else wanted
    if wanted != found:
        raise ContractError(
            f"the profile is for arch={wanted!r}, the trainer runs on {place} ({found}); build the profile for this "
            "device, or pass another device= to topology.start or TrainerRank"
        )


def _check_topology(parallel: ParallelConfig) -> None:
    if not parallel_state.model_parallel_is_initialized():
        raise ContractError("build_model: this process has no parallel state; call topology.start() first")
    started = ParallelConfig(
        tp=parallel_state.get_tensor_model_parallel_world_size(), cp=parallel_state.get_context_parallel_world_size()
    )
    if parallel != started:
        raise ContractError(
            f"build_model: parallel={parallel}, this process was started with {started}; give both the same"
        )


def recompute_problem(recompute: object, modules: Any) -> str | None:
    """What is wrong with the two options by themselves; None where nothing is."""
    known = ("none", "full", "selective")
    if problem := sequence_problem("recompute_modules", modules, "names"):
        return problem
    unknown = [module for module in modules if choice_problem("", module, RECOMPUTE_MODULES)]
    if choice_problem("recompute", recompute, known) or unknown or not len(modules):
        return (
            f"recompute={recompute!r} of {list(modules)}; supported: 'none', 'full', or 'selective' of some of "
            f"{RECOMPUTE_MODULES}"
        )
    return None


def check_recompute(recompute: object, modules: Any, device_type: str) -> None:
    """Raise for options that are none (ContractError), or that this device has not (MissingSupport)."""
    if problem := recompute_problem(recompute, modules):
        raise ContractError(problem)
    if recompute != "none" and device_type == "cpu":
        raise MissingSupport(
            f"recompute={recompute!r} on a CPU: Megatron's checkpointing keeps CUDA's random state; use 'none'"
        )


def _transformer_config(
    config: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    operators: str | None,
    place: torch.device,
    recompute: Recompute,
    recompute_modules: Sequence[str],
) -> TransformerConfig:
    again: dict[str, Any] = {}
    if recompute == "full":
        again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        again = {"recompute_granularity": "selective", "recompute_modules": list(recompute_modules)}
    fused = operators == "te"
    return TransformerConfig(
        **again,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=operators is None,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=place.type == "cpu",
        perform_initialization=False,
        bias_activation_fusion=fused,
        # without bias and dropout it is one addition either way
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        cp_comm_type="p2p" if fused else None,
        # of its use in fp8 alone; without it a linear layer's first backward would overwrite main_grad
        disable_parameter_transpose_cache=fused,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=False,
    )
