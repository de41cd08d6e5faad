"""Digests of a tensor's bytes in row-major order, which manifests, shards and engines share; they are named.

``sha256-tree`` (``tree``) names weights: a GPU makes it where they lie. ``sha256`` is hashlib's of all the bytes in a
row, and what a manifest without the name of an algorithm has.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from rl_contract import ContractError
from rl_contract.devices import host_array
from vime_sync.raw import flat_bytes, map_tensors
from vime_sync.tree import tree_digests

K = TypeVar("K")

WEIGHT_DIGEST = "sha256-tree"
"""What weights are named and compared by, unless a manifest says otherwise."""
ALGORITHMS = (WEIGHT_DIGEST, "sha256")
_CHUNK_BYTES = 64 << 20


def check_algorithm(algorithm: object, where: str = "digest") -> str:
    """The name, if it is one of ``ALGORITHMS``; else ContractError that says what ``where`` was given."""
    if algorithm not in ALGORITHMS:
        raise ContractError(f"{where} {algorithm!r} is unknown, supported: {', '.join(ALGORITHMS)}")
    return str(algorithm)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex sha256 of the tensor's bytes: values only, in row-major order, little endian, without dtype or shape.

    Equal to ``hashlib.sha256(tensor.numpy().tobytes())`` where numpy knows the type; bf16 is hashed as it is stored.

    Raises:
        ContractError, MissingSupport: see ``raw.flat_bytes``.
    """
    flat = flat_bytes("the tensor", tensor)
    sha = hashlib.sha256()
    # device tensors come over in pieces, so that hashing never doubles the host memory of a large embedding
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        sha.update(host_array(flat[start : start + _CHUNK_BYTES].cpu()).data)
    return sha.hexdigest()


def tensor_digests(
    tensors: Iterable[tuple[str, torch.Tensor]], *, threads: int | None = None
) -> Iterator[tuple[str, str]]:
    """``(name, tensor_digest(tensor))`` in the order given."""
    return map_tensors(tensor_digest, tensors, threads=threads)


def digests(algorithm: str, tensors: Iterable[tuple[K, torch.Tensor]]) -> dict[K, str]:
    """Digests by key, by the algorithm of that name.

    Raises:
        ContractError: an algorithm that is none of ``ALGORITHMS``; see ``tree.tree_digests``.
    """
    if check_algorithm(algorithm) == "sha256":
        return dict(map_tensors(tensor_digest, tensors))
    return dict(tree_digests(tensors))
