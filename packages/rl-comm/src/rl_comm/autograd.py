"""Autograd wrappers for tensor parallelism. Each states both directions; autograd adds no collective of its own.

With ``comm`` None or a world of one, each is the identity.
"""

from typing import Any

import torch

from rl_contract import Communicator
from rl_contract.communicator import dim_problem, refuse, tensor_problem
from rl_contract.tokens import check_peers


def copy_to_ranks(x: torch.Tensor, comm: Communicator | None) -> torch.Tensor:
    """The same ``x`` on every rank. Backward: the ranks' gradients, summed in fp32 by the tree, rounded once."""
    check_peers("copy_to_ranks", comm)
    return x if comm is None or comm.world_size == 1 else _told(_CopyToRanks, x, comm)


def gather_from_ranks(x: torch.Tensor, comm: Communicator | None, dim: int = -1) -> torch.Tensor:
    """Concatenate the ranks' ``x`` along ``dim``. Backward: this rank's slice of the gradient.

    What follows must be computed alike on every rank, so that each already holds the whole gradient and no sum is due.
    """
    check_peers("gather_from_ranks", comm)
    if comm is None or comm.world_size == 1:
        problem = dim_problem(x, dim)
        if problem is not None:
            raise problem
        return x
    return _told(_GatherFromRanks, x, comm, dim)


def reduce_from_ranks(x: torch.Tensor, comm: Communicator | None) -> torch.Tensor:
    """Tree sum of the ranks' ``x`` in fp32, rounded once to its type. Backward: the gradient as it is."""
    check_peers("reduce_from_ranks", comm)
    return x if comm is None or comm.world_size == 1 else _told(_ReduceFromRanks, x, comm)


def _told(function: Any, x: torch.Tensor, comm: Communicator, *rest: int) -> torch.Tensor:
    """Peers learn of what ends this before it is a call of ``comm``, too."""
    try:
        if function is _CopyToRanks and (problem := tensor_problem("copy_to_ranks", x)) is not None:
            raise problem
        out: torch.Tensor = function.apply(x, comm, *rest)
        return out
    except Exception as problem:
        refuse(problem, comm, given=(x,))
        raise


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.comm.all_reduce(grad.float(), out_dtype=grad.dtype), None


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
        whole = comm.all_gather(x, dim=dim)
        ctx.comm, ctx.dim, ctx.width = comm, dim, x.shape[dim]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad.narrow(ctx.dim, ctx.comm.rank * ctx.width, ctx.width).contiguous(), None, None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        # what can't be summed goes on as it is: the communicator refuses it in step with its peers
        dense = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.is_floating_point()
        return comm.all_reduce(x.float() if dense else x, out_dtype=x.dtype if dense else None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None
