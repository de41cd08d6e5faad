"""``TreeCommunicator``: rl_contract's Communicator over a torch.distributed process group."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rl_comm import ops
from rl_comm.agreement import check_alike
from rl_comm.calls import Calls
from rl_comm.choice import choose
from rl_comm.device import NcclMover
from rl_comm.header import Call, named
from rl_comm.mover import GlooMover, Mover
from rl_comm.peer_memory import PeerMemory
from rl_comm.refusals import (
    fits_op,
    no_group,
    no_host_group,
    parts_problem,
    unmovable,
    unreadable,
    unusable,
)
from rl_comm.steps import in_step, told
from rl_comm.tree import WORLD_SIZES, tree_sum
from rl_contract import ContractError, MissingSupport
from rl_contract.checks import shown
from rl_contract.communicator import dim_problem, sum_problem
from rl_contract.devices import row_major_bytes

# size of the fp32 partial from which on two steps are taken, by device
TWO_SHOT_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}


class TreeCommunicator(Calls):
    """Collectives of one group of ranks; rank order is the group's.

    A partial of at least ``two_shot_bytes`` is reduced in two steps (each rank sums its slice, slices are gathered),
    a smaller one in one step (each rank gathers all partials and sums them). Each element is summed by the same tree
    and rounded once in both, so the choice moves time, never bits.

    Args:
        group: a process group; ``None`` is the default group. Its gloo part serves CPU tensors, its NCCL part those on
            GPUs. A group without NCCL serves GPU tensors through the host, which ranks that share a GPU need.
        transport: of CPU tensors: ``auto`` takes shared memory where all ranks are processes of one host, else gloo;
            ``shared_memory`` and ``gloo`` insist. Of GPU tensors: ``auto`` sums, and gathers what is small, through
            peer memory where every rank reaches every other one's, as over NVLink, and moves the rest by NCCL, and so
            does ``shared_memory``; ``peer_memory`` insists on both; ``nccl`` and ``gloo`` move all by NCCL. Chosen
            here, once, for every call.
        two_shot_bytes: size of the fp32 partial from which on two steps are taken; by device where None.
        timeout_s: how long a rank waits for a peer over shared memory and through peer memory, where a kernel whose
            peers have not come then fails the process's CUDA context; gloo and NCCL have the group's own timeout.
        host_group: a gloo group of the same ranks, where ``group`` has no gloo part; made here where None.
        identity: what all ranks must agree on, e.g. a profile's fingerprint.

    Raises:
        MissingSupport: torch.distributed is not initialised, the group has neither gloo nor NCCL, or a transport was
            asked for that some rank cannot reach.
        ContractError: no process group, a world size other than 1, 2, 4, 8, a process outside the group; on every rank,
            when one rank's arguments can't be used, or ranks differ in ``identity``, ``transport`` or
            ``two_shot_bytes``.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        transport: str = "auto",
        two_shot_bytes: int | None = None,
        timeout_s: float = 1800.0,
        host_group: Any = None,
        identity: str = "",
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise MissingSupport(
                "TreeCommunicator needs an initialised torch.distributed; call init_process_group first, "
                "or use rl_contract.SingleRank for a world of one"
            )
        group = dist.group.WORLD if group is None else group
        if (problem := no_group("group", group)) is not None:
            raise problem
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            raise ContractError("this process is not in the group; build a TreeCommunicator on its members only")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if world_size not in WORLD_SIZES:
            raise ContractError(
                f"TreeCommunicator got a world of {world_size}, supported: {WORLD_SIZES}; "
                "choose a power of two up to 8, so that shards are whole sub-trees"
            )
        # a group of several devices, e.g. "cpu:gloo,cuda:nccl", serves each by its part
        backends = str(dist.get_backend_config(group))
        if "gloo" not in backends and "nccl" not in backends:
            raise MissingSupport(
                f"TreeCommunicator got a group with backend {backends!r}, supported: gloo, nccl; "
                "make one with torch.distributed.new_group(backend='cpu:gloo,cuda:nccl')"
            )
        host = group
        if "gloo" not in backends:
            # without it there is nothing to tell the other ranks by
            if (problem := no_host_group(host_group, group)) is not None:
                raise problem
            host = host_group or dist.new_group(
                dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
            )
        gloo = GlooMover(host, dist.get_rank(host), world_size)
        try:
            said = str(identity), f"transport={transport!r}, two_shot_bytes={two_shot_bytes}"
            problem = unusable(transport, two_shot_bytes, timeout_s, identity, backends)
            problem = problem or no_host_group(host_group, group)
        except Exception as error:
            # peers are told of what can't even be shown, too
            said = "", ""
            problem = ContractError(f"TreeCommunicator got an argument that can't be read: {error!r}; give a plain one")
        check_alike(gloo, *said, problem)
        if world_size > 1:
            gloo.become()
        movers = choose(group, gloo, transport, timeout_s, with_nccl="nccl" in backends)
        self._assemble(rank, world_size, movers, two_shot_bytes)

    @classmethod
    def over(
        cls, movers: dict[str, Mover], rank: int, world_size: int, two_shot_bytes: int | None = None
    ) -> "TreeCommunicator":
        """A communicator over movers of your own, by device type: simulated ranks, another transport."""
        made = cls.__new__(cls)
        made._assemble(rank, world_size, movers, two_shot_bytes)
        return made

    def _assemble(self, rank: int, world_size: int, movers: dict[str, Mover], two_shot_bytes: int | None) -> None:
        self._begin(rank, world_size, movers)
        self.two_shot_bytes = two_shot_bytes
        self._handle = ops.register(self)

    @property
    def transport(self) -> str:
        """``gloo`` or ``shared_memory``: what moves the bytes of CPU tensors."""
        return self._movers["cpu"].name

    @property
    def device_transport(self) -> str:
        """What moves the bytes of GPU tensors: ``nccl``, ``nccl+peer_memory``, or ``staged-`` and the host's."""
        return self._movers["cuda"].name

    @told
    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tree sum of fp32 ``partial``, rounded once to ``out_dtype`` (default fp32); same bits on every rank.

        Raises:
            ContractError: on every rank, when a partial is no dense fp32 tensor, when ``out_dtype`` is none of fp32,
                bf16 and fp16, when the ranks' shapes or dtypes differ, or when one rank refuses its call.
            MissingSupport: on every rank, where all give a tensor that is neither on the CPU nor on a GPU.
        """
        if self.world_size == 1 or not fits_op(partial, out_dtype):
            call = self._call("all_reduce", partial, out_dtype)
            problem = unmovable(call, partial) or sum_problem("all_reduce", partial, out_dtype)
            self._refuse_alone(call, problem or self._undifferentiated("all_reduce", partial))
            return partial if out_dtype is None else partial.to(out_dtype)
        return torch.ops.rl_comm.all_reduce(partial, out_dtype or torch.float32, self._handle)

    @told
    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This rank's equal slice along ``dim`` of what ``all_reduce`` would give.

        Raises:
            ContractError: on every rank, as ``all_reduce``, and when ``dim`` is not divisible by the world size.
        """
        if self.world_size == 1 or not fits_op(partial, out_dtype, dim):
            call = self._call("reduce_scatter", partial, out_dtype, dim)
            problem = (
                unmovable(call, partial)
                or sum_problem("reduce_scatter", partial, out_dtype)
                or dim_problem(partial, dim)
            )
            self._refuse_alone(call, problem or self._undifferentiated("reduce_scatter", partial))
            return partial if out_dtype is None else partial.to(out_dtype)
        return torch.ops.rl_comm.reduce_scatter(partial, dim, out_dtype or torch.float32, self._handle)

    @told
    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        """Concatenate equal-shaped ``x`` of every rank along ``dim``, rank 0 first; bytes of ``header.DTYPES``.

        Raises:
            ContractError: on every rank, when shapes or dtypes differ, or when one rank refuses its call.
        """
        if self.world_size == 1 or not fits_op(x, None, dim):
            call = self._call("all_gather", x, arg=dim)
            problem = unmovable(call, x) or dim_problem(x, dim)
            self._refuse_alone(call, problem or self._undifferentiated("all_gather", x))
            return x
        return torch.ops.rl_comm.all_gather(x, dim, self._handle)

    def all_gather_said(self, x: torch.Tensor, said: str, *, dim: int = 0) -> torch.Tensor:
        """``all_gather`` for an operator that was given ``said``, compared over ranks in the header of this call.

        Traced by a compiler, or where ``said`` is empty, it is ``all_gather``, and fits whatever peers say. Between
        hosts with NCCL ``said`` is compared at the first call of a shape and type only.

        Raises:
            ContractError: on every rank, as ``all_gather``, when the ranks' ``said`` differ, where each names its own,
                and when that of one is no text.
        """
        if not isinstance(said, str):
            problem = ContractError(
                f"all_gather_said got said={shown(said)} (a {type(said).__name__}), supported: a text, empty to say "
                "nothing; rl_contract.communicator.said_of makes one"
            )
            self._refuse_alone(self._call("all_gather", x, arg=dim), problem)
        if not said or self.world_size == 1 or torch.compiler.is_compiling() or not fits_op(x, None, dim):
            return self.all_gather(x, dim=dim)
        return self._all_gather(x, dim, said)

    @in_step
    def all_gather_each(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``all_gather`` of each tensor along its first dimension, agreed on and launched as one call; no gradient.

        Args:
            tensors: a list of at least one, on one device; shapes and types may differ among them, not among ranks.

        Raises:
            ContractError: on every rank, when shapes, dtypes or numbers of tensors differ, or when one rank refuses
                its call.
            MissingSupport: on every rank, where all give tensors that are neither on the CPU nor on a GPU.
        """
        call, problem = self._several("all_gather", tensors)
        self._refuse(call, problem)
        if self.world_size == 1:
            return list(tensors)
        payloads = [row_major_bytes(x) for x in tensors]
        with named(call):
            rows = self._mover(tensors[0]).gather_each(call, payloads)
        self._record("all_gather", "bytes", tensors[0])
        return [
            part.reshape(-1).view(x.dtype).reshape(self.world_size * x.shape[0], *x.shape[1:])
            for part, x in zip(rows, tensors)
        ]

    @in_step
    def all_gather_into(self, wholes: Sequence[torch.Tensor]) -> None:
        """Fill the parts of peers in each tensor, in place, from their own; agreed on and launched as one call.

        Args:
            wholes: a list of at least one, on one device, contiguous; rank r's part are the r-th of ``world_size``
                equal runs of rows, of which this rank's own is sent and the others are overwritten.

        Raises:
            ContractError: on every rank, as ``all_gather_each``, and where a tensor is not contiguous or ranks do not
                divide its rows; nothing is written.
            MissingSupport: as ``all_gather_each``.
        """
        call, problem = self._several("all_gather_into", wholes)
        self._refuse(call, problem or parts_problem(wholes, self.world_size))
        if self.world_size > 1:
            rows = [row_major_bytes(x).view(self.world_size, x.nbytes // self.world_size) for x in wholes]
            with named(call):
                self._mover(wholes[0]).gather_into(call, rows)
            self._record("all_gather", "bytes", wholes[0])

    @in_step
    def broadcast(self, x: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """The bytes of rank ``source``'s ``x``, on every rank; ``x`` itself is not written."""
        call = self._call("broadcast", x, arg=source)
        problem = unmovable(call, x) or unreadable("broadcast", x)
        if not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < self.world_size:
            problem = ContractError(f"broadcast got source={shown(source)}, supported: 0..{self.world_size - 1}")
        self._refuse(call, problem)
        if self.world_size == 1:
            return x
        out = self._mover(x).broadcast(call, row_major_bytes(x), source)
        self._record("broadcast", "bytes", x)
        return out.view(x.dtype).reshape(x.shape)

    @in_step
    def barrier(self) -> None:
        """Return once every rank has come here."""
        if self.world_size > 1:
            nothing = torch.empty(0, dtype=torch.uint8)
            self._movers["cpu"].gather(self._call("barrier", nothing), nothing)

    @in_step
    def _all_reduce(self, partial: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        call = self._call("all_reduce", partial, out_dtype)
        problem = unmovable(call, partial) or sum_problem("all_reduce", partial, out_dtype)
        self._refuse(call, problem or self._misplaced(call, partial))
        if (moved := self._by_peers(call, partial, out_dtype)) is not None:
            return moved
        limit = TWO_SHOT_BYTES[partial.device.type] if self.two_shot_bytes is None else self.two_shot_bytes
        if partial.numel() * 4 < limit:
            out = tree_sum(self._gather(call, partial), out_dtype)
            self._record("all_reduce", "one-shot", partial)
            return out
        flat = partial.reshape(-1)
        width = -(-flat.numel() // self.world_size)
        if flat.numel() % self.world_size:
            flat = torch.nn.functional.pad(flat, (0, width * self.world_size - flat.numel()))
        mine = self._sum_slices(call, flat.view(self.world_size, width), out_dtype)
        out = self._gather(replace(self._call("all_gather", mine), agreed=True), mine).reshape(-1)
        self._record("all_reduce", "two-shot", partial)
        if partial.numel() < out.numel():
            # an output is its own tensor, never a view of a longer one
            out = out[: partial.numel()].clone()
        return out.view(partial.shape)

    def _by_peers(self, call: Call, partial: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor | None:
        """The sum through peer memory; None where it does not go that way."""
        mover = self._mover(partial)
        if not isinstance(mover, NcclMover) or mover.peers is None:
            return None
        steps = mover.peers.steps(partial.numel() * 4, self.two_shot_bytes)
        if not steps:
            return None
        sums = mover.peers.sum if steps == 1 else mover.peers.sum_in_steps
        out = sums(row_major_bytes(partial), out_dtype, lambda: mover.agree(call)).view(partial.shape)
        self._record("all_reduce", "one-shot" if steps == 1 else "two-shot", partial, mover.peers.name)
        return out

    @in_step
    def _reduce_scatter(self, partial: torch.Tensor, dim: int, out_dtype: torch.dtype) -> torch.Tensor:
        call = self._call("reduce_scatter", partial, out_dtype, dim)
        problem = (
            unmovable(call, partial) or sum_problem("reduce_scatter", partial, out_dtype) or dim_problem(partial, dim)
        )
        if problem is None and partial.shape[dim] % self.world_size:
            problem = ContractError(
                f"reduce_scatter got dimension {dim} of {partial.shape[dim]}, supported: a multiple of the world size "
                f"{self.world_size}; pad it"
            )
        self._refuse(call, problem)
        slices = (
            torch.stack(partial.chunk(self.world_size, dim))
            if dim not in (0, -partial.dim())
            else (partial.reshape(self.world_size, partial.shape[0] // self.world_size, *partial.shape[1:]))
        )
        out = self._sum_slices(call, slices.reshape(self.world_size, -1), out_dtype)
        self._record("reduce_scatter", "two-shot", partial)
        return out.view(slices.shape[1:])

    @in_step
    def _all_gather(self, x: torch.Tensor, dim: int, said: str = "") -> torch.Tensor:
        call = self._call("all_gather", x, arg=dim, operator=said)
        problem = unmovable(call, x) or dim_problem(x, dim) or self._misplaced(call, x)
        self._refuse(call, problem or (unreadable("all_gather", x) if said else None))
        with named(call) if said else nullcontext():
            parts = self._gather(call, x)
        peers = self._peers_for(x)
        self._record("all_gather", "bytes", x, "" if peers is None else peers.name)
        if dim in (0, -x.dim()):
            return parts.reshape(self.world_size * x.shape[0], *x.shape[1:])
        return torch.cat(list(parts), dim=dim)

    def _peers_for(self, x: torch.Tensor) -> PeerMemory | None:
        """What moves ``x`` through peer memory, if that is how it goes."""
        mover = self._mover(x)
        return mover.peers_for(x.nbytes) if isinstance(mover, NcclMover) else None

    def _misplaced(self, call: Call, x: torch.Tensor) -> Exception | None:
        mover = self._mover(x)
        return mover.misplaced(call, x) if isinstance(mover, NcclMover) else None

    def _gather(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """[world_size, *x.shape]"""
        return self._rows(self._mover(x).gather(call, row_major_bytes(x)), x)

    def _rows(self, gathered: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """uint8 [world_size, n] -> [world_size, *x.shape]"""
        # flat, since rows of nothing have strides that no other type can view
        return gathered.contiguous().reshape(-1).view(x.dtype).reshape(self.world_size, *x.shape)

    def _sum_slices(self, call: Call, slices: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """slices fp32 [world_size, n] -> the tree sum of everyone's row ``rank``, [n]"""
        rows = self._mover(slices).scatter(call, row_major_bytes(slices).view(self.world_size, slices.shape[1] * 4))
        return tree_sum(self._rows(rows, slices[0]), out_dtype)
