"""What a set of weights is, in Hugging Face coordinates: names, types, shapes and a sha256 of every tensor's bytes."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rl_contract import ContractError
from vime_sync.digest import map_tensors, tensor_digest
from vime_sync.files import reading

DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_EXPONENTS: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, np.int16(0x7F80)),
    torch.float32: (torch.int32, np.int32(0x7F800000)),
}
_PIECE = 1 << 18


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Ordered entries, and digests of what else fixes the policy (tokenizer, rotary table, contract fingerprints).

    ``digest`` covers the entries, whatever their order, and ``config_digests``; two pushes of the same weights have the
    same digest. ``base_version`` says what the weights were derived from and is not part of their identity.
    """

    entries: tuple[Entry, ...]
    config_digests: Mapping[str, str] = field(default_factory=dict)
    base_version: str | None = None

    @classmethod
    def from_tensors(
        cls,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        config_digests: Mapping[str, str] | None = None,
        base_version: str | None = None,
    ) -> "Manifest":
        """Digest the tensors, in the order given.

        Raises:
            ContractError: nothing given, a name given twice, a type other than bf16 or fp32, or NaN or infinity in a
                tensor; every such tensor is named.
        """
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        entries: list[Entry] = []
        seen: set[str] = set()
        problems: list[str] = []
        for name, (entry, problem) in map_tensors(_describe, pairs):
            if name in seen:
                problems.append(f"{name} is given twice")
            seen.add(name)
            problems += [f"{name} {problem}"] if problem else []
            if entry is not None:
                entries.append(Entry(name, *entry))
        if not entries and not problems:
            problems.append("no tensor was given")
        if problems:
            raise ContractError("weights that cannot be published: " + "; ".join(problems))
        return cls(tuple(entries), dict(config_digests or {}), base_version)

    @property
    def digest(self) -> str:
        """Hex sha256 over entries sorted by name, and the config digests."""
        entries = sorted([e.name, e.dtype, list(e.shape), e.sha256] for e in self.entries)
        canonical = json.dumps([entries, sorted(self.config_digests.items())], separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def to_json(self) -> str:
        return json.dumps(
            {
                "digest": self.digest,
                "base_version": self.base_version,
                "config_digests": dict(sorted(self.config_digests.items())),
                "entries": [[e.name, e.dtype, list(e.shape), e.sha256] for e in self.entries],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises ContractError when the text is cut off, malformed, or does not have the digest that it states."""
        with reading("not a manifest", "write it with Manifest.to_json"):
            data: dict[str, Any] = json.loads(text)
            entries = tuple(Entry(n, d, tuple(int(i) for i in s), h) for n, d, s, h in data["entries"])
            names = [entry.name for entry in entries]
            if bad := [e for e in entries if e.dtype not in DTYPES.values() or min(e.shape, default=0) < 0]:
                raise ValueError(f"{bad[0]}")
            if not names or len(set(names)) < len(names):
                raise ValueError("no entry, or a name twice")
            manifest = cls(entries, dict(data["config_digests"]), data["base_version"])
            stated, found = data["digest"], manifest.digest
        if found != stated:
            raise ContractError(f"manifest states digest {stated} but its entries have {found}; it was altered")
        return manifest

    def differences(self, other: "Manifest") -> list[str]:
        """One line for each way in which ``other`` differs; empty when the digests are equal."""
        mine, theirs = ({e.name: e for e in m.entries} for m in (self, other))
        found = [f"{name} is missing" for name in mine if name not in theirs]
        found += [f"{name} is extra" for name in theirs if name not in mine]
        for name, a in mine.items():
            b = theirs.get(name)
            if b is None or a == b:
                continue
            if a.dtype != b.dtype:
                found.append(f"{name} is {b.dtype}, not {a.dtype}")
            if a.shape != b.shape:
                found.append(f"{name} has shape {b.shape}, not {a.shape}")
            if a.sha256 != b.sha256:
                found.append(f"{name} has other bytes ({b.sha256[:12]}, not {a.sha256[:12]})")
        for key in sorted(self.config_digests.keys() | other.config_digests.keys()):
            x, y = self.config_digests.get(key), other.config_digests.get(key)
            if x != y:
                found.append(f"config {key} is {y}, not {x}")
        return found


def nonfinite_count(tensor: torch.Tensor) -> int:
    """How many elements of a bf16 or fp32 tensor are NaN or infinite."""
    # an exponent of all ones; on integers and in cache-sized pieces this keeps up with sha256, torch.isfinite does not
    integer, exponent = _EXPONENTS[tensor.dtype]
    flat = tensor.detach().contiguous().reshape(-1).view(integer)
    if flat.is_cuda:
        return int(((flat & int(exponent)) == int(exponent)).sum())
    pieces = (flat[at : at + _PIECE].cpu().numpy() for at in range(0, flat.numel(), _PIECE))
    return sum(int(np.count_nonzero((piece & exponent) == exponent)) for piece in pieces)


def _describe(tensor: torch.Tensor) -> tuple[tuple[str, tuple[int, ...], str] | None, str | None]:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return None, f"is {tensor.dtype}, supported are {', '.join(DTYPES.values())}"
    bad = nonfinite_count(tensor)
    problem = f"holds {bad} NaN or infinite values" if bad else None
    return (dtype, tuple(tensor.shape), tensor_digest(tensor)), problem
