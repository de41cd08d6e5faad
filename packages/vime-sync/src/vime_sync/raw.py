"""A tensor's bytes, and threads that go over those of many tensors."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from rl_contract import ContractError, MissingSupport
from rl_contract.checks import tensor_problem
from rl_contract.devices import row_major_bytes

K = TypeVar("K")
T = TypeVar("T")

# torch does not copy them, and so cannot put them in order
_BELOW_A_BYTE = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}


def bytes_problem(tensor: object) -> str | None:
    """What this is in place of a tensor whose bytes can be read, and what to do; None where it is one."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}; supported: a torch.Tensor, give one"
    if tensor.is_meta:
        return "a meta tensor, which has no bytes; supported: the materialised tensor, give that"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.dtype in _BELOW_A_BYTE:
        strange = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else ""
        kind = strange or str(tensor.dtype if tensor.dtype in _BELOW_A_BYTE else tensor.layout)
        return f"{kind}, which has no row-major bytes; supported: a strided tensor, give one"
    return tensor_problem("it", tensor)


def flat_bytes(name: object, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order as uint8 [n]: a view where it is contiguous, else a copy.

    Raises:
        ContractError: what is no tensor, or has no bytes to read: meta, sparse, quantized, nested, uninitialized,
            integers of fewer than eight bits, and a tensor whose memory was given back.
        MissingSupport: a device other than CPU and CUDA (ROCm).
    """
    if problem := bytes_problem(tensor):
        raise ContractError(f"{name} is {problem}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise MissingSupport(f"{name} is on {tensor.device}; supported: cpu, cuda (also ROCm); copy it to the host")
    return row_major_bytes(tensor)


def default_threads() -> int:
    """Two, up to sixteen where this process may use so many cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(16, cores))


def map_tensors(
    function: Callable[[torch.Tensor], T], tensors: Iterable[tuple[K, torch.Tensor]], *, threads: int | None = None
) -> Iterator[tuple[K, T]]:
    """``(key, function(tensor))`` in the order given; sha256 releases the interpreter, so threads use the cores.

    At most ``2 * threads`` tensors are held at a time, however long ``tensors`` is.
    """
    threads = threads or default_threads()
    pending: deque[tuple[K, Future[T]]] = deque()
    with ThreadPoolExecutor(max_workers=threads) as pool:
        for key, tensor in tensors:
            pending.append((key, pool.submit(function, tensor)))
            if len(pending) >= 2 * threads:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
