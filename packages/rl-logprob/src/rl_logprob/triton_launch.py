"""Launches that skip Triton's look at every argument where an equal launch came before.

A compiled kernel follows from the constants, the options, the types of the arguments, and from which pointers and
integers are multiples of 16 and which integers are 1. With few rows the host is what a call waits for, and finding this
out once more takes longer than the launch.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_contract.triton_launch import at, keep, launcher, without_base

# AMD's compiler also asks how large a tensor is
_HIP = torch.version.hip is not None
_compiled: dict[tuple[Any, ...], Callable[..., None]] = {}
_descriptors: dict[tuple[Any, ...], Any] = {}


def descriptor(x: Tensor, block: list[int]) -> Any:
    """``TensorDescriptor.from_tensor(x, block)``, whose checks are made once for tensors that look alike.

    x: at a multiple of 16 bytes.
    """
    key = (x.shape, x.stride(), x.dtype, *block)
    found = _descriptors.get(key)
    if found is None:
        made = TensorDescriptor.from_tensor(x, block)
        keep(_descriptors, key, without_base(made))
        return made
    return at(found, x)


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
    """``kernel[grid](*args, **constants, **options)``; ``constants`` are the last parameters, in their order."""
    if _HIP or not isinstance(kernel, triton.JITFunction):
        kernel[grid](*args, **constants, **options)
        return
    addresses, integers = 0, 0
    kinds: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            addresses |= value.data_ptr()
            kinds.append(value.dtype)
        elif isinstance(value, int):
            integers |= value
            kinds.append(1 if value == 1 else 0 if value & 15 else 16)
        else:
            # a descriptor, whose block is given by the constants
            kinds.append(value.base.dtype)
    # negative integers, and those beyond 31 bits, may have another type
    if addresses & 15 or integers >> 31:
        kernel[grid](*args, **constants, **options)
        return
    values = tuple(constants.values())
    device = driver.active.get_current_device()
    key = (kernel.fn, device, *kinds, values, *options.values())
    found = _compiled.get(key)
    if found is not None:
        found(grid, device, *args, *values)
        return
    if kernel.arg_names[len(args) :] != list(constants):
        raise TypeError(
            f"{kernel.__name__} takes {kernel.arg_names}; got {len(args)} arguments, then {list(constants)}"
        )
    compiled = kernel[grid](*args, **constants, **options)
    if isinstance(compiled, CompiledKernel):
        _compiled[key] = launcher(compiled)
