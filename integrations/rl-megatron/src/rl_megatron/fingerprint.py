"""What tells a weight file from another training step's though little is read; ranks compare it before they load."""

import hashlib
import json
from pathlib import Path

BLOCK = 4096
BLOCKS = 8
"""Of each tensor this many blocks of ``BLOCK`` bytes are read, or all of its bytes where it has no more."""


def fingerprint(file: Path) -> str:
    """Size in bytes and a blake2b digest of a safetensors file.

    The digest is over the file's size, its header (names, types, shapes and places of the tensors, and metadata) and,
    of each tensor, ``BLOCKS`` blocks of ``BLOCK`` bytes spread evenly from its first to its last byte; a tensor of at
    most so many bytes is read whole. A training step moves values all over a tensor, and of one in bf16 16384 are
    looked at. Files that are alike in all of that and differ between the blocks have the same fingerprint.

    Raises:
        OSError: the file can't be read.
    """
    # unbuffered, so that no more is read than is asked for
    with file.open("rb", buffering=0) as source:
        size = source.seek(0, 2)
        source.seek(0)
        prefix = source.read(8)
        header = source.read(int.from_bytes(prefix, "little"))
        digest = hashlib.blake2b(size.to_bytes(8, "little") + prefix + header, digest_size=16)
        first = len(prefix) + len(header)
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        # in the order of the file, whatever that of the header is
        for begin, end in sorted(tensors):
            for start, stop in _blocks(begin, end):
                source.seek(first + start)
                digest.update(source.read(stop - start))
    return f"{size} bytes, blake2b {digest.hexdigest()}"


def _blocks(begin: int, end: int) -> list[tuple[int, int]]:
    if end - begin <= BLOCKS * BLOCK:
        return [(begin, end)]
    starts = [begin + i * (end - begin - BLOCK) // (BLOCKS - 1) for i in range(BLOCKS)]
    return [(start, start + BLOCK) for start in starts]
