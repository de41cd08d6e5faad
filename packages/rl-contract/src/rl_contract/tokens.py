"""Tokens of one packed batch on several ranks (context parallel), and the weight gradients that sum over them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_contract.checks import whole_number
from rl_contract.communicator import Communicator, gather_each, refuse, tell
from rl_contract.devices import to_device
from rl_contract.errors import ContractError
from rl_contract.shares import LaterShares, shares, take_over


class TokenShards:
    """Which rank holds which rows of a packed batch.

    A weight's gradient is a sum over tokens in packed order. Here the rows are brought together as bytes, in that
    order and without padding, and each rank computes its share of the gradient's rows over all tokens. So the bits are
    those of one rank, no token is multiplied twice, and no partial sums are left to be joined.
    """

    def __init__(self, comm: Communicator, places: Sequence[torch.Tensor], *, later: LaterShares | None = None) -> None:
        """
        Args:
            comm: the ranks that hold the tokens.
            places: for each rank, rank 0 first, int64 [n_r]: the place in the packed batch of each row it holds, -1 for
                padding. Together they name every place 0 to T-1 once.
            later: where gradients that grow in place wait for the rows of peers until ``later.settle()``; None takes
                these over at once.

        Raises:
            ContractError: no communicator, no list of int64 [n_r], a number of ranks other than comm's, or places that
                are not each token once.
        """
        if comm is None:
            raise ContractError("TokenShards got comm=None; supported: the Communicator of the ranks that hold tokens")
        check_peers("TokenShards", comm)
        if not isinstance(places, (list, tuple)) or not all(map(_is_places, places)):
            raise ContractError(f"TokenShards got places {places!r:.80}; supported: for each rank a tensor int64 [n_r]")
        if len(places) != comm.world_size:
            raise ContractError(
                f"TokenShards got the rows of {len(places)} ranks; the communicator has {comm.world_size}"
            )
        self.comm, self.later = comm, later
        self.rows = len(places[comm.rank])
        self._longest = max(len(p) for p in places)
        padded = [torch.nn.functional.pad(p, (0, self._longest - len(p)), value=-1) for p in places]
        every = torch.cat(padded)
        held = (every >= 0).nonzero()[:, 0]
        self.order = held[every[held].argsort()]
        if not torch.equal(every[self.order], torch.arange(len(held), device=every.device)):
            raise ContractError(
                f"TokenShards got places {every[every >= 0].sort().values.tolist()[:8]}...; needs each of 0 to T-1 once"
            )

    @property
    def total(self) -> int:
        """T, the tokens of all ranks without padding."""
        return len(self.order)

    def refuse(self, problem: Exception, *, device: str = "") -> None:
        """Tell the ranks that hold the other tokens; see ``rl_contract.communicator.refuse``."""
        tell(self.comm, problem, device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows ``[n_r, ...]`` -> all tokens' rows ``[T, ...]`` in packed order. Moves bytes.

        Raises:
            ContractError: not as many rows as this rank holds.
        """
        return self.gather_each(x)[0]

    def gather_each(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """``gather`` of each tensor, by one call of the communicator where it has one for several tensors.

        Raises:
            ContractError: as ``gather``.
        """
        try:
            return [every[self.order] for every in gather_each(self.comm, self._parts(tensors))]
        except Exception as problem:
            refuse(problem, self.comm, given=tensors)
            raise

    def with_all(self, tensors: Sequence[torch.Tensor], use: Callable[..., object]) -> None:
        """``use(*gather_each(*tensors))``, which adds to a ``main_grad`` and returns None: now, or when ``later`` will.

        Raises:
            ContractError: as ``gather``.
        """
        try:
            parts = self._parts(tensors)
        except Exception as problem:
            refuse(problem, self.comm, given=tensors)
            raise
        if self.later is not None:
            self.later.defer(parts, self.order, use)
        else:
            use(*(every[self.order] for every in gather_each(self.comm, parts)))

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank sends, of one length on all ranks."""
        parts = []
        for x in tensors:
            if len(x) != self.rows:
                raise ContractError(f"TokenShards got {len(x)} rows on rank {self.comm.rank}, which holds {self.rows}")
            if self.rows < self._longest:
                x = torch.cat((x, x.new_zeros((self._longest - self.rows, *x.shape[1:]))))
            parts.append(x.contiguous())
        if self.order.device != tensors[0].device:
            self.order = to_device(self.order, tensors[0].device)
        return parts

    def weight_grad(self, size: int, compute: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """``[size, ...]``, of which this rank computes ``compute(first, last) -> [last - first, ...]`` over all tokens.

        Shares are equal; where they do not divide ``size`` the last ones overlap, with the same bits.
        """
        firsts, step = shares(size, self.comm.world_size)
        mine = firsts[self.comm.rank]
        parts = self.comm.all_gather(compute(mine, mine + step)[None], dim=0)
        if step * len(firsts) == size:
            return parts.flatten(0, 1)
        out = parts.new_empty((size, *parts.shape[2:]))
        for first, part in zip(firsts, parts):
            out[first : first + step] = part
        return out

    def add_weight_grad(self, total: torch.Tensor, add: Callable[[torch.Tensor, int, int], None]) -> None:
        """``total`` [size, ...], the same on every rank, grows in place: ``add(part, first, last)`` adds all tokens to
        this rank's rows, ``part = total[first:last]``; those of peers are taken over as they are, see ``share``.
        """
        firsts, step = shares(len(total), self.comm.world_size)
        mine = firsts[self.comm.rank]
        add(total[mine : mine + step], mine, mine + step)
        self.share(total)

    def share(self, total: torch.Tensor) -> None:
        """Take over the rows of ``total`` that peers have added to, now or with ``later``."""
        if self.later is not None:
            self.later.add(total)
        else:
            take_over(self.comm, [total])


def _is_places(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 1


def check_peers(where: str, comm: Any, tokens: Any = None) -> None:
    """Refuse a ``comm`` or ``tokens`` of another kind at once, not when a gradient first needs it.

    Raises:
        ContractError: ``comm`` is neither None nor has a rank within its world, or ``tokens`` neither None nor
            TokenShards.
    """
    if comm is not None:
        rank: Any = getattr(comm, "rank", None)
        world: Any = getattr(comm, "world_size", None)
        if not whole_number(rank) or not whole_number(world) or not 0 <= rank < world:
            raise ContractError(
                f"{where} got comm={comm!r}; supported: None for one rank, or a Communicator, whose rank and "
                "world_size are integers; wrap a process group by rl_comm"
            )
    if tokens is not None and not isinstance(tokens, TokenShards):
        raise ContractError(f"{where} got tokens={tokens!r}; supported: None, or TokenShards; build one")
