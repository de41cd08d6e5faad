"""The collectives as operators of the dispatcher, which a compiler sees as one node each; a number names the group."""

import itertools
import weakref
from typing import Protocol

import torch

from rl_contract import ContractError
from rl_contract.opaque import opaque_op


class Collectives(Protocol):
    """What the operators call, of a ``TreeCommunicator``."""

    world_size: int

    def _all_reduce(self, partial: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor: ...

    def _reduce_scatter(self, partial: torch.Tensor, dim: int, out_dtype: torch.dtype) -> torch.Tensor: ...

    def _all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...


_live: weakref.WeakValueDictionary[int, Collectives] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register(comm: Collectives) -> int:
    """The number by which operators find ``comm``, for as long as someone else keeps it."""
    handle = next(_handles)
    _live[handle] = comm
    return handle


def _communicator(handle: int) -> Collectives:
    # a compiler that has seen two communicators hands in a symbol
    comm = _live.get(int(handle))
    if comm is None:
        raise ContractError(f"communicator {handle} no longer exists; keep the TreeCommunicator alive while it is used")
    return comm


@opaque_op("rl_comm::all_reduce", device_type=None)
def _all_reduce_op(partial: torch.Tensor, out_dtype: torch.dtype, handle: int) -> torch.Tensor:
    return _communicator(handle)._all_reduce(partial, out_dtype)


@_all_reduce_op.register_fake
def _(partial: torch.Tensor, out_dtype: torch.dtype, handle: int) -> torch.Tensor:
    return torch.empty_like(partial, dtype=out_dtype, memory_format=torch.contiguous_format)


@opaque_op("rl_comm::reduce_scatter", device_type=None)
def _reduce_scatter_op(partial: torch.Tensor, dim: int, out_dtype: torch.dtype, handle: int) -> torch.Tensor:
    return _communicator(handle)._reduce_scatter(partial, dim, out_dtype)


@_reduce_scatter_op.register_fake
def _(partial: torch.Tensor, dim: int, out_dtype: torch.dtype, handle: int) -> torch.Tensor:
    shape = list(partial.shape)
    # the op itself refuses such a dim, in step with its peers; a compiler must not do so before
    if -len(shape) <= dim < len(shape):
        shape[dim] //= _communicator(handle).world_size
    return partial.new_empty(shape, dtype=out_dtype)


@opaque_op("rl_comm::all_gather", device_type=None)
def _all_gather_op(x: torch.Tensor, dim: int, handle: int) -> torch.Tensor:
    return _communicator(handle)._all_gather(x, dim)


@_all_gather_op.register_fake
def _(x: torch.Tensor, dim: int, handle: int) -> torch.Tensor:
    shape = list(x.shape)
    if -len(shape) <= dim < len(shape):
        shape[dim] *= _communicator(handle).world_size
    return x.new_empty(shape)
