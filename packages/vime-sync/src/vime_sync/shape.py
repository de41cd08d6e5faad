"""What a dense Llama or Qwen model looks like in Hugging Face coordinates, and which architectures are covered."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_contract import ContractError, MissingSupport
from vime_sync.rope import finite_above, rope_problems

# architecture -> (q and k norms, qkv bias)
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "Qwen2ForCausalLM": (False, True),
    "Qwen3ForCausalLM": (True, False),
}
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias")
_ARCHITECTURE_OF_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that fix every tensor of a dense decoder. ``vocab_size`` is the real one, without any engine's padding."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a checkpoint's ``config.json`` (a dict; ``PretrainedConfig.to_dict()`` serves too).

        Raises:
            MissingSupport: the architecture, or a feature of it (sliding window, experts, quantised weights, a bias
                outside q/k/v, an activation other than SiLU), is not covered.
            ContractError: a size is missing or inconsistent, or entries contradict each other.
        """
        if not isinstance(config, Mapping):
            raise ContractError(f"the model config is {str(config)[:40]!r}, supported: config.json as a dict; load it")
        architecture = _architecture(config)
        if problems := _flag_problems(config):
            raise ContractError(f"the model config has {'; '.join(problems)}")
        _refuse_features(config, architecture)
        qk_norm, qkv_bias = _ARCHITECTURES[architecture]
        missing = [key for key in _SIZES if config.get(key) is None]
        if missing:
            raise ContractError(f"the model config lacks {', '.join(missing)}; give the checkpoint's whole config.json")
        if problems := value_problems(config):
            raise ContractError(f"the model config has {'; '.join(problems)}")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise ContractError(f"{heads} attention heads do not divide into {kv_heads} key/value heads")
        return cls(
            architecture=architecture,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            ffn=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim(config),
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
        )

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def hf_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor ``(hf_name, shape)`` in the canonical order: embedding, layers ascending, final norm, head."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (self.hidden,)
            for part, rows in (("q", self.q_rows), ("k", self.kv_rows), ("v", self.kv_rows)):
                yield f"{at}self_attn.{part}_proj.weight", (rows, self.hidden)
                if self.qkv_bias:
                    yield f"{at}self_attn.{part}_proj.bias", (rows,)
            if self.qk_norm:
                yield at + "self_attn.q_norm.weight", (self.head_dim,)
                yield at + "self_attn.k_norm.weight", (self.head_dim,)
            yield at + "self_attn.o_proj.weight", (self.hidden, self.q_rows)
            yield at + "post_attention_layernorm.weight", (self.hidden,)
            yield at + "mlp.gate_proj.weight", (self.ffn, self.hidden)
            yield at + "mlp.up_proj.weight", (self.ffn, self.hidden)
            yield at + "mlp.down_proj.weight", (self.hidden, self.ffn)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, self.hidden)

    def problems(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What is missing, unknown or mis-shaped in ``{hf_name: shape}``, one line each.

        A tied model's checkpoint may still carry ``lm_head.weight``, as a second name of the embedding.
        """
        expected = dict(self.hf_shapes())
        found = [f"missing {name}" for name in expected if name not in shapes]
        known = {**expected, "lm_head.weight": (self.vocab_size, self.hidden)}
        found += [f"unknown {name}" for name in shapes if name not in known]
        found += [
            f"{name} has shape {tuple(got)}, needed is {known[name]}"
            for name, got in shapes.items()
            if name in known and tuple(got) != known[name]
        ]
        return found

    def check_tp(self, tp: int, rank: int = 0) -> None:
        """Raise ContractError unless heads, key/value heads and the MLP split over ``tp`` ranks."""
        if tp < 1 or not 0 <= rank < tp:
            raise ContractError(f"got tensor-parallel rank {rank} of {tp}; needed is 0 <= rank < tp")
        problems = []
        if self.heads % tp:
            problems.append(f"{self.heads} heads")
        if self.kv_heads % tp and tp % self.kv_heads:
            problems.append(f"{self.kv_heads} key/value heads (must be a multiple or a divisor)")
        if self.ffn % tp:
            problems.append(f"intermediate size {self.ffn}")
        if problems:
            raise ContractError(
                f"tensor parallel {tp} does not fit {', '.join(problems)}; choose a tp that divides them"
            )


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names under ``architectures``; empty where there are none.

    Raises:
        ContractError: anything but a list of names.
    """
    named = config.get("architectures") or []
    if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
        raise ContractError(
            f"architectures={named!r}, supported: a list of one name, e.g. ['Qwen3ForCausalLM']; correct config.json"
        )
    return list(named)


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of a head as transformers reads it: stated, else 128 for Qwen3 and ``hidden_size / heads`` for the others.

    Raises:
        ContractError: Qwen3 with a null, or heads that do not divide the hidden size where nothing is stated.
    """
    stated = config.get("head_dim")
    if stated is not None:
        return int(stated)
    if _architecture(config).startswith("Qwen3"):
        if "head_dim" in config:
            raise ContractError(
                "head_dim=None, supported for Qwen3: a positive integer; state it, or leave it out (128)"
            )
        return 128
    if missing := [key for key in ("hidden_size", "num_attention_heads") if config.get(key) is None]:
        raise ContractError(f"the model config lacks {', '.join(missing)}; give the checkpoint's whole config.json")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if hidden % heads:
        raise ContractError(f"hidden_size {hidden} is not a multiple of {heads} heads; state head_dim")
    return hidden // heads


def value_problems(config: Mapping[str, Any]) -> list[str]:
    """Entries of a ``config.json`` that no model can have or that contradict each other, one line each."""
    found = []
    optional = ("num_key_value_heads", "head_dim")
    for key in (*_SIZES, "max_position_embeddings", *optional):
        value = config.get(key)
        if key not in config or (value is None and key in optional):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{key}={value!r}, supported: a positive integer; correct config.json")
    eps: Any = config.get("rms_norm_eps")
    # kernels take it in fp32
    if "rms_norm_eps" in config and not (finite_above(eps, 0) and 2.0**-126 <= eps < 2.0**128):
        found.append(f"rms_norm_eps={eps!r}, supported: a positive number that fp32 holds; correct config.json")
    layers = config.get("layer_types")
    if layers is not None and not (isinstance(layers, (list, tuple)) and all(isinstance(x, str) for x in layers)):
        found.append(f"layer_types={layers!r}, supported: a list of names or null; correct config.json")
    return found + _flag_problems(config) + rope_problems(config)


def _flag_problems(config: Mapping[str, Any]) -> list[str]:
    # the word "false" counts as true where a truth value is read
    return [
        f"{key}={config[key]!r}, supported: true or false; correct config.json"
        for key in _FLAGS
        if not isinstance(config.get(key), (bool, type(None)))
    ]


def _architecture(config: Mapping[str, Any]) -> str:
    named = architectures(config)
    found = named[0] if len(named) == 1 else None
    if not named:
        found = _ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")))
    if found not in _ARCHITECTURES:
        given = ", ".join(named) or f"model_type {config.get('model_type')!r}"
        raise MissingSupport(
            f"architecture {given} is not supported; supported are {', '.join(sorted(_ARCHITECTURES))} (dense models)"
        )
    return str(found)


def _refuse_features(config: Mapping[str, Any], architecture: str) -> None:
    refused = []
    # Llama never slides; Qwen configs carry a window that only counts with the switch on
    layer_types = set(config.get("layer_types") or [])
    if config.get("use_sliding_window") or "sliding_attention" in layer_types:
        refused.append("sliding-window attention")
    if other := layer_types - {"full_attention", "sliding_attention"}:
        refused.append(f"{', '.join(sorted(other))} layers")
    if any(config.get(key) for key in ("mamba_d_state", "ssm_cfg", "ssm_state_size")):
        refused.append("state-space layers")
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        refused.append("mixture of experts")
    if config.get("attention_bias") and not _ARCHITECTURES[architecture][1]:
        refused.append("attention_bias (a bias on o_proj)")
    if config.get("mlp_bias"):
        refused.append("mlp_bias")
    if config.get("quantization_config"):
        refused.append("quantised weights")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refused.append(f"activation {config['hidden_act']!r}")
    if refused:
        raise MissingSupport(
            f"{architecture} with {', '.join(refused)} is not supported; supported are full attention, dense SiLU "
            "MLPs, unquantised weights and biases on q, k, v of Qwen2 only"
        )
