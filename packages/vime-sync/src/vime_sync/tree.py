"""``sha256-tree``: a digest of a tensor's bytes that a GPU can make where they lie, and hashlib makes the same.

The bytes are cut into chunks of 4096, the last one shorter, an empty tensor having one empty chunk. The sha256 of every
chunk, one after another, are the bytes of the next level, until a level has a single chunk; its sha256 is the top. The
digest is the sha256 of ``HEADER``, the number of bytes (eight, little endian) and the top. The number fixes the tree's
shape, so two tensors with one digest would show a collision of sha256 itself.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from rl_contract import MissingSupport
from rl_contract.devices import host_array
from vime_sync.raw import flat_bytes, map_tensors

K = TypeVar("K")

CHUNK = 4096
HEADER = b"vime-sync sha256-tree 4096\n"
# what hashing threads take at a time, whole chunks
_PIECE = 1 << 22
# bytes of one batch on a GPU, which bounds the copies that it holds of tensors that are not contiguous
_BATCH = 1 << 31


def tree_digests(tensors: Iterable[tuple[K, torch.Tensor]]) -> list[tuple[K, str]]:
    """``(key, digest)`` in the order given, of the values in row-major order, little endian, without dtype or shape.

    Tensors of a GPU are digested there by a Triton kernel, and the device is waited for once; others by hashlib, in
    threads. They may be of any type, and views of any stride or offset.

    Raises:
        ContractError: what is no tensor, or has no bytes to read, see ``raw.flat_bytes``.
        MissingSupport: a device other than CPU and CUDA (ROCm), or a GPU's tensor where Triton is not installed.
    """
    names: list[K] = []
    sizes: list[int] = []
    found: dict[int, bytes] = {}
    batches: dict[torch.device, _Batch] = {}

    def on_host() -> Iterator[tuple[int, torch.Tensor]]:
        for index, (name, tensor) in enumerate(tensors):
            flat = flat_bytes(name, tensor)
            names.append(name)
            sizes.append(flat.numel())
            if flat.is_cuda:
                batches.setdefault(flat.device, _Batch()).add(index, flat)
            else:
                for at in range(0, max(flat.numel(), 1), _PIECE):
                    yield index, flat[at : at + _PIECE]

    leaves: dict[int, list[bytes]] = {}
    for index, part in map_tensors(lambda piece: level(host_array(piece).data), on_host()):
        leaves.setdefault(index, []).append(part)
    found.update((index, top(b"".join(parts))) for index, parts in leaves.items())
    for batch in batches.values():
        found.update(batch.tops())
    return [(name, root(size, found[index])) for index, (name, size) in enumerate(zip(names, sizes))]


def level(data: bytes | memoryview, chunk: int = CHUNK) -> bytes:
    """The sha256 of every chunk, joined."""
    view, sha = memoryview(data), hashlib.sha256
    return b"".join([sha(view[at : at + chunk]).digest() for at in range(0, max(len(view), 1), chunk)])


def top(digests: bytes, chunk: int = CHUNK) -> bytes:
    """What remains of the first level's digests when levels are taken until there is one."""
    while len(digests) > 32:
        digests = level(digests, chunk)
    return digests


def root(size: int, top: bytes) -> str:
    """The digest of ``size`` bytes whose tree has this top."""
    return hashlib.sha256(HEADER + size.to_bytes(8, "little") + top).hexdigest()


class _Batch:
    """Tensors of one GPU; launched whenever enough are held, so that copies do not pile up."""

    def __init__(self) -> None:
        try:
            from vime_sync import triton_sha256
        except ImportError as error:
            raise MissingSupport(
                f"sha256-tree on a GPU needs Triton ({error}); install triton, or digest a copy on the host"
            ) from error
        self._tops = triton_sha256.tops
        self._held: list[torch.Tensor] = []
        self._bytes = 0
        self._indices: list[int] = []
        self._launched: list[torch.Tensor] = []

    def add(self, index: int, flat: torch.Tensor) -> None:
        # the kernel reads words
        self._held.append(flat.clone() if flat.data_ptr() % 4 else flat)
        self._indices.append(index)
        self._bytes += flat.numel()
        if self._bytes >= _BATCH:
            self._launch()

    def tops(self) -> Iterator[tuple[int, bytes]]:
        self._launch()
        data = host_array(torch.cat(self._launched).cpu()).tobytes()
        return ((index, data[32 * i : 32 * i + 32]) for i, index in enumerate(self._indices))

    def _launch(self) -> None:
        if self._held:
            self._launched.append(self._tops(self._held, CHUNK))
        self._held, self._bytes = [], 0
