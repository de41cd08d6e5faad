"""sha256 of a tensor's bytes in row-major order: the one digest that manifests, shards and engines share."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from rl_contract import ContractError

K = TypeVar("K")
T = TypeVar("T")

_CHUNK_BYTES = 64 << 20


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex sha256 of the tensor's bytes: values only, in row-major order, little endian, without dtype or shape.

    Equal to ``hashlib.sha256(tensor.numpy().tobytes())`` where numpy knows the type; bf16 is hashed as it is stored.
    """
    if tensor.is_meta:
        raise ContractError("tensor_digest got a meta tensor, which has no bytes; digest the materialised tensor")
    sha = hashlib.sha256()
    if tensor.numel():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        # device tensors come over in pieces, so that hashing never doubles the host memory of a large embedding
        for start in range(0, flat.numel(), _CHUNK_BYTES):
            sha.update(flat[start : start + _CHUNK_BYTES].cpu().numpy().data)
    return sha.hexdigest()


def map_tensors(
    function: Callable[[torch.Tensor], T], tensors: Iterable[tuple[K, torch.Tensor]], *, threads: int = 2
) -> Iterator[tuple[K, T]]:
    """``(key, function(tensor))`` in the order given; sha256 releases the interpreter, so two threads use two cores.

    At most ``2 * threads`` tensors are held at a time, however long ``tensors`` is.
    """
    pending: deque[tuple[K, Future[T]]] = deque()
    with ThreadPoolExecutor(max_workers=threads) as pool:
        for key, tensor in tensors:
            pending.append((key, pool.submit(function, tensor)))
            if len(pending) >= 2 * threads:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()


def tensor_digests(tensors: Iterable[tuple[str, torch.Tensor]], *, threads: int = 2) -> Iterator[tuple[str, str]]:
    """``(name, tensor_digest(tensor))`` in the order given."""
    return map_tensors(tensor_digest, tensors, threads=threads)
