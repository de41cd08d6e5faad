"""What a set of weights is, in Hugging Face coordinates: names, types, shapes and a digest of every tensor's bytes."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rl_contract import ContractError
from rl_contract.devices import host_array
from vime_sync.digest import WEIGHT_DIGEST, check_algorithm, digests
from vime_sync.files import reading
from vime_sync.raw import bytes_problem, map_tensors

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
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Ordered entries, and digests of what else fixes the policy (tokenizer, rotary table, contract fingerprints).

    ``digest`` covers the entries, whatever their order, and ``config_digests``; two pushes of the same weights have the
    same digest. ``base_version`` says what the weights were derived from and is not part of their identity.
    ``algorithm`` names the entries' digests, of which the same weights have others by another algorithm.
    """

    entries: tuple[Entry, ...]
    config_digests: Mapping[str, str] = field(default_factory=dict)
    base_version: str | None = None
    algorithm: str = WEIGHT_DIGEST

    @classmethod
    def from_tensors(
        cls,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        config_digests: Mapping[str, str] | None = None,
        base_version: str | None = None,
        algorithm: str = WEIGHT_DIGEST,
    ) -> "Manifest":
        """Digest the tensors, in the order given; those of a GPU stay there.

        Raises:
            ContractError: an unknown algorithm, digests that are no text; nothing given, or what is no mapping and no
                pairs of name and tensor; a name given twice, a type other than bf16 or fp32, a tensor without bytes to
                read (``raw.flat_bytes``), or NaN or infinity in a tensor; every such tensor is named.
        """
        _check_text(config_digests or {}, base_version)
        problems: list[str] = []

        def usable() -> Iterator[tuple[str, torch.Tensor]]:
            seen: set[str] = set()
            for name, tensor in named_pairs(named_tensors, "Manifest.from_tensors"):
                if name in seen:
                    problems.append(f"{name} is given twice")
                elif problem := bytes_problem(tensor):
                    problems.append(f"{name} is {problem}")
                elif tensor.dtype not in DTYPES:
                    problems.append(f"{name} is {tensor.dtype}, supported are {', '.join(DTYPES.values())}")
                else:
                    yield name, tensor
                seen.add(name)

        entries = []
        for entry, bad in described(check_algorithm(algorithm), usable()):
            entries.append(entry)
            problems += [f"{entry.name} holds {bad} NaN or infinite values"] if bad else []
        if not entries and not problems:
            problems.append("no tensor was given")
        if problems:
            raise ContractError("weights that cannot be published: " + "; ".join(problems))
        return cls(tuple(entries), dict(config_digests or {}), base_version, algorithm)

    @property
    def digest(self) -> str:
        """Hex sha256 over entries sorted by name, the config digests, and the algorithm."""
        entries = sorted([e.name, e.dtype, list(e.shape), e.digest] for e in self.entries)
        # the digest of a manifest of plain sha256 covers no name, so that it stays what such manifests state
        named = [] if self.algorithm == "sha256" else [self.algorithm]
        canonical = json.dumps([entries, sorted(self.config_digests.items()), *named], separators=(",", ":"))
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
                "algorithm": self.algorithm,
                "base_version": self.base_version,
                "config_digests": dict(sorted(self.config_digests.items())),
                "entries": [[e.name, e.dtype, list(e.shape), e.digest] for e in self.entries],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises ContractError when the text is cut off, malformed, or does not have the digest that it states.

        One that names no algorithm has digests of sha256.
        """
        with reading("not a manifest", "write it with Manifest.to_json"):
            data: dict[str, Any] = json.loads(text)
            algorithm = check_algorithm(data.get("algorithm", "sha256"), "algorithm")
            entries = tuple(Entry(n, d, tuple(int(i) for i in s), h) for n, d, s, h in data["entries"])
            names = [entry.name for entry in entries]
            if bad := [e for e in entries if e.dtype not in DTYPES.values() or min(e.shape, default=0) < 0]:
                raise ValueError(f"{bad[0]}")
            if not names or len(set(names)) < len(names):
                raise ValueError("no entry, or a name twice")
            manifest = cls(entries, dict(data["config_digests"]), data["base_version"], algorithm)
            stated, found = data["digest"], manifest.digest
        if found != stated:
            raise ContractError(f"manifest states digest {stated} but its entries have {found}; it was altered")
        return manifest

    def differences(self, other: "Manifest") -> list[str]:
        """One line for each way in which ``other`` differs; empty when the digests are equal."""
        check_manifest("Manifest.differences", other)
        mine, theirs = ({e.name: e for e in m.entries} for m in (self, other))
        found = [f"{name} is missing" for name in mine if name not in theirs]
        found += [f"{name} is extra" for name in theirs if name not in mine]
        if self.algorithm != other.algorithm:
            found.append(f"digests are {other.algorithm}, not {self.algorithm}")
        for name, a in mine.items():
            b = theirs.get(name)
            if b is None or a == b:
                continue
            if a.dtype != b.dtype:
                found.append(f"{name} is {b.dtype}, not {a.dtype}")
            if a.shape != b.shape:
                found.append(f"{name} has shape {b.shape}, not {a.shape}")
            if a.digest != b.digest and self.algorithm == other.algorithm:
                found.append(f"{name} has other bytes ({b.digest[:12]}, not {a.digest[:12]})")
        for key in sorted(self.config_digests.keys() | other.config_digests.keys()):
            x, y = self.config_digests.get(key), other.config_digests.get(key)
            if x != y:
                found.append(f"config {key} is {y}, not {x}")
        return found


def check_manifest(where: str, manifest: object) -> None:
    """Raise ContractError unless it is a Manifest."""
    if not isinstance(manifest, Manifest):
        raise ContractError(f"{where} got the manifest {manifest!r:.80}; supported: what Manifest.from_tensors returns")


def _check_text(config_digests: object, base_version: object) -> None:
    pairs = config_digests.items() if isinstance(config_digests, Mapping) else [(config_digests, None)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ContractError(
            f"config_digests={config_digests!r:.80}; supported: a mapping of names to digests, both str"
        )
    if base_version is not None and not isinstance(base_version, str):
        raise ContractError(f"base_version={base_version!r:.80}; supported: str or None")


def named_pairs(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of name and value, one at a time; ContractError that says what ``where`` was given instead of some."""
    if not isinstance(named_tensors, Iterable) or isinstance(named_tensors, (str, bytes, torch.Tensor)):
        raise ContractError(
            f"{where} got {named_tensors!r:.80}; supported: a mapping of names to tensors, or pairs of the two"
        )
    for pair in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ContractError(f"{where} got {pair!r:.80}; supported: pairs of a name (str) and a tensor")
        yield pair[0], pair[1]


