"""Launches that skip Triton's look at every argument where an equal launch came before.

A compiled kernel follows from the constants, the options, the types of the arguments, and from which pointers and
integers are multiples of 16 and which integers are 1. With few rows the host is what a call waits for, and finding this
out once more takes longer than the launch.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

# AMD's compiler also asks how large a tensor is
_HIP = torch.version.hip is not None
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


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
    key = (kernel.fn, driver.active.get_current_device(), *kinds, values, *options.values())
    found = _compiled.get(key)
    if found is not None:
        found[grid](*args, *values)
        return
    if kernel.arg_names[len(args) :] != list(constants):
        raise TypeError(
            f"{kernel.__name__} takes {kernel.arg_names}; got {len(args)} arguments, then {list(constants)}"
        )
    compiled = kernel[grid](*args, **constants, **options)
    if isinstance(compiled, CompiledKernel):
        _compiled[key] = compiled
