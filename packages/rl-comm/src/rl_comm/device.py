"""Movers of tensors on a GPU. As in ``mover``, nothing here adds."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from rl_comm.board import Board, Signatures
from rl_comm.header import Call
from rl_comm.mover import Mover, gathered_into
from rl_comm.peer_memory import PeerMemory
from rl_contract import ContractError


class NcclMover:
    """NCCL (RCCL) as a mover of bytes, on the current stream, so inside a graph capture too.

    ``agreement`` compares the ranks' calls on the host first; nothing waits for the device. ``peers``, where the ranks
    reach one another's memory, move what is small.
    """

    def __init__(
        self, group: Any, rank: int, world_size: int, agreement: Board | Signatures, peers: PeerMemory | None = None
    ) -> None:
        self.group, self.rank, self.world_size, self.peers = group, rank, world_size, peers
        self.name = "nccl" if peers is None else f"nccl+{peers.name}"
        self._agreement = agreement
        # says that this rank refuses a call, without waiting for its peers
        self.refuse = getattr(agreement, "refuse", None)
        self._grouped = True
        # connections are made at the first use of each form, which must not be inside a graph capture
        if torch.cuda.is_available():
            probe = torch.zeros(world_size, 16, dtype=torch.uint8, device=torch.cuda.current_device())
            self._gather(probe[0])
            self._grouped = self._groups(probe)
            dist.all_to_all_single(torch.empty_like(probe), probe, group=group)

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n], once all are seen to make the same call."""
        peers = self.peers_for(payload.numel())
        if peers is not None:
            return peers.gather(payload, lambda: self.agree(call))
        return self._gather(payload, call)

    def peers_for(self, size: int) -> PeerMemory | None:
        """What moves ``size`` bytes of each rank through peer memory, if that is how they go."""
        return self.peers if self.peers is not None and self.peers.fits(size) else None

    def misplaced(self, call: Call, x: torch.Tensor) -> Exception | None:
        """Why peer memory can't serve ``x``, whatever its size."""
        if self.peers is None or x.device == self.peers.device:
            return None
        return ContractError(
            f"{call.op} got a tensor on {x.device}, supported: on {self.peers.device}, where this communicator's peers "
            "reach its memory; make it where that GPU is current, or pass transport='nccl'"
        )

    def agree(self, call: Call) -> None:
        """Return once all ranks are seen to make this call; what may fail on one rank alone comes before."""
        if not call.agreed:
            self._agreement.agree(call)

    def leave(self) -> None:
        """Tell peers that this rank makes no call any more, where they look at what it does."""
        if isinstance(self._agreement, Board):
            self._agreement.leave()

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        """``gather`` of each payload: one look at the peers and one launch, without a copy that joins them."""
        out = [payload.new_empty(self.world_size, payload.numel()) for payload in payloads]
        self.agree(call)
        self._launch(list(zip(out, payloads)))
        return out

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None:
        """Peers' rows of each uint8 [world_size, n], of which this rank's own is filled; nothing is copied beside."""
        self.agree(call)
        self._launch([(whole, whole[self.rank]) for whole in wholes])

    def _groups(self, probe: torch.Tensor) -> bool:
        """Whether this build of the backend launches several gathers as one; else each is launched by itself."""
        try:
            self._launch([(whole, whole[self.rank]) for whole in (probe, probe.clone())])
        except RuntimeError as error:
            # it is the same build on every rank, and nothing was launched
            if "support" not in str(error):
                raise
            return False
        return True

    def _launch(self, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each (whole [world_size, n], payload [n]), all in one launch."""
        moved = [(whole.view(-1), payload) for whole, payload in moved if payload.numel()]
        with dist._coalescing_manager(group=self.group) if self._grouped and len(moved) > 1 else nullcontext():
            for whole, payload in moved:
                dist.all_gather_into_tensor(whole, payload, group=self.group)

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Row ``rank`` of every rank's ``payload`` (uint8 [world_size, n]), as uint8 [world_size, n] by source rank."""
        received = torch.empty_like(payload)
        self.agree(call)
        if payload.numel():
            dist.all_to_all_single(received, payload, group=self.group)
        return received

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's ``payload``."""
        out = payload.clone()
        self.agree(call)
        if out.numel():
            dist.broadcast(out, group=self.group, group_src=source)
        return out

    def _gather(self, payload: torch.Tensor, call: Call | None = None) -> torch.Tensor:
        out = payload.new_empty(self.world_size, payload.numel())
        if call is not None:
            self.agree(call)
        if payload.numel():
            dist.all_gather_into_tensor(out.view(-1), payload, group=self.group)
        return out


class AgreedMover:
    """The host's mover beside NCCL's: its calls, too, are said on the board on which those of GPUs are.

    Ranks that give tensors on different devices would else wait for one another in different places.
    """

    def __init__(self, host: Mover, board: Board) -> None:
        self._host, self._board = host, board
        self.name = host.name

    def refuse(self, call: Call) -> None:
        """Said where all calls are looked at first."""
        self._board.refuse(call)

    def leave(self) -> None:
        """Tell peers, those that wait on the board and those that wait for bytes."""
        self._board.leave()
        leave: Callable[[], None] | None = getattr(self._host, "leave", None)
        if leave is not None:
            leave()

    def _agree(self, call: Call) -> Call:
        if not call.agreed:
            self._board.agree(call)
        return call

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        return self._host.gather(self._agree(call), payload)

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._host.gather_each(self._agree(call), payloads)

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None:
        self._host.gather_into(self._agree(call), wholes)

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        return self._host.scatter(self._agree(call), payload)

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor:
        return self._host.broadcast(self._agree(call), payload, source)


class StagedMover:
    """A GPU's bytes through the host's mover, for ranks that share a GPU. Waits for the device."""

    def __init__(self, host: Mover, rank: int) -> None:
        self._host, self._rank = host, rank
        self.name = f"staged-{host.name}"
        if (refuse := getattr(host, "refuse", None)) is not None:
            self.refuse: Callable[[Call], None] = refuse

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        return self._host.gather(call, payload.cpu()).to(payload.device)

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            rows.to(payload.device)
            for rows, payload in zip(self._host.gather_each(call, [x.cpu() for x in payloads]), payloads)
        ]

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None:
        gathered_into(self, self._rank, call, wholes)

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        return self._host.scatter(call, payload.cpu()).to(payload.device)

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor:
        return self._host.broadcast(call, payload.cpu(), source).to(payload.device)
