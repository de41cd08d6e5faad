"""What a communicator refuses: of its arguments when it is made, and of tensors when it is called."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from rl_comm.header import DEVICES, DTYPES, MAX_DIMS, Call
from rl_contract import ContractError, MissingSupport
from rl_contract.checks import shown, whole_number
from rl_contract.communicator import dim_problem, tensor_problem

TRANSPORTS = ("auto", "gloo", "shared_memory", "nccl", "peer_memory")


def stored(x: Any) -> bool:
    """Whether ``x`` is a tensor whose elements lie in its own memory; what stands for one while compiling is, too.

    Subclasses that answer operators themselves hold other tensors, or none: nested, distributed and fake ones.
    """
    return isinstance(x, torch.Tensor) and (
        torch.compiler.is_compiling()
        or (not is_lazy(x) and not x.is_nested and type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
    )


def _traced() -> bool:
    """Whether someone watches or traces operators, who sees them called with stand-ins of his own."""
    return bool(torch._C._len_torch_dispatch_stack())


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
        and (
            # a compiler would refuse it alone, before the ranks have met
            not (torch.is_grad_enabled() and x.requires_grad)
            if torch.compiler.is_compiling()
            else (stored(x) or _traced()) and differentiated("", x) is None
        )
    )


def differentiated(op: str, x: Any) -> Exception | None:
    """Why an op can't be called for ``x``: none of the collectives has a gradient."""
    if not isinstance(x, torch.Tensor):
        return None
    tangents = forward_ad._current_level >= 0
    if tangents or (torch.is_grad_enabled() and (x.requires_grad or torch._C._functorch.is_gradtrackingtensor(x))):
        return ContractError(
            f"{op} got {'called under forward-mode differentiation' if tangents else 'a tensor that requires grad'}, "
            "and has no gradient; supported: under torch.no_grad(), or copy_to_ranks, gather_from_ranks and "
            "reduce_from_ranks, which have"
        )
    return None


def unmovable(call: Call, x: torch.Tensor) -> Exception | None:
    if (problem := tensor_problem(call.op, x)) is not None:
        return problem
    if not stored(x) and not _traced():
        return _stands_for_one(call.op, x)
    if x.dtype not in DTYPES or x.dim() > MAX_DIMS:
        return ContractError(f"{call.op} got {x.dtype} in {x.dim()} dimensions, supported: {DTYPES}, up to {MAX_DIMS}")
    if call.device not in DEVICES:
        return MissingSupport(f"{call.op} got a tensor on {call.device}, supported: {DEVICES}; move it to one of these")
    return None


def unreadable(op: str, x: Any) -> Exception | None:
    """Why the bytes of ``x`` can't be read, for calls that no tracer sees as an operator."""
    if not isinstance(x, torch.Tensor) or (stored(x) and not torch._C._functorch.is_functorch_wrapped_tensor(x)):
        return None
    return _stands_for_one(op, x)


def _stands_for_one(op: str, x: torch.Tensor) -> ContractError:
    kind = type(x).__name__ if not stored(x) else "tensor of a torch.func transform"
    return ContractError(
        f"{op} got a {kind}, supported: a torch.Tensor whose elements lie in its own memory; call it outside of "
        "tracing and transforms, with what it holds"
    )


def list_problem(tensors: Any) -> Exception | None:
    if isinstance(tensors, Sequence):
        return None
    return ContractError(f"a gather of several tensors got {type(tensors).__name__}, supported: a list of tensors")


def each_problem(calls: list[Call], tensors: list[torch.Tensor]) -> Exception | None:
    if not tensors:
        return ContractError("a gather of several tensors got none, supported: at least one")
    problems = [unmovable(call, x) or unreadable(call.op, x) or dim_problem(x, 0) for call, x in zip(calls, tensors)]
    if len({call.device for call in calls}) > 1:
        problems.append(
            ContractError("a gather of several tensors got them on several devices, supported: one; move them")
        )
    return next((problem for problem in problems if problem is not None), None)


def parts_problem(wholes: Sequence[torch.Tensor], world_size: int) -> Exception | None:
    odd = next((x for x in wholes if not x.is_contiguous() or len(x) % world_size), None)
    if odd is not None:
        return ContractError(
            f"all_gather_into got a tensor {tuple(odd.shape)} with strides {odd.stride()}, supported: contiguous, with "
            f"rows that {world_size} ranks divide; gather the parts instead"
        )
    if any(x.is_neg() or x.is_conj() for x in wholes):
        return ContractError(
            "all_gather_into got a tensor that is negated or conjugated lazily, supported: one whose memory holds its "
            "values; call resolve_neg() or resolve_conj() and keep what it returns"
        )
    if any(x.is_inference() for x in wholes) and not torch.is_inference_mode_enabled():
        return ContractError(
            "all_gather_into got a tensor made under torch.inference_mode(), supported: one that may be written to; "
            "call it under torch.inference_mode()"
        )
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, at) for at, x in enumerate(wholes) if x.nbytes)
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            return ContractError(
                f"all_gather_into got tensors {sorted((first, second))} of the list in the same memory, supported: "
                "tensors that share none, since each is written to; gather them one after the other"
            )
    return None


def no_group(name: str, group: Any) -> Exception | None:
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    return ContractError(
        f"{name}={shown(group)}; supported: None, or a process group, as torch.distributed.new_group and a mesh's "
        "get_group return it"
    )


def no_host_group(host_group: Any, group: Any) -> Exception | None:
    """Why ``host_group`` can't speak for the ranks of ``group``, in whose order all are counted."""
    if host_group is None:
        return None
    if (problem := no_group("host_group", host_group)) is not None:
        return problem
    wanted = dist.get_process_group_ranks(group)
    member = host_group is not dist.GroupMember.NON_GROUP_MEMBER
    ranks = dist.get_process_group_ranks(host_group) if member else "without this process"
    backends = str(dist.get_backend_config(host_group)) if member else ""
    if ranks == wanted and "gloo" in backends:
        return None
    return ContractError(
        f"host_group={ranks} with backend {backends!r}; supported: None, or a gloo group of group's ranks, {wanted}"
    )


def unusable(transport: Any, two_shot_bytes: Any, timeout_s: Any, identity: Any, backends: str) -> Exception | None:
    """Why a communicator can't be made of these."""
    if not isinstance(transport, str) or transport not in TRANSPORTS:
        return ContractError(f"transport={shown(transport)}; supported: {TRANSPORTS}")
    if transport in ("nccl", "peer_memory") and "nccl" not in backends:
        return MissingSupport(
            f"transport={transport!r} got a group with backend {backends!r}; make one with backend='cpu:gloo,cuda:nccl'"
        )
    if two_shot_bytes is not None and (not whole_number(two_shot_bytes) or two_shot_bytes < 0):
        return ContractError(
            f"two_shot_bytes={shown(two_shot_bytes)}; supported: None or an integer of 0 or more bytes"
        )
    if not (whole_number(timeout_s) or isinstance(timeout_s, float)) or not timeout_s > 0:
        return ContractError(f"timeout_s={shown(timeout_s)}; supported: seconds, more than 0")
    if not isinstance(identity, str):
        return ContractError(f"identity={shown(identity)}; supported: str")
    return None
