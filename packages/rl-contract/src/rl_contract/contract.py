"""A numerical contract: the six observables that decide the bits of one boundary."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rl_contract.errors import ContractError

PRECISION_KEYS = ("input", "product", "accumulator", "state", "output")


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What two kernels must share to give the same bits at one boundary.

    Attributes:
        boundary: name of the boundary, e.g. ``"gemm.row"``.
        dependency: which elements take part, and the reduction domain.
        partition: how the reduction domain is cut.
        merge: in which order the parts are joined.
        precision: type of ``input``, ``product``, ``accumulator``, ``state`` and ``output``; each key may be left out.
        rounding: the points where a value is rounded, in order.
        primitives: name of each elementary function and the definition it follows.
        arch: where the contract holds (``"cpu"``, ``"sm90"``, ``"gfx942"``, ...); bits are not promised across.

    Raises:
        ContractError: an empty field or an unknown precision key.
    """

    boundary: str
    dependency: str
    partition: str
    merge: str
    precision: Mapping[str, str]
    rounding: tuple[str, ...]
    primitives: Mapping[str, str] = field(default_factory=dict)
    arch: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("boundary", "dependency", "partition", "merge", "arch"):
            if not getattr(self, name):
                raise ContractError(f"Contract field {name!r} is empty; every observable must be stated")
        unknown = set(self.precision) - set(PRECISION_KEYS)
        if unknown:
            raise ContractError(f"Contract precision has {sorted(unknown)}; supported keys are {PRECISION_KEYS}")
        object.__setattr__(self, "rounding", tuple(self.rounding))

    def to_dict(self) -> dict[str, Any]:
        return {
            "boundary": self.boundary,
            "dependency": self.dependency,
            "partition": self.partition,
            "merge": self.merge,
            "precision": dict(self.precision),
            "rounding": list(self.rounding),
            "primitives": dict(self.primitives),
            "arch": self.arch,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Contract":
        return cls(**{**data, "rounding": tuple(data["rounding"])})

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(canonical_json(self.to_dict()))

    def differences(self, other: "Contract") -> list[str]:
        """Names of the fields that differ, with both values."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{k}: {mine[k]!r} != {theirs[k]!r}" for k in mine if mine[k] != theirs[k]]
