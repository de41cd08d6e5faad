"""What tells a weight file from another training step's though little is read; ranks compare it before they load."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 4096
BLOCKS = 8
"""Of each tensor this many blocks of ``BLOCK`` bytes are read, or all of its bytes where it has no more."""
_LONGEST = 100_000_000
"""Bytes of a header, by safetensors' own limit."""


def fingerprint(file: Path) -> str:
    """Size in bytes and a blake2b digest of a safetensors file.

    The digest is over the file's size, its header (names, types, shapes and places of the tensors, and metadata) and,
    of each tensor, ``BLOCKS`` blocks of ``BLOCK`` bytes spread evenly from its first to its last byte; a tensor of at
    most so many bytes is read whole. A training step moves values all over a tensor, and of one in bf16 16384 are
    looked at. Files that are alike in all of that and differ between the blocks have the same fingerprint.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no safetensors file.
    """
    # unbuffered, so that no more is read than is asked for
    with file.open("rb", buffering=0) as source:
        size = source.seek(0, 2)
        source.seek(0)
        prefix = source.read(8)
        length = int.from_bytes(prefix, "little")
        if length > min(size - len(prefix), _LONGEST):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = source.read(length)
        digest = hashlib.blake2b(size.to_bytes(8, "little") + prefix + header, digest_size=16)
        first = len(prefix) + len(header)
        # in the order of the file, whatever that of the header is
        for begin, end in sorted(_places(header, size - first)):
            for start, stop in _blocks(begin, end):
                source.seek(first + start)
                digest.update(source.read(stop - start))
    return f"{size} bytes, blake2b {digest.hexdigest()}"


def _places(header: bytes, room: int) -> Iterator[tuple[int, int]]:
    """First byte of each tensor and the one after its last, in what follows the header; ValueError for every defect."""
    try:
        entries = json.loads(header)
    except RecursionError as error:
        raise ValueError("its header is nested too deep") from error
    if not isinstance(entries, dict):
        raise ValueError(f"its header holds a {type(entries).__name__}, no mapping")
    for name, entry in entries.items():
        if name != "__metadata__":
            yield _place(name, entry, room)


def _place(name: str, entry: Any, room: int) -> tuple[int, int]:
    at = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(at, list) or [type(x) for x in at] != [int, int] or not 0 <= at[0] <= at[1] <= room:
        raise ValueError(f"its header has no place for {name!r:.80} in the {room} bytes after it")
    return at[0], at[1]


def _blocks(begin: int, end: int) -> list[tuple[int, int]]:
    if end - begin <= BLOCKS * BLOCK:
        return [(begin, end)]
    starts = [begin + i * (end - begin - BLOCK) // (BLOCKS - 1) for i in range(BLOCKS)]
    return [(start, start + BLOCK) for start in starts]
