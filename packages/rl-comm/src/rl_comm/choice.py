"""What moves the bytes of a communicator, chosen once, on all of its ranks alike."""

from typing import Any

from rl_comm import board, peer_joining, shared_memory
from rl_comm.device import AgreedMover, NcclMover, StagedMover
from rl_comm.mover import GlooMover, Mover
from rl_contract import MissingSupport


def choose(group: Any, gloo: GlooMover, transport: str, timeout_s: float, *, with_nccl: bool) -> dict[str, Mover]:
    """Movers by device type; ``gloo`` is ``group``'s, or that of a group of the same ranks.

    Raises:
        MissingSupport: on every rank, where some rank can't reach what ``transport`` insists on.
    """
    on_cpu = _host_mover(gloo, transport, timeout_s)
    if not with_nccl or gloo.world_size == 1:
        return {"cpu": on_cpu, "cuda": StagedMover(on_cpu, gloo.rank)}
    peers = "" if transport in ("nccl", "gloo") else peer_joining.connect(gloo, timeout_s)
    if transport == "peer_memory" and isinstance(peers, str):
        raise MissingSupport(
            f"transport='peer_memory': {peers}; supported: Triton and NVIDIA GPUs of one host that reach one another's "
            "memory, one a rank; use 'auto'"
        )
    agreement = board.make(gloo, timeout_s)
    on_gpu = NcclMover(group, gloo.rank, gloo.world_size, agreement, None if isinstance(peers, str) else peers)
    if isinstance(agreement, board.Board):
        on_cpu = AgreedMover(on_cpu, agreement)
    return {"cpu": on_cpu, "cuda": on_gpu}


def _host_mover(gloo: GlooMover, transport: str, timeout_s: float) -> Mover:
    if transport == "gloo" or gloo.world_size == 1:
        return gloo
    shared = shared_memory.connect(gloo, timeout_s)
    if transport == "shared_memory" and shared is None:
        raise MissingSupport(
            "transport='shared_memory' needs Linux, all ranks on one host and room in /dev/shm; use 'auto'"
        )
    return shared or gloo
