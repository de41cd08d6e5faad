"""Weight gradients of which each rank computes equal rows: which rows are whose, and how peers come by them.

Nothing is added here: a row's owner has it whole, and its peers take its bytes over.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from rl_contract.communicator import Communicator, gather_each

# how many elements are gathered at once, and how many tensors are filled in one call
MOST_ELEMENTS = 1 << 26
MOST_TENSORS = 32

# a gradient, and the rows of each rank's share that are meant
_Piece = tuple[torch.Tensor, int, int]


def shares(size: int, world: int) -> tuple[list[int], int]:
    """Each rank's first row of ``size``, and how many it has; where ranks do not divide ``size`` the last overlap."""
    step = -(-size // world)
    return [min(rank * step, size - step) for rank in range(world)], step


def take_over(comm: Communicator, totals: Iterable[torch.Tensor]) -> None:
    """Every rank's rows of each of ``totals``, in place, from this rank's own; the same totals on every rank.

    Where ranks divide the rows and ``comm`` has ``all_gather_into``, peers write theirs where they belong.
    """
    into: Callable[[Sequence[torch.Tensor]], None] | None = getattr(comm, "all_gather_into", None)
    totals = list(totals)
    even = [x for x in totals if into is not None and len(x) % comm.world_size == 0 and x.is_contiguous()]
    for begin in range(0, len(even), MOST_TENSORS):
        assert into is not None
        into(even[begin : begin + MOST_TENSORS])
    placed = set(map(id, even))
    for group in _groups([x for x in totals if id(x) not in placed], comm.world_size):
        owned = [_rows(total, comm.rank, begin, end, comm.world_size) for total, begin, end in group]
        for (total, begin, end), every in zip(group, gather_each(comm, owned)):
            for rank, theirs in enumerate(every.split(end - begin)):
                if rank != comm.rank:
                    _rows(total, rank, begin, end, comm.world_size).copy_(theirs)


def _rows(total: torch.Tensor, rank: int, begin: int, end: int, world: int) -> torch.Tensor:
    first = shares(len(total), world)[0][rank]
    return total[first + begin : first + end]


def _groups(totals: Iterable[torch.Tensor], world: int) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    held = 0
    for total in totals:
        step = shares(len(total), world)[1]
        row = world * max(1, total[0].numel())
        most = max(1, MOST_ELEMENTS // row)
        for begin in range(0, step, most):
            end = min(begin + most, step)
            if group and held + (end - begin) * row > MOST_ELEMENTS:
                yield group
                group, held = [], 0
            group.append((total, begin, end))
            held += (end - begin) * row
    if group:
        yield group


class LaterShares:
    """Gradients whose rows of peers are taken over later, all at once, instead of at every addition.

    A rank's own rows are whole at any time, so it may add to them again and again before its peers ask for them. What
    lies in the rows of peers until ``settle`` is of no use.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._totals: dict[int, torch.Tensor] = {}

    def add(self, total: torch.Tensor) -> None:
        """Remember ``total``, in which this rank's own rows are right."""
        self._totals[id(total)] = total

    def clear(self) -> None:
        """Forget all of them, whose values are no longer wanted."""
        self._totals.clear()

    def settle(self) -> None:
        """Make every remembered total whole, on every rank; ranks remember the same ones in the same order."""
        totals = list(self._totals.values())
        self._totals.clear()
        take_over(self.comm, totals)
