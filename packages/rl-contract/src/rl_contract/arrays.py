"""Model-type tensors inside Numba kernels: bf16 travels as uint16; the type is chosen when the kernel is compiled."""

from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.extending import overload

from rl_contract.devices import host_array
from rl_contract.primitives import bf16_to_f32, f32_to_bf16


def as_array(x: torch.Tensor) -> np.ndarray:
    """A row-major NumPy view of a CPU tensor (a copy where its strides are others); bf16 as its uint16 bits."""
    return host_array(x if x.is_contiguous() else x.detach().contiguous())


def widen(x: Any) -> Any:
    """In a kernel: a model-type element as fp32, exactly."""
    raise NotImplementedError("only inside Numba kernels")


def narrow(x: Any, like: Any) -> Any:
    """In a kernel: fp32 ``x`` rounded to the type of the element ``like``, ties to even."""
    raise NotImplementedError("only inside Numba kernels")


@overload(widen)
def _widen(x):
    if x == types.uint16:
        return lambda x: bf16_to_f32(x)
    return lambda x: x


@overload(narrow)
def _narrow(x, like):
    if like == types.uint16:
        return lambda x, like: f32_to_bf16(x)
    return lambda x, like: x
