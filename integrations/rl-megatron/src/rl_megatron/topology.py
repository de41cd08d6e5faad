"""Process groups of one trainer: Megatron's parallel state over torch.distributed, and a communicator per group."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_comm import TreeCommunicator
from rl_contract import Communicator, ContractError, SingleRank
from rl_megatron.config import ParallelConfig

_communicators: dict[int, tuple[object, Communicator]] = {}


def communicator(group: "dist.ProcessGroup | None") -> Communicator:
    """The communicator of a process group, made once per group; a world of one needs no group."""
    if group is None or group.size() == 1:
        return SingleRank()
    held = _communicators.get(id(group))
    if held is None or held[0] is not group:
        held = (group, TreeCommunicator(group))
        _communicators[id(group)] = held
    return held[1]


def tensor_parallel() -> Communicator:
    """Peers that hold other heads and vocabulary rows of the same tokens."""
    return communicator(parallel_state.get_tensor_model_parallel_group())


def context_parallel() -> Communicator:
    """Peers that hold other tokens of the same sequences."""
    return communicator(parallel_state.get_context_parallel_group())


def start(rank: int, parallel: ParallelConfig, init_method: str) -> None:
    """Join the process group and build Megatron's parallel state.

    Args:
        rank: this process, 0 to ``parallel.world_size - 1``; tensor parallel ranks are neighbours.
        init_method: a torch.distributed URL, ``tcp://host:port`` or ``file:///path``.

    Raises:
        ContractError: the rank is outside the world, or another parallel state is alive in this process.
    """
    if not 0 <= rank < parallel.world_size:
        raise ContractError(
            f"rank {rank} with tp={parallel.tp} and cp={parallel.cp}; supported: 0 to {parallel.world_size - 1}"
        )
    if parallel_state.model_parallel_is_initialized():
        raise ContractError(
            "this process already holds a Megatron parallel state; call topology.stop() or use a fresh process"
        )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=parallel.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        create_gloo_process_groups=False,
    )


def stop() -> None:
    """Leave the parallel state and the process group; safe to call twice."""
    _communicators.clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
