"""Operators of a layer that vLLM calls one after the other, as one.

q/k norm, rotation and cache write run where vLLM runs its attention, in which alone the cache is known: once a model
stands, the first three hand their input on. Same bits, one launch instead of seven. Every attention of the model is
joined, or none. An MLP's activation hands on what its gate_up projection has already activated, which for few rows is
one launch, too.

``additional_config={"rl_fused": False}`` keeps them apart. The decision stands in the engine's configuration, by which
vLLM names its compiled graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import rl_attn
from rl_contract import ContractError, MissingSupport

KEY = "rl_fused"


def decide(vllm_config: Any) -> bool:
    """Write into the configuration whether layers are joined: where nobody forbids it and all that takes is there.

    Raises:
        ContractError: another value than True or False under ``rl_fused``.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    there = hasattr(rl_attn, "norm_rotary_write") and "positions" in CommonAttentionMetadata.__dataclass_fields__
    wanted = asked(vllm_config.additional_config) and there
    vllm_config.additional_config[KEY] = wanted
    return wanted


def asked(additional_config: Any) -> bool:
    """What the user wants, True where nothing is said; raises as ``decide`` does."""
    if additional_config is not None and not isinstance(additional_config, Mapping):
        raise ContractError(f"additional_config={additional_config!r}, supported: a mapping")
    given = (additional_config or {}).get(KEY, True)
    if not isinstance(given, bool):
        raise ContractError(f"additional_config has {KEY}={given!r}, supported: True or False")
    return given


def decided(vllm_config: Any) -> bool:
    """What ``decide`` has written."""
    return bool(vllm_config.additional_config.get(KEY, False))


@dataclass
class Before:
    """What an attention does first.

    Attributes:
        rotary: the layer's strict rotary embedding, which holds cos and sin.
        q_norm, k_norm: its strict norms, or None for a model without.
    """

    rotary: Any
    q_norm: Any = None
    k_norm: Any = None
    _table: Any = field(default=None, init=False, repr=False)

    def __call__(self, q: Any, k: Any, v: Any, positions: Any, cache: Any, slot_mapping: Any) -> Any:
        """q [T, Hq, D], k and v [T, Hkv, D] as the projection left them -> q for attention; k and v at their slots."""
        if positions is None:
            raise ContractError("vLLM gave no positions; start the engine with additional_config={'rl_fused': False}")
        # an attribute of a module that is none of its own takes as long as the rest of this call
        cos = self.rotary._buffers["rl_cos"]
        if self._table is None or self._table.cos is not cos:
            self._table = rl_attn.RopeTable(cos, self.rotary._buffers["rl_sin"])
        if self.q_norm is None:
            return rl_attn.norm_rotary_write(q, k, v, positions, self._table, cache, slot_mapping)
        return rl_attn.norm_rotary_write(
            q, k, v, positions, self._table, cache, slot_mapping,
            q_weight=self.q_norm._parameters["weight"], k_weight=self.k_norm._parameters["weight"],
            eps=self.q_norm.variance_epsilon,
        )  # fmt: skip


def fuse(model: Any) -> tuple[int, int]:
    """Join what can be joined; returns how many attentions and how many MLPs were.

    Raises:
        MissingSupport: a layer around an attention is not one of those known here.
    """
    return _fuse_attentions(model), _fuse_mlps(model)


def _fuse_mlps(model: Any) -> int:
    """MLPs of another form are left as they are, and those that share an activation with one."""
    from rl_vllm.layers import StrictGateUpMethod, StrictLinearMethod, StrictSiluAndMul

    def joins(projection: Any) -> bool:
        plain = type(getattr(projection, "quant_method", None)) is StrictLinearMethod
        return plain and projection.bias is None and not getattr(projection, "gather_output", False)

    owners = [m for m in model.modules() if isinstance(getattr(m, "act_fn", None), StrictSiluAndMul)]
    pairs = [(m.act_fn, getattr(m, "gate_up_proj", None)) for m in owners]
    apart = {id(activation) for activation, projection in pairs if not joins(projection)}
    joined = [pair for pair in pairs if id(pair[0]) not in apart]
    for activation, projection in joined:
        projection.quant_method = StrictGateUpMethod()  # type: ignore[union-attr]
        activation.hands_on = True
    return len(joined)


def _fuse_attentions(model: Any) -> int:
    from rl_vllm.gpu_attention import FusedGPUBackend
    from rl_vllm.layers import StrictRMSNorm, _StrictRotary

    owners = [m for m in model.modules() if type(getattr(m, "attn", None)).__name__ == "Attention"]
    joined: list[tuple[Any, Before]] = []
    for owner in owners:
        norms = tuple(getattr(owner, name, None) for name in ("q_norm", "k_norm"))
        rotary = getattr(owner, "rotary_emb", None)
        strict = isinstance(rotary, _StrictRotary) and all(n is None or isinstance(n, StrictRMSNorm) for n in norms)
        if not strict or (norms[0] is None) != (norms[1] is None):
            raise MissingSupport(
                f"{type(owner).__name__} has no strict rotary_emb, or other norms of queries and keys than q_norm and "
                "k_norm; supported: Qwen3 and Llama as vLLM builds them"
            )
        if norms[0] is not None and norms[0].variance_epsilon != getattr(norms[1], "variance_epsilon", None):
            raise MissingSupport("q_norm and k_norm with different eps are not supported")
        joined.append((owner.attn, Before(rotary, *norms)))
    for attention, before in joined:
        attention.impl.before = before
        # vLLM asks each layer's backend whether it has to write the cache itself
        attention.attn_backend = FusedGPUBackend
        for module in (before.rotary, before.q_norm, before.k_norm):
            if module is not None:
                module.hands_on = True
    return len(joined)
