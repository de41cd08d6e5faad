"""A profile: one contract per boundary, built from one set of settings by the packages that are installed."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from rl_contract.contract import Contract, canonical_json, sha256_hex
from rl_contract.errors import ContractError

BOUNDARY_GROUP = "rl_contract.boundaries"
ARCHS = ("cpu", "sm90", "gfx942", "gfx950")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The few numbers that decide every contract of a model.

    Attributes:
        arch: ``cpu``, ``sm90``, ``gfx942`` or ``gfx950``.
        dtype: the model's type: ``bfloat16``, ``float16`` or ``float32``.
        hidden_size: width of the residual stream.
        vocab_size: the real vocabulary; ids at or beyond it take no part.
        norm_eps: epsilon of every RMSNorm, read from the live module.
        rope: ``{"theta": float, "rotary_dim": int}`` and the keys of a scaling rule where the model has one.
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
    key_tile: int = 64
    segment: int = 512
    vocab_tile: int = 512

    def __post_init__(self) -> None:
        problems = []
        if self.arch not in ARCHS:
            problems.append(f"arch={self.arch!r}, supported: {ARCHS}")
        if self.dtype not in DTYPES:
            problems.append(f"dtype={self.dtype!r}, supported: {DTYPES}")
        if self.leaves < 1 or self.leaves & (self.leaves - 1):
            problems.append(
                f"leaves={self.leaves}, supported: a power of two; use the larger TP size of the two engines"
            )
        if self.attention not in ("segments", "nosplit"):
            problems.append(f"attention={self.attention!r}, supported: 'segments', 'nosplit'")
        if self.key_tile < 1 or self.segment < 1 or self.segment % self.key_tile:
            problems.append(f"segment={self.segment}, key_tile={self.key_tile}: segment must be a multiple of key_tile")
        for name in ("hidden_size", "vocab_size", "vocab_tile"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)}, supported: a positive integer")
        if not self.norm_eps > 0:
            problems.append(f"norm_eps={self.norm_eps}, supported: a positive number")
        if problems:
            raise ContractError("Settings: " + "; ".join(problems))
        object.__setattr__(self, "rope", dict(self.rope))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Settings":
        known = {f.name for f in fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise ContractError(f"Settings has unknown keys {sorted(unknown)}; supported: {sorted(known)}")
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
        return cls(
            name=data["name"],
            settings=Settings.from_dict(data["settings"]),
            contracts={k: Contract.from_dict(v) for k, v in data["contracts"].items()},
        )

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
        ContractError: a package does not support the settings; the message lists every refusal.
    """
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
