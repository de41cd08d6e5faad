"""Process groups of one trainer: Megatron's parallel state over torch.distributed, and a communicator per group."""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_comm import TreeCommunicator
from rl_contract import Communicator, ContractError, MissingSupport, SingleRank
from rl_contract.checks import whole_number
from rl_megatron import checks, rendezvous, tokens
from rl_megatron.config import ParallelConfig
from rl_megatron.cpu_device import device as current_device
from rl_megatron.cpu_device import use as use_device

T = TypeVar("T")

# of one exchange before a call: whether this rank refuses it, and digests of what it was given
_WORDS = 16

_communicators: dict[int, tuple[object, Communicator]] = {}
# by id of the world's group: that, and one that moves CPU tensors
_host_groups: dict[int, tuple[object, Any]] = {}
# the world's group, where ``start`` has made it
_made: list[object] = []


def communicator(group: "dist.ProcessGroup | None") -> Communicator:
    """The communicator of a process group, made once per group; a world of one needs no group.

    It waits for a peer as long as the group does, whatever moves its bytes.
    """
    if group is None or group.size() == 1:
        return SingleRank()
    held = _communicators.get(id(group))
    if held is None or held[0] is not group:
        timeout = _timeout(group)
        options: dict[str, Any] = {}
        if timeout is not None:
            # to torch, none is no limit
            options["timeout_s"] = timeout.total_seconds() or math.inf
        if "gloo" not in str(dist.get_backend_config(group)):
            members = dist.get_process_group_ranks(group)
            options["host_group"] = dist.new_group(
                members, backend="gloo", timeout=timeout, use_local_synchronization=True
            )
        held = (group, TreeCommunicator(group, **options))
        _communicators[id(group)] = held
    return held[1]


def tensor_parallel() -> Communicator:
    """Peers that hold other heads and vocabulary rows of the same tokens."""
    return communicator(parallel_state.get_tensor_model_parallel_group())


def context_parallel() -> Communicator:
    """Peers that hold other tokens of the same sequences."""
    return communicator(parallel_state.get_context_parallel_group())


def native_sum_(x: torch.Tensor, group: "dist.ProcessGroup") -> None:
    """Sum ``x`` over a group's ranks in place, as an engine of its own would: by NCCL where that is there.

    For the native arm alone: the order of addition is NCCL's; elsewhere it is the rank tree's.
    """
    comm = communicator(group)
    if x.is_cuda and isinstance(comm, TreeCommunicator) and comm.device_transport.startswith("nccl"):
        dist.all_reduce(x, group=group)
    elif comm.world_size > 1:
        x.copy_(comm.all_reduce(x))


def start(
    rank: int,
    parallel: ParallelConfig,
    init_method: str,
    *,
    device: str | torch.device = "cpu",
    share_gpu: bool = False,
) -> None:
    """Join the process group, unless this process has joined one, and build Megatron's parallel state.

    Args:
        rank: this process, 0 to ``parallel.world_size - 1``; tensor parallel ranks are neighbours.
        init_method: a torch.distributed URL, ``tcp://host:port`` or ``file:///path``.
        device: ``cpu``, ``cuda`` (the rank-th GPU this process sees, or the only one) or ``cuda:N``.
        share_gpu: let several ranks use one GPU. NCCL can't, so bytes then move through the host, which is slow.

    In a group that this process has joined before, every rank must call it: what one rank refuses, all of them refuse,
    naming the rank, before anything is made. Nothing made of that group waits longer than the group itself would.

    Raises:
        ContractError: an argument that is none of its kind, an ``init_method`` at which ranks can't meet, the rank is
            outside the world, this process has joined a group as another rank or of another size, another parallel
            state is alive in it; on every rank, ranks of another cut, kind of device or ``share_gpu``, or two that have
            one GPU without it.
        MissingSupport: a device that is not there.
        RuntimeError: a rank of a group that was joined before did not call it within the group's timeout.
    """

    def check() -> torch.device:
        problems = [
            checks.instance_problem("parallel", parallel, ParallelConfig),
            None if whole_number(rank) else f"rank={rank!r:.80}, supported: an integer",
            rendezvous.url_problem("init_method", init_method),
            checks.instance_problem("share_gpu", share_gpu, bool),
        ]
        if found := [problem for problem in problems if problem]:
            raise ContractError(f"topology.start: {'; '.join(found)}")
        if not 0 <= rank < parallel.world_size:
            raise ContractError(
                f"rank {rank} with tp={parallel.tp} and cp={parallel.cp}; supported: 0 to {parallel.world_size - 1}"
            )
        place = _resolve(device, rank, parallel.world_size)
        _check_process(rank, parallel)
        # last, since it makes a file
        if not joined and (problem := rendezvous.place_problem("init_method", init_method, parallel.world_size)):
            raise ContractError(f"topology.start: {problem}")
        return place

    joined = dist.is_initialized()
    place = together(check, lambda _: {"call": b"topology.start"})
    try:
        together(lambda: _take(place))
        if not joined:
            _join(rank, parallel.world_size, init_method, nccl=place.type == "cuda" and not share_gpu)
        agree({"parallel": parallel, "device": place.type, "share_gpu": share_gpu})
        if place.type == "cuda" and not share_gpu and parallel.world_size > 1:
            _refuse_one_gpu_for_two(place)
        options: dict[str, Any] = {"create_gloo_process_groups": False}
        if (timeout := _timeout(dist.group.WORLD)) is not None:
            options["distributed_timeout_minutes"] = timeout / timedelta(minutes=1)
        known = inspect.signature(parallel_state.initialize_model_parallel).parameters
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            context_parallel_size=parallel.cp,
            **{name: value for name, value in options.items() if name in known},
        )
    except BaseException:
        stop()
        raise


