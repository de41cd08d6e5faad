"""A numerical contract: the six observables that decide the bits of one boundary."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

from rl_contract.errors import ContractError

PRECISION_KEYS = ("input", "product", "accumulator", "state", "output")


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def field_problems(data: Any, record: type[Any]) -> list[str]:
    """What keeps ``data`` from being the fields of a dataclass: no mapping, fields missing, fields unknown."""
    names = [f.name for f in fields(record)]
    if not isinstance(data, Mapping):
        return [f"got {str(data)[:40]!r}, supported: a mapping with {names}"]
    needed = [f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in data]
    unknown = sorted(str(name) for name in data if name not in names)
    problems = [f"lacks {missing}"] if missing else []
    return problems + ([f"has unknown keys {unknown}, supported: {names}"] if unknown else [])


def _words(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(x, str) for x in (*value, *value.values()))


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What two kernels must share to give the same bits at one boundary.

    Attributes:
        boundary: name of the boundary, e.g. ``"gemm.row"``.
        dependency: which elements take part, and the reduction domain.
        partition: how the reduction domain is cut.
        merge: in which order the parts are joined.
        precision: type of ``input``, ``product``, ``accumulator``, ``state`` and ``output``; some keys may be left out.
        rounding: the points where a value is rounded, in order.
        primitives: name of each elementary function and the definition it follows.
        arch: where the contract holds (``"cpu"``, ``"sm90"``, ``"gfx942"``, ...); bits are not promised across.

    Raises:
        ContractError: an empty field, one of another type, or an unknown precision key; lists all.
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
        problems = []
        for name in ("boundary", "dependency", "partition", "merge", "arch"):
            value = getattr(self, name)
            if isinstance(value, str) and not value.strip():
                problems.append(f"field {name!r} is empty; every observable must be stated")
            elif not isinstance(value, str):
                problems.append(f"{name}={value!r}, supported: a text")
        for name in ("precision", "primitives"):
            if not _words(getattr(self, name)):
                problems.append(f"{name}={getattr(self, name)!r}, supported: a mapping of text to text")
        if isinstance(self.precision, Mapping) and (unknown := [k for k in self.precision if k not in PRECISION_KEYS]):
            problems.append(f"precision has {sorted(map(str, unknown))}; supported keys are {PRECISION_KEYS}")
        if isinstance(self.precision, Mapping) and not self.precision:
            problems.append("field 'precision' is empty; every observable must be stated")
        listed = isinstance(self.rounding, (tuple, list))
        if not listed or not all(isinstance(point, str) for point in self.rounding):
            problems.append(f"rounding={self.rounding!r}, supported: a list of texts")
        if problems:
            raise ContractError("Contract: " + "; ".join(problems))
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
        """From ``to_dict``.

        Raises:
            ContractError: fields missing, unknown, or outside the contract; lists all.
        """
        if problems := field_problems(data, cls):
            raise ContractError("Contract: " + "; ".join(problems))
        return cls(**data)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(canonical_json(self.to_dict()))

    def differences(self, other: "Contract") -> list[str]:
        """Names of the fields that differ, with both values."""
        if not isinstance(other, Contract):
            raise ContractError(f"Contract.differences got {other!r:.80}; supported: a Contract")
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{k}: {mine[k]!r} != {theirs[k]!r}" for k in mine if mine[k] != theirs[k]]
