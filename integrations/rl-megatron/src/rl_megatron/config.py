"""What a model is, read from its Hugging Face config, and how it is cut; everything unsupported is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_attn.rope import inverse_frequencies
from rl_contract import ContractError, Profile, check_built
from rl_megatron.checks import instance_problem
from vime_sync import rope as rope_rules
from vime_sync import shape

ARCHITECTURES = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False}
"""Supported ``architectures`` entries, and whether the model has q/k norms."""

CP_SIZES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the trainer is cut: tensor parallel and context parallel sizes; the world is their product.

    Raises:
        ContractError: a size that is no integer of 1 and above.
    """

    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        wrong = [f"{n}={v!r}" for n, v in vars(self).items() if not isinstance(v, int) or isinstance(v, bool) or v < 1]
        if wrong:
            raise ContractError(f"ParallelConfig: {', '.join(wrong)}, supported: integers of 1 and above")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The figures of a dense decoder. Sizes in elements; ``rope`` is what ``rl_contract.Settings.rope`` holds."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    rope: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None

    @property
    def qk_norm(self) -> bool:
        return ARCHITECTURES[self.architecture]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face ``config.json``.

        Raises:
            ContractError: everything that is missing or unsupported, in one message.
        """
        if not isinstance(config, Mapping):
            raise ContractError(
                f"hf_config={config!r:.80}, supported: a mapping, what json.load makes of the checkpoint's config.json"
            )
        problems = _unsupported(config)
        names = shape.architectures(config)
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        problems += [
            f"{k} is missing" for k in (*required, "max_position_embeddings", "rms_norm_eps") if k not in config
        ]
        problems += shape.value_problems(config)
        if problems:
            raise ContractError(_refusal(problems))
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = shape.head_dim(config)
        model = cls(
            architecture=names[0],
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config, head_dim),
            dtype=_dtype(config),
        )
        if heads % kv_heads:
            problems.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if head_dim % 2:
            problems.append(f"head_dim={head_dim} is odd; rotary positions need an even one")
        if problems:
            raise ContractError(_refusal(problems))
        return model

    def check(self, profile: Profile, parallel: ParallelConfig) -> None:
        """Raise one ContractError for a profile of another model and every cut that model or profile don't allow."""
        check_built(profile)
        if problem := instance_problem("parallel", parallel, ParallelConfig):
            raise ContractError(f"rl-megatron: {problem}")
        problems = self._profile_problems(profile) + self._parallel_problems(profile, parallel)
        if problems:
            raise ContractError("rl-megatron: " + "; ".join(problems))

    def check_profile(self, profile: Profile) -> None:
        """Raise one ContractError for a profile of another model, whatever the cut."""
        check_built(profile)
        if problems := self._profile_problems(profile):
            raise ContractError("rl-megatron: " + "; ".join(problems))

    def _profile_problems(self, profile: Profile) -> list[str]:
        s = profile.settings
        pairs = {
            "hidden_size": (self.hidden_size, s.hidden_size),
            "vocab_size": (self.vocab_size, s.vocab_size),
            "norm_eps": (self.norm_eps, s.norm_eps),
            "rope": (dict(self.rope), dict(s.rope)),
        }
        return [
            f"the checkpoint has {name}={mine!r}, the profile {theirs!r}; build the profile from this checkpoint"
            for name, (mine, theirs) in pairs.items()
            if mine != theirs
        ]

    def _parallel_problems(self, profile: Profile, parallel: ParallelConfig) -> list[str]:
        tp, cp, leaves = parallel.tp, parallel.cp, profile.settings.leaves
        problems = []
        if tp & (tp - 1):
            return [f"tp={tp}, supported: a power of two; use one that divides the heads"]
        if cp not in CP_SIZES:
            problems.append(f"cp={cp}, supported: {CP_SIZES}; use one of these")
        if cp > 1 and profile.settings.attention != "segments":
            problems.append(f"cp={cp} with attention={profile.settings.attention!r}, supported: 'segments'; use cp=1")
        if leaves % tp:
            problems.append(
                f"tp={tp} does not divide the profile's leaves={leaves}; build the profile with leaves >= {tp}"
            )
        for name, size in (
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
        ):
            if size % tp:
                problems.append(f"tp={tp} does not divide {name}={size}; use a smaller tp")
        for name, size in (
            ("the rows of q, k and v", (self.num_heads + 2 * self.num_kv_heads) * self.head_dim),
            ("num_attention_heads * head_dim", self.num_heads * self.head_dim),
            ("intermediate_size", self.intermediate_size),
        ):
            if size % leaves:
                problems.append(f"leaves={leaves} does not divide {name}={size}; build the profile with fewer leaves")
        return problems


def _refusal(problems: list[str]) -> str:
    return f"config.json is not supported: {'; '.join(problems)}; supported: {sorted(ARCHITECTURES)}, dense, no bias"


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    problems = []
    names = shape.architectures(config)
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        problems.append(f"architectures={names}")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            problems.append(f"{key}={config[key]} (mixture of experts)")
    stated = config.get("layer_types")
    # anything but names is among the value problems
    layer_types = [t for t in stated if isinstance(t, str)] if isinstance(stated, (list, tuple)) else []
    sliding = config.get("sliding_window") and config.get("use_sliding_window", names != ["Qwen3ForCausalLM"])
    if sliding or any(t != "full_attention" for t in layer_types):
        problems.append(
            f"sliding_window={config.get('sliding_window')}, layer_types={sorted(set(layer_types))} (sliding window)"
        )
    if config.get("ssm_cfg") or config.get("mamba_d_state"):
        problems.append("a state space (Mamba) model")
    problems += [f"{key}=true (bias)" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={config['hidden_act']!r}, supported: 'silu'")
    if config.get("attention_dropout"):
        problems.append(f"attention_dropout={config['attention_dropout']}, supported: 0")
    if config.get("quantization_config"):
        problems.append("quantization_config (quantised weights)")
    if shape.value_problems(config):
        return problems
    return problems + rope_rules.unsupported_rope(config)


def _rope(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    rope = rope_rules.rope_settings(config, head_dim)
    # the table's own checks, before anything is loaded
    inverse_frequencies(head_dim, rope["theta"], {k: v for k, v in rope.items() if k not in ("theta", "rotary_dim")})
    return rope


def _dtype(config: Mapping[str, Any]) -> str | None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    return None if dtype is None else str(dtype).removeprefix("torch.")