def _check_process(rank: int, parallel: ParallelConfig) -> None:
    """Raise for what this process has joined or made before, if that does not fit."""
    if dist.is_initialized() and (joined := (dist.get_rank(), dist.get_world_size())) != (rank, parallel.world_size):
        raise ContractError(
            f"topology.start got rank {rank} of {parallel.world_size} (tp={parallel.tp}, cp={parallel.cp}), but this "
            f"process has joined a process group as rank {joined[0]} of {joined[1]}; supported: the same, or a process "
            "that has joined none"
        )
    if parallel_state.model_parallel_is_initialized():
        raise ContractError(
            "this process already holds a Megatron parallel state; call topology.stop() or use a fresh process"
        )


def _take(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.set_device(place)
    use_device(place)


def _join(rank: int, world_size: int, init_method: str, *, nccl: bool) -> None:
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    try:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:
        raise ContractError(
            f"rank {rank} of {world_size} could not join its peers by init_method={init_method!r:.200} ({error}); give "
            f"all ranks one URL that each of them reaches{rendezvous.fresh(init_method)}, and start them together"
        ) from error
    _made[:] = [dist.group.WORLD]


def transports() -> dict[str, str]:
    """What moves the bytes of each group, on this device; a world of one moves none."""
    on_gpu = current_device().type == "cuda"
    return {
        name: comm.device_transport if on_gpu else comm.transport
        for name, comm in (("tp", tensor_parallel()), ("cp", context_parallel()))
        if isinstance(comm, TreeCommunicator)
    }


def _host_group() -> Any:
    """A group of the whole world for what the host agrees on: the world's own, or one of gloo beside one of NCCL alone,
    made at the first call, which all ranks make."""
    world = dist.group.WORLD
    held = _host_groups.get(id(world))
    if held is None or held[0] is not world:
        has_gloo = "gloo" in str(dist.get_backend_config(world))
        group = world if has_gloo else dist.new_group(backend="gloo", timeout=_timeout(world))
        _host_groups.clear()
        held = _host_groups[id(world)] = (world, group)
    return held[1]


def _timeout(group: Any) -> timedelta | None:
    """How long a call of a group waits for a peer; None where its backend does not say."""
    found: list[timedelta] = []
    # torch has no public way to ask
    with suppress(AttributeError, RuntimeError):
        found = [group._get_backend(kind).options._timeout for kind in group._device_types]
    return min(found, default=None)


def ranks() -> int:
    """Of the world; 1 where none has been joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(what: Mapping[str, object]) -> None:
    """Compare ``what`` over all ranks of the world, on the host.

    Raises:
        ContractError: on every rank, naming the first rank that differs, and in what.
    """
    if ranks() == 1:
        return
    everyone: list[Any] = [None] * ranks()
    dist.all_gather_object(everyone, dict(what), group=_host_group())
    problems = [
        f"rank {rank} has {name}={theirs.get(name)!r}, rank 0 {everyone[0].get(name)!r}"
        for rank, theirs in enumerate(everyone)
        for name in sorted(everyone[0].keys() | theirs.keys())
        if theirs.get(name) != everyone[0].get(name)
    ]
    if problems:
        raise ContractError(f"ranks of one trainer differ: {'; '.join(problems[:8])}; start all ranks alike")


def together(prepare: Callable[[], T], given: Callable[[T], Mapping[str, bytes]] | None = None) -> T:
    """What ``prepare`` returns, once it has returned on every rank of the world, so that no rank waits for one that
    refuses; agreed on the host, by a few numbers unless a rank refuses.

    Args:
        given: what all ranks must have alike, of what ``prepare`` returned, by name; the first is the call.

    Raises:
        ContractError: on the ranks that were ready, naming the first one that was not, and why, there its own error; or
            on all ranks, naming the first one that has something else than rank 0.
    """
    if ranks() == 1:
        return prepare()
    error: Exception | None = None
    row, names = [1], []
    try:
        out = prepare()
        held = {} if given is None else given(out)
        names = list(held)
        row = [0, *map(_digest, held.values())]
    except Exception as caught:
        error = caught
    rows = _gathered(row)
    if any(theirs[0] for theirs in rows):
        everyone: list[Any] = [None] * len(rows)
        refusal = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(everyone, refusal, group=_host_group())
        if error is not None:
            raise error
        rank, said = next((rank, said) for rank, said in enumerate(everyone) if said is not None)
        raise ContractError(f"rank {rank} refuses this call, which all ranks make together: {said}")
    for rank, theirs in enumerate(rows):
        other = [name for name, mine, first in zip(names, theirs[1:], rows[0][1:]) if mine != first]
        if other:
            # numbers of another call mean something else
            said = ", ".join(other[:1] if other[0] == names[0] else other)
            raise ContractError(
                f"rank {rank} has other {said} than rank 0; every rank makes the same calls with the same arguments, "
                "in the same order; nothing was computed"
            )
    return out


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _gathered(row: list[int]) -> list[list[int]]:
    """Every rank's row of up to ``_WORDS`` integers."""
    mine = torch.tensor(row + [0] * (_WORDS - len(row)))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(rows, mine, group=_host_group())
    except RuntimeError as error:
        raise RuntimeError(
            f"not all {dist.get_world_size()} ranks made this call ({error}); every rank must make every call; look at "
            "what the others do instead, and restart the group"
        ) from error
    return [theirs.tolist() for theirs in rows]


def stop() -> None:
    """Leave the parallel state, and the process group if ``start`` has made it; safe to call twice."""
    _communicators.clear()
    # the last batch holds a communicator, and after a failed backward gradients too
    tokens.enter(None)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    _leave_world()


def _leave_world() -> None:
    """A group that the caller has made stays."""
    if dist.is_initialized() and any(made is dist.group.WORLD for made in _made):
        dist.destroy_process_group()
    # beside a group that stays it stays too: a rank that stopped would make another, which its peers would not
    if not dist.is_initialized():
        _host_groups.clear()
    _made.clear()
    use_device(torch.device("cpu"))


def _resolve(device: str | torch.device, rank: int, world_size: int) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ContractError(f"device={device!r}; supported: 'cpu', 'cuda', 'cuda:N'") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise ContractError(f"device={device!r}; supported: 'cpu', 'cuda', 'cuda:N'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise MissingSupport(f"device={device!r}, but torch sees no GPU; use device='cpu' or a machine with one")
    if place.index is None:
        # a launcher may show each process one GPU only
        place = torch.device("cuda", rank if count >= world_size else rank % count)
    if place.index >= count:
        raise MissingSupport(f"device={str(place)!r}, torch sees {count} GPU(s); use cuda:0 to cuda:{count - 1}")
    return place


def _refuse_one_gpu_for_two(place: torch.device) -> None:
    mine = str(getattr(torch.cuda.get_device_properties(place), "uuid", place))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=_host_group())
    for rank, found in enumerate(everyone):
        first = everyone.index(found)
        if first != rank:
            raise ContractError(
                f"ranks {first} and {rank} have one GPU ({found}); give each rank its own, or share_gpu=True, "
                "which moves bytes through the host"
            )
