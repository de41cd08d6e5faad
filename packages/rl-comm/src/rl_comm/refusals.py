"""What a communicator refuses: of its arguments when it is made, and of tensors when it is called."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rl_comm.mover import DEVICES, DTYPES, MAX_DIMS, Call
from rl_contract import ContractError, MissingSupport
from rl_contract.checks import whole_number
from rl_contract.communicator import dim_problem, tensor_problem

TRANSPORTS = ("auto", "gloo", "shared_memory", "nccl", "peer_memory")


def fits_op(x: Any, out_dtype: Any, dim: Any = 0) -> bool:
    """Whether a registered op takes these at all; it checks the rest itself, in step with its peers."""
    return (
        isinstance(x, torch.Tensor)
        and x.layout == torch.strided
        and x.device.type in DEVICES
        and (out_dtype is None or isinstance(out_dtype, torch.dtype))
        and isinstance(dim, int)
        and not isinstance(dim, bool)
        and abs(dim) < 1 << 62
    )


def unmovable(call: Call, x: torch.Tensor) -> Exception | None:
    if (problem := tensor_problem(call.op, x)) is not None:
        return problem
    if x.dtype not in DTYPES or x.dim() > MAX_DIMS:
        return ContractError(f"{call.op} got {x.dtype} in {x.dim()} dimensions, supported: {DTYPES}, up to {MAX_DIMS}")
    if call.device not in DEVICES:
        return MissingSupport(f"{call.op} got a tensor on {call.device}, supported: {DEVICES}; move it to one of these")
    return None


def list_problem(tensors: Any) -> Exception | None:
    if isinstance(tensors, Sequence):
        return None
    return ContractError(f"a gather of several tensors got {type(tensors).__name__}, supported: a list of tensors")


def each_problem(calls: list[Call], tensors: list[torch.Tensor]) -> Exception | None:
    if not tensors:
        return ContractError("a gather of several tensors got none, supported: at least one")
    problems = [unmovable(call, x) or dim_problem(x, 0) for call, x in zip(calls, tensors)]
    if len({call.device for call in calls}) > 1:
        problems.append(
            ContractError("a gather of several tensors got them on several devices, supported: one; move them")
        )
    return next((problem for problem in problems if problem is not None), None)


def parts_problem(wholes: Sequence[torch.Tensor], world_size: int) -> Exception | None:
    odd = next((x for x in wholes if not x.is_contiguous() or len(x) % world_size), None)
    if odd is None:
        return None
    return ContractError(
        f"all_gather_into got a tensor {tuple(odd.shape)} with strides {odd.stride()}, supported: contiguous, with "
        f"rows that {world_size} ranks divide; gather the parts instead"
    )


def no_group(host_group: Any) -> Exception | None:
    if host_group is None or isinstance(host_group, dist.ProcessGroup):
        return None
    return ContractError(f"host_group={host_group!r}; supported: None, or a gloo process group of the same ranks")


def unusable(transport: Any, two_shot_bytes: Any, timeout_s: Any, identity: Any, backends: str) -> Exception | None:
    """Why a communicator can't be made of these."""
    if transport not in TRANSPORTS:
        return ContractError(f"transport={transport!r}; supported: {TRANSPORTS}")
    if transport in ("nccl", "peer_memory") and "nccl" not in backends:
        return MissingSupport(
            f"transport={transport!r} got a group with backend {backends!r}; make one with backend='cpu:gloo,cuda:nccl'"
        )
    if two_shot_bytes is not None and (not whole_number(two_shot_bytes) or two_shot_bytes < 0):
        return ContractError(f"two_shot_bytes={two_shot_bytes!r}; supported: None or an integer of 0 or more bytes")
    if not (whole_number(timeout_s) or isinstance(timeout_s, float)) or not timeout_s > 0:
        return ContractError(f"timeout_s={timeout_s!r}; supported: seconds, more than 0")
    if not isinstance(identity, str):
        return ContractError(f"identity={identity!r}; supported: str")
    return None