def described(algorithm: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[Entry, int]]:
    """Each tensor's entry, and how many of its elements are NaN or infinite, in the order given.

    Args:
        tensors: bf16 or fp32; one at a time is asked for. A GPU is waited for at the end, not for each.
    """
    kinds: list[tuple[str, str, tuple[int, ...]]] = []
    counts: list[int | torch.Tensor] = []

    def counted() -> Iterator[tuple[int, torch.Tensor]]:
        for on_gpu, group in groupby(tensors, key=lambda pair: pair[1].is_cuda):
            looked: Iterable[tuple[tuple[str, torch.Tensor], int | torch.Tensor]]
            if on_gpu:
                # from this thread, whose stream they are on
                looked = ((pair, _nonfinite_there(pair[1])) for pair in group)
            else:
                looked = map_tensors(nonfinite_count, ((pair, pair[1]) for pair in group))
            for (name, tensor), bad in looked:
                kinds.append((name, DTYPES[tensor.dtype], tuple(tensor.shape)))
                counts.append(bad)
                yield len(counts) - 1, tensor

    found = digests(algorithm, counted())
    there = [c for c in counts if isinstance(c, torch.Tensor)]
    # one transfer for all, where one device holds them
    single = len({c.device for c in there}) == 1
    fetched = iter(torch.stack(there).tolist() if single else [int(c) for c in there])
    for index, (name, dtype, shape) in enumerate(kinds):
        bad = counts[index]
        yield Entry(name, dtype, shape, found[index]), next(fetched) if isinstance(bad, torch.Tensor) else bad


def _nonfinite_there(tensor: torch.Tensor) -> torch.Tensor:
    integer, exponent = _EXPONENTS[tensor.dtype]
    return ((tensor.detach().view(integer) & int(exponent)) == int(exponent)).sum()


def nonfinite_count(tensor: torch.Tensor) -> int:
    """How many elements of a bf16 or fp32 tensor of the host are NaN or infinite."""
    # an exponent of all ones; on integers and in cache-sized pieces this keeps up with sha256, torch.isfinite does not
    integer, exponent = _EXPONENTS[tensor.dtype]
    flat = tensor.detach().contiguous().reshape(-1).view(integer)
    pieces = (host_array(flat[at : at + _PIECE]) for at in range(0, flat.numel(), _PIECE))
    return sum(int(np.count_nonzero((piece & exponent) == exponent)) for piece in pieces)
