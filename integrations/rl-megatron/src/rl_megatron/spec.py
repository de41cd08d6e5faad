"""The layer specs: strict operators in stock Megatron slots, and Megatron's own specs for the native arm."""

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from rl_contract import Profile
from rl_megatron import layers, native


def strict_layer_spec(profile: Profile, *, qk_norm: bool, max_positions: int) -> ModuleSpec:
    """One decoder layer for the stock ``GPTModel``, which must be built without a rotary module of its own.

    Args:
        profile: both engines' profile.
        qk_norm: whether the model norms q and k per head (Qwen3).
        max_positions: length of the rotary table.
    """
    s = profile.settings
    column, row = layers.bind(layers.StrictColumnLinear, s), layers.bind(layers.StrictRowLinear, s)
    head_norm = layers.bind(layers.StrictHeadNorm, s) if qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=layers.bind(layers.StrictCoreAttention, s, max_positions=max_positions),
            linear_proj=row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row, activation_func=layers.bind(layers.StrictSwiGLU, s))
    norm = layers.bind(layers.StrictNorm, s)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=layers.residual_add,
            pre_mlp_layernorm=norm,
            mlp=_mlp(mlp),
            mlp_bda=layers.residual_add,
        ),
    )


def strict_block_spec(
    profile: Profile, *, num_layers: int, qk_norm: bool, max_positions: int
) -> TransformerBlockSubmodules:
    """``num_layers`` strict layers and the strict final norm."""
    layer = strict_layer_spec(profile, qk_norm=qk_norm, max_positions=max_positions)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * num_layers, layer_norm=layers.bind(layers.StrictNorm, profile.settings)
    )


def native_block_spec(*, num_layers: int, qk_norm: bool, operators: str = "local") -> TransformerBlockSubmodules:
    """Megatron's TransformerEngine spec as it is (``te``), or its local one.

    Of the local one the core attention, which can't run packed or with CP, is replaced.
    """
    if operators == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = native.PackedDotProductAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=layer.submodules.input_layernorm)


def _mlp(submodules: MLPSubmodules) -> Any:
    # newer Megatron-core builds the MLP through a classmethod that unpacks the process groups
    if hasattr(MLP, "as_mlp_submodule"):
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)
