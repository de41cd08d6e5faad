"""Digests of a tensor's bytes in row-major order, which manifests, shards and engines share.

``sha256`` names weights. ``words128`` is computed where the tensor lies, in integers, at the speed of its memory; it
guards a transfer against accidents (another byte, another place, another length), not against an adversary.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from rl_contract import ContractError

K = TypeVar("K")
T = TypeVar("T")

ALGORITHMS = ("sha256", "words128")
_CHUNK_BYTES = 64 << 20
_CHUNK_WORDS = 1 << 22
_MASK = (1 << 64) - 1
# the fractional digits of pi, as good as any
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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


def default_threads() -> int:
    """Two, up to sixteen where this process may use so many cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(16, cores))


def map_tensors(
    function: Callable[[torch.Tensor], T], tensors: Iterable[tuple[K, torch.Tensor]], *, threads: int | None = None
) -> Iterator[tuple[K, T]]:
    """``(key, function(tensor))`` in the order given; sha256 releases the interpreter, so threads use the cores.

    At most ``2 * threads`` tensors are held at a time, however long ``tensors`` is.
    """
    threads = threads or default_threads()
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


def tensor_digests(
    tensors: Iterable[tuple[str, torch.Tensor]], *, threads: int | None = None
) -> Iterator[tuple[str, str]]:
    """``(name, tensor_digest(tensor))`` in the order given."""
    return map_tensors(tensor_digest, tensors, threads=threads)


def digests(algorithm: str, tensors: Iterable[tuple[K, torch.Tensor]]) -> dict[K, str]:
    """Digests by key, by the algorithm of that name.

    Raises:
        ContractError: an algorithm other than ``sha256`` and ``words128``.
    """
    if algorithm == "sha256":
        return dict(map_tensors(tensor_digest, tensors))
    if algorithm == "words128":
        return words_digests(tensors)
    raise ContractError(f"digest {algorithm!r} is unknown, supported: {ALGORITHMS}")


def words_digests(tensors: Iterable[tuple[K, torch.Tensor]]) -> dict[K, str]:
    """``words128`` of every tensor, 32 hex digits each, computed on the tensor's own device.

    The bytes, zero-padded to whole 32-bit little-endian words ``w_i``, give two sums over i modulo 2^64 of
    ``(w_i + 1) * k(seed, i)`` with ``k`` the i-th output of splitmix64 (Steele et al. 2014) made odd: a multilinear
    hash, whose integer sum has no order. Length is covered, since a zero word adds its key.
    """
    names: list[K] = []
    sums: list[torch.Tensor] = []
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ContractError(f"words_digests got a meta tensor ({name}), which has no bytes")
        names.append(name)
        sums.append(_word_sums(tensor))
    # one transfer for all, as each would wait for the device
    found = torch.stack([s.cpu() for s in sums] if len({s.device for s in sums}) > 1 else sums).tolist() if sums else []
    return {name: f"{a & _MASK:016x}{b & _MASK:016x}" for name, (a, b) in zip(names, found)}


def _word_sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = flat.numel()
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    if size % 4:
        flat = torch.cat([flat, flat.new_zeros(4 - size % 4)])
    if flat.storage_offset() % 4:
        flat = flat.clone()
    words = flat.view(torch.int32)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS].to(torch.int64)
        part = (part & 0xFFFFFFFF) + 1
        for lane, seed in enumerate(_SEEDS):
            totals[lane] += (part * _keys(seed, start, part.numel(), flat.device)).sum()
    # the padding is no part of the bytes: its length tells the two apart
    return totals + size * torch.tensor([_signed(s) for s in _SEEDS], dtype=torch.int64, device=flat.device)


_first_keys: dict[tuple[int, torch.device], torch.Tensor] = {}


def _keys(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    # most tensors fit into one chunk, whose keys are worth keeping
    if start:
        return _splitmix(seed, start, count, device)
    held = _first_keys.get((seed, device))
    if held is None or held.numel() < count:
        held = _first_keys[seed, device] = _splitmix(seed, 0, 1 << (count - 1).bit_length(), device)
    return held[:count]


def _splitmix(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    z = z.mul_(_signed(_GAMMA)).add_(_signed(seed))
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z = (z ^ _shifted(z, shift)).mul_(_signed(factor))
    return (z ^ _shifted(z, 31)).bitwise_or_(1)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    # int64 shifts keep the sign, the generator's do not
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
