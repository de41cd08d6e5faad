"""What ranks must agree on when a communicator is made, since a rank that chose otherwise would be waited for."""

import hashlib

import torch

from rl_comm.header import Call
from rl_comm.mover import GlooMover
from rl_contract import ContractError

_BYTES = 1024
# of each of the three that are said, where they are too long together
_SHOWN_BYTES = 240


def check_alike(gloo: GlooMover, identity: str, arguments: str, problem: Exception | None) -> None:
    """Every rank learns of a rank that was built for something else or otherwise, before anything is moved.

    Args:
        identity: what the ranks were built for, e.g. a profile's fingerprint.
        arguments: what decides how calls are made.
        problem: why this rank can't go on, if so.

    Raises:
        Exception: ``problem``, on the rank that has it; on its peers a ContractError that names the rank.
    """
    if gloo.world_size > 1:
        rows = _exchange(gloo, [identity, arguments, "" if problem is None else "refused"])
        refusing = [str(rank) for rank, row in enumerate(rows) if row[2]]
        if refusing and problem is None:
            raise ContractError(f"TreeCommunicator was refused on rank {', '.join(refusing)}, whose error says why")
    if problem is not None:
        raise problem
    if gloo.world_size == 1:
        return
    other = next((r for r, row in enumerate(rows) if row != rows[0]), None)
    if other is None:
        return
    if rows[0][0] != rows[other][0]:
        raise ContractError(
            f"ranks were built for different things: rank 0 for {rows[0][0]!r}, rank {other} for {rows[other][0]!r}; "
            "start every rank with one profile and one model"
        )
    raise ContractError(
        f"ranks were given different arguments: rank 0 {rows[0][1]}, rank {other} {rows[other][1]}; "
        "make every rank's TreeCommunicator with the same"
    )


def _exchange(gloo: GlooMover, said: list[str]) -> list[list[str]]:
    mine = "\0".join(part.replace("\0", " ") for part in said).encode(errors="replace")
    if len(mine) > _BYTES:
        return _exchange(gloo, [_short(part) for part in said])
    padded = torch.zeros(_BYTES, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    call = Call("all_gather", padded.dtype, padded.dtype, 0, tuple(padded.shape))
    rows = [bytes(row).decode(errors="replace").split("\0") for row in gloo.gather(call, padded).tolist()]
    return [row[:3] for row in rows]


def _short(part: str) -> str:
    """As much as fits to read, and a digest of the whole to compare."""
    whole = part.encode(errors="replace")
    if len(whole) <= _SHOWN_BYTES:
        return part
    shown = whole[:_SHOWN_BYTES].decode(errors="ignore")
    return f"{shown}... (sha256 {hashlib.sha256(whole).hexdigest()})"
