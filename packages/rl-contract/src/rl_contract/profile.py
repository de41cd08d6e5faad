"""A profile: one contract per boundary, built from one set of settings by the packages that are installed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from rl_contract.contract import Contract, canonical_json, field_problems, sha256_hex
from rl_contract.errors import ContractError

BOUNDARY_GROUP = "rl_contract.boundaries"
# attention's default tiles
KEY_TILE, SEGMENT = 128, 1024
ARCHS = ("cpu", "sm90", "gfx942", "gfx950")
DTYPES = ("bfloat16", "float16", "float32")
# theta and rotary_dim, then the keys of a scaling rule as Hugging Face spells them
ROPE_KEYS = (
    "theta",
    "rotary_dim",
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
)


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_rule_value(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_finite_number(v) for v in value)
    return value is None or isinstance(value, (str, bool)) or _is_finite_number(value)


def _rope_problems(rope: Any) -> list[str]:
    if not isinstance(rope, Mapping):
        return [f"rope={rope!r}, supported: a mapping with theta and rotary_dim"]
    missing = [key for key in ("theta", "rotary_dim") if key not in rope]
    problems = [f"rope={dict(rope)} lacks {missing}, take them from the model's configuration"] if missing else []
    unknown = [key for key in rope if key not in ROPE_KEYS]
    if unknown:
        problems.append(f"rope has unknown keys {unknown}, supported: {ROPE_KEYS}")
    theta, rotary_dim = rope.get("theta", 1e4), rope.get("rotary_dim", 2)
    if not _is_finite_number(theta) or not theta > 1:
        problems.append(f"rope theta={theta!r}, supported: a finite number above 1")
    if not _is_positive_integer(rotary_dim) or rotary_dim % 2:
        problems.append(f"rope rotary_dim={rotary_dim!r}, supported: a positive even integer")
    values = {key: value for key, value in rope.items() if key not in ("theta", "rotary_dim")}
    problems += [
        f"rope {key}={value!r}, supported: a finite number, a list of these, a word or a truth value"
        for key, value in values.items()
        if not _is_rule_value(value)
    ]
    return problems


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The few numbers that decide every contract of a model.

    Attributes:
        arch: ``cpu``, ``sm90``, ``gfx942`` or ``gfx950``.
        dtype: the model's type: ``bfloat16``, ``float16`` or ``float32``.
        hidden_size: width of the residual stream.
        vocab_size: the real vocabulary; ids at or beyond it take no part.
        norm_eps: epsilon of every RMSNorm, read from the live module.
        rope: ``{"theta": float, "rotary_dim": int}`` and the keys of a scaling rule where the model has one, as
            Hugging Face spells them (``ROPE_KEYS``).
        leaves: G of ``tree(G)`` for row-parallel layers; a power of two, at least the larger TP size.
        attention: ``segments`` or ``nosplit``.
        key_tile: keys per tile, aligned to absolute position.
        segment: keys per segment, a multiple of ``key_tile``.
        vocab_tile: vocabulary ids per tile.
    """

    arch: str = "cpu"
    dtype: str = "bfloat16"
    hidden_size: int
    vocab_size: int
    norm_eps: float
    rope: Mapping[str, Any]
    leaves: int = 1
    attention: str = "segments"
    key_tile: int = KEY_TILE
    segment: int = SEGMENT
    vocab_tile: int = 512

    def __post_init__(self) -> None:
        problems = []
        if self.arch not in ARCHS:
            problems.append(f"arch={self.arch!r}, supported: {ARCHS}")
        if self.dtype not in DTYPES:
            problems.append(f"dtype={self.dtype!r}, supported: {DTYPES}")
        integers = ("hidden_size", "vocab_size", "leaves", "key_tile", "segment", "vocab_tile")
        bad = [name for name in integers if not _is_positive_integer(getattr(self, name))]
        problems += [f"{name}={getattr(self, name)!r}, supported: a positive integer" for name in bad]
        if "leaves" not in bad and self.leaves & (self.leaves - 1):
            problems.append(
                f"leaves={self.leaves}, supported: a power of two; use the larger TP size of the two engines"
            )
        if self.attention not in ("segments", "nosplit"):
            problems.append(f"attention={self.attention!r}, supported: 'segments', 'nosplit'")
        if not {"segment", "key_tile"} & set(bad) and self.segment % self.key_tile:
            problems.append(f"segment={self.segment}, key_tile={self.key_tile}: segment must be a multiple of key_tile")
        # kernels take it in fp32
        if not _is_finite_number(self.norm_eps) or not 2.0**-126 <= self.norm_eps < 2.0**128:
            problems.append(f"norm_eps={self.norm_eps!r}, supported: a positive normal fp32")
        problems += _rope_problems(self.rope)
        if problems:
            raise ContractError("Settings: " + "; ".join(problems))
        object.__setattr__(self, "rope", dict(self.rope))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Settings":
        """From ``to_dict``; fields that are missing, unknown or out of range raise ContractError."""
        if problems := field_problems(data, cls):
            raise ContractError("Settings: " + "; ".join(problems))
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Contracts by boundary, and the settings they were built from. Both engines publish theirs."""

    name: str
    settings: Settings
    contracts: Mapping[str, Contract] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the settings and every contract; the profile's name takes no part."""
        return sha256_hex(canonical_json({k: v for k, v in self.to_dict().items() if k != "name"}))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": self.settings.to_dict(),
            "contracts": {k: self.contracts[k].to_dict() for k in sorted(self.contracts)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Profile":
        """From ``to_dict``.

        Raises:
            ContractError: anything missing, unknown or malformed, in the settings and in any contract; lists all.
        """
        problems = field_problems(data, cls)
        given = data if isinstance(data, Mapping) else {}
        if given and "contracts" not in given:
            problems.append("lacks ['contracts']")
        if not isinstance(given.get("name", ""), str):
            problems.append(f"name={given['name']!r}, supported: a text")
        settings, contracts = None, {}
        if "settings" in given:
            try:
                settings = Settings.from_dict(given["settings"])
            except ContractError as error:
                problems.append(str(error))
        listed = given.get("contracts", {})
        if not isinstance(listed, Mapping):
            problems.append(f"contracts={listed!r}, supported: a mapping of boundary to contract")
            listed = {}
        for boundary, contract in listed.items():
            try:
                contracts[boundary] = Contract.from_dict(contract)
            except ContractError as error:
                problems.append(f"{boundary}: {error}")
        if problems or settings is None:
            raise ContractError("Profile: " + "; ".join(problems) + "; take it from Profile.to_dict()")
        return cls(name=given["name"], settings=settings, contracts=contracts)

    def differences(self, other: "Profile") -> list[str]:
        """Every boundary and setting that differs; empty exactly when the fingerprints agree."""
        mine, theirs = self.settings.to_dict(), other.settings.to_dict()
        found = [f"settings.{k}: {mine[k]!r} != {theirs[k]!r}" for k in mine if mine[k] != theirs[k]]
        for boundary in sorted(set(self.contracts) | set(other.contracts)):
            a, b = self.contracts.get(boundary), other.contracts.get(boundary)
            if a is None or b is None:
                found.append(f"{boundary}: present on one side only")
            else:
                found += [f"{boundary}.{d}" for d in a.differences(b)]
        return found


def build_profile(name: str, settings: Settings) -> Profile:
    """Ask every installed boundary package for its contract under ``settings``.

    Packages register functions ``(Settings) -> Contract`` under the entry point group ``rl_contract.boundaries``.

    Raises:
        ContractError: no Settings, no name, or a package does not support the settings; lists every refusal.
    """
    if not isinstance(settings, Settings):
        raise ContractError(
            f"build_profile got settings {settings!r:.80}; supported: Settings, Settings.from_dict(...)"
        )
    if not isinstance(name, str) or not name:
        raise ContractError(f"build_profile got name={name!r:.80}; supported: a text")
    contracts: dict[str, Contract] = {}
    refusals: list[str] = []
    for entry in sorted(entry_points(group=BOUNDARY_GROUP), key=lambda e: e.name):
        make: Callable[[Settings], Contract] = entry.load()
        try:
            contracts[entry.name] = make(settings)
        except ContractError as error:
            refusals.append(f"{entry.name}: {error}")
    if refusals:
        raise ContractError(f"profile {name!r} cannot be built: " + "; ".join(refusals))
    return Profile(name=name, settings=settings, contracts=contracts)


def check_built(profile: Profile) -> None:
    """Prove that a profile which somebody else wrote is the one that its settings make here.

    Raises:
        ContractError: it is no profile, or a boundary lacks its contract or holds another; each is named.
    """
    if not isinstance(profile, Profile):
        raise ContractError(
            f"got {type(profile).__name__} as a profile; give build_profile(...) or Profile.from_dict(...)"
        )
    if problems := profile.differences(build_profile(profile.name, profile.settings)):
        raise ContractError(
            f"profile {profile.name!r} is not what the installed packages build from its settings, given != built: "
            + "; ".join(problems)
            + "; build it with build_profile, or install the packages that it was built with"
        )
