"""Weight gradients of which each rank computes equal rows: which rows are whose, and how peers come by them.

Nothing is added here: a row's owner has it whole, and its peers take its bytes over.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from rl_contract.communicator import Communicator, gather_each, tell
from rl_contract.errors import ContractError

# how many elements are gathered at once, and how many tensors are filled in one call
MOST_ELEMENTS = 1 << 26
MOST_TENSORS = 32
# how many bytes of all ranks' tokens wait for a gather at most, before the job that makes them more
MOST_BYTES = 1 << 29

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
    """Weight gradients that wait: for one call that gathers the tokens of many, and for the rows of peers.

    A gradient's rows of this rank are whole once its jobs have run, so more can be added to them again and again before
    peers ask for them. What lies in the rows of peers until ``settle`` is of no use. Every rank must make the same
    calls in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._totals: dict[int, torch.Tensor] = {}
        self._jobs: list[_Job] = []
        self._held = 0
        self._lost = ""
        # where peers wait for a rank that fails by itself
        self._device = ""

    def add(self, total: torch.Tensor) -> None:
        """Remember ``total``, in which this rank's own rows are right."""
        self._totals[id(total)] = total
        self._device = total.device.type

    def defer(self, parts: list[torch.Tensor], order: torch.Tensor, use: Callable[..., object]) -> None:
        """Call ``use`` with what peers and this rank hold of each of ``parts``, in ``order``: soon, or with ``settle``.

        ``use`` must add to a ``main_grad`` and return None. ``parts`` stay where they are until then, and unchanged.

        Raises:
            ContractError: as ``settle``.
        """
        self._refuse_lost()
        self._device = parts[0].device.type
        self._jobs.append(_Job(parts, order, use, [part._version for part in parts]))
        # the same on every rank, as their parts are of one shape
        self._held += self.comm.world_size * sum(part.numel() * part.element_size() for part in parts)
        if self._held >= MOST_BYTES:
            with self._losing():
                self._run()

    def clear(self) -> None:
        """Forget all of them, whose values are no longer wanted."""
        self._totals.clear()
        self._jobs, self._held = [], 0
        self._lost = ""

    def settle(self) -> None:
        """Make every gradient whole, on every rank.

        Raises:
            ContractError: a part of them is lost since an earlier call has failed; ``clear`` forgets that.
        """
        self._refuse_lost()
        with self._losing():
            self._run()
            totals = list(self._totals.values())
            self._totals.clear()
            take_over(self.comm, totals)

    def _refuse_lost(self) -> None:
        if self._lost:
            problem = ContractError(
                f"weight gradients were lost when an earlier call failed ({self._lost}); clear them (zero_grad) and "
                "compute them again"
            )
            tell(self.comm, problem, self._device)
            raise problem

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """What fails midway leaves gradients of which some have taken their tokens or rows and others have not."""
        try:
            yield
        except BaseException as error:
            self.clear()
            # in words, since its frames hold what was gathered
            self._lost = f"{type(error).__name__}: {error}"[:400]
            if isinstance(error, Exception):
                tell(self.comm, error, self._device)
            raise

    @torch.no_grad()
    def _run(self) -> None:
        jobs = self._jobs
        self._jobs, self._held = [], 0
        if not jobs:
            return
        # as autograd looks at what it has saved
        if any(part._version != version for job in jobs for part, version in zip(job.parts, job.versions, strict=True)):
            raise ContractError(
                "a layer's input or gradient was written to before the gradient of its weight was made from it; "
                "supported: writes from the optimizer's step on, write to a clone until then"
            )
        gathered = gather_each(self.comm, [part for job in jobs for part in job.parts])
        gathered.reverse()
        for job in jobs:
            # what a job has taken is freed before the next one
            every = [gathered.pop()[job.order] for _ in job.parts]
            if job.use(*every) is not None:
                raise ContractError(
                    "a weight had a main_grad in its backward and has none now; keep it until the optimizer's step"
                )


class _Job(NamedTuple):
    parts: list[torch.Tensor]
    order: torch.Tensor
    use: Callable[..., object]
    # PyTorch's count of writes to each part
    versions: list[int]
