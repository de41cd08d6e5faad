"""Moving bytes between ranks. Nothing here adds: a mover returns what the peers hold, and the tree is summed locally.

Every call first exchanges one block of fixed size: a header that says what the rank is about to move, and as much of
the payload as fits. A rank whose call differs is thus found before any size-dependent transfer, on every rank alike;
a small payload costs one exchange.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from rl_comm.header import HEAD_BYTES, KIND_SHIFT, NUMBERS, REFUSAL, Call, check_calls, check_kinds, head_of

BLOCK_BYTES = 16384
# bytes, of all ranks, that are gathered at once beside the memory they belong in
PIECE_BYTES = 1 << 28


class Refusals:
    """Calls that a rank refuses before it would have made them: said at once, met by its peers' next calls.

    The refusing rank waits for nobody until its own next call, which first takes its peers' answers, so that all are in
    step again. A mover gives the two halves of its exchange.
    """

    def __init__(self) -> None:
        self._said: list[Call] = []

    def refuse(self, call: Call) -> None:
        """Say ``call``, which is refused; behind an earlier one it is said once peers have come to that."""
        if not self._said:
            self._post_refusal(call)
        self._said.append(call)

    def _settle(self) -> None:
        said, self._said = self._said, []
        for at, call in enumerate(said):
            if at:
                self._post_refusal(call)
            self._collect_refusal()

    def _post_refusal(self, call: Call) -> None:
        raise NotImplementedError

    def _collect_refusal(self) -> None:
        raise NotImplementedError


class Mover(Protocol):
    """What moves bytes between ranks; payloads and results lie on the mover's own kind of device."""

    name: str

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor: ...

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]: ...

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None: ...

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor: ...

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor: ...


def gathered_as_one(mover: Mover, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
    """``gather`` of each payload by one gather of all; for memory in which copies cost less than calls."""
    rows = mover.gather(call, torch.cat(payloads))
    return list(rows.split([payload.numel() for payload in payloads], dim=1))


def gathered_into(mover: Mover, rank: int, call: Call, wholes: list[torch.Tensor]) -> None:
    """Row ``rank`` of each uint8 [world_size, n] goes to the peers, theirs into the other rows, by ``gather_each``.

    In pieces, each of which is agreed on: what is gathered is held once more, and on a GPU that ranks share twice.
    """
    for pieces in _pieces(wholes):
        for whole, rows in zip(pieces, mover.gather_each(call, [whole[rank] for whole in pieces])):
            for peer, theirs in enumerate(rows):
                if peer != rank:
                    whole[peer].copy_(theirs)


def _pieces(wholes: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Columns of ``wholes``, in order, at most ``PIECE_BYTES`` at a time; at least one piece, which may be empty."""
    pieces: list[torch.Tensor] = []
    held = 0
    for whole in wholes:
        for part in whole.split(max(1, PIECE_BYTES // len(whole)), dim=1):
            if pieces and held + part.numel() > PIECE_BYTES:
                yield pieces
                pieces, held = [], 0
            pieces.append(part)
            held += part.numel()
    yield pieces


@dataclass
class _Traffic:
    """Of one gloo group, on this rank: communicators made over it, and calls of any of them."""

    made: int = 0
    calls: int = 0


_traffic: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Traffic]" = weakref.WeakKeyDictionary()


class GlooMover:
    """Direct exchange between all pairs of a gloo group: one step of latency, where a ring takes world_size - 1."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self._traffic = _traffic.setdefault(group, _Traffic())
        # which communicator's calls these are; 0 for what is exchanged before that is known
        self._kind = 0

    def become(self) -> None:
        """From here on, calls are those of one more communicator over this group, and no other's; on all ranks."""
        mine = torch.tensor([self._traffic.made + 1])
        call = Call("barrier", torch.int64, torch.int64, 1, ())
        found = self.gather(call, mine.view(torch.uint8)).contiguous().view(torch.int64)
        # one that could not be made on some ranks was counted on the others
        self._kind = self._traffic.made = int(found.max())

    def refuse(self, call: Call) -> None:
        """Nothing is said now: what nobody answers would hold this rank until the group's timeout. The number of this
        rank's next call over the group tells its peers, who come to it by raising once for each that was refused."""
        self._traffic.calls += 1

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n], once all are seen to make the same call."""
        head = min(payload.numel(), BLOCK_BYTES - HEAD_BYTES)
        blocks = self._agree(call, payload[:head])
        if payload.numel() == head:
            return blocks[:, HEAD_BYTES : HEAD_BYTES + head]
        rest = payload[head:]
        received = payload.new_empty(self.world_size, rest.numel())
        dist.all_to_all_single(received, rest.repeat(self.world_size), group=self.group)
        return torch.cat((blocks[:, HEAD_BYTES : HEAD_BYTES + head], received), dim=1)

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        """``gather`` of each payload, in one call."""
        return gathered_as_one(self, call, payloads)

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None:
        """Peers' rows of each uint8 [world_size, n], of which this rank's own is filled."""
        gathered_into(self, self.rank, call, wholes)

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Row ``rank`` of every rank's ``payload`` (uint8 [world_size, n]), as uint8 [world_size, n] by source rank."""
        self.agree(call)
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=self.group)
        return received

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's ``payload``."""
        head = min(payload.numel(), BLOCK_BYTES - HEAD_BYTES)
        blocks = self._agree(call, payload[:head])
        if payload.numel() == head:
            return blocks[source, HEAD_BYTES : HEAD_BYTES + head].clone()
        out = payload.clone()
        dist.broadcast(out, group=self.group, group_src=source)
        return out

    def agree(self, call: Call) -> None:
        """Return once every rank is seen to make this call.

        Raises:
            ContractError: on every rank, when the calls differ.
        """
        self._agree(call, torch.empty(0, dtype=torch.uint8))

    def _agree(self, call: Call, head: torch.Tensor) -> torch.Tensor:
        block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        self._traffic.calls += 1
        block[:HEAD_BYTES] = head_of(replace(call, number=self._traffic.calls), self._kind)
        block[HEAD_BYTES : HEAD_BYTES + head.numel()] = head
        while True:
            blocks = torch.empty(self.world_size, BLOCK_BYTES, dtype=torch.uint8)
            dist.all_to_all_single(blocks, block.repeat(self.world_size), group=self.group)
            if self._met(blocks[:, :HEAD_BYTES]):
                return blocks

    def _met(self, heads: torch.Tensor) -> bool:
        """Whether all ranks make this call; not while peers have yet to come to what this rank has refused before.

        Raises:
            ContractError: on every rank where the calls differ; where a rank has refused this one, on those that make
                it.
        """
        words = heads.contiguous().view(torch.int64)
        if bool((words == words[0]).all()):
            return True
        rows = words.tolist()
        numbers = [row[-1] & NUMBERS for row in rows]
        least = min(numbers)
        if numbers[self.rank] > least:
            return False
        here = [number == least for number in numbers]
        check_kinds({rank: row[-1] >> KIND_SHIFT for rank, row in enumerate(rows) if here[rank]})
        check_calls([row[:-1] if met else REFUSAL.words() for row, met in zip(rows, here)])
        return True
