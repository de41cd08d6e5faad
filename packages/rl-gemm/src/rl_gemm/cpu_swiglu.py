"""CPU SwiGLU: contract swiglu.

Order: element-wise, nothing is summed across elements. Rounds to fp32 after exp(-g), 1 + exp(-g), the division and the product with
up, then once to the model's type. bf16 travels as uint16; a type is chosen at compile time, so both forms run the same arithmetic.
"""

import numba as nb
import numpy as np
from numba.core import types
from numba.extending import overload
from rl_contract.primitives import bf16_to_f32, exp_f32, f32_to_bf16

_ONE = np.float32(1.0)


def _widen(x):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def _narrow(x, like):  # type: ignore[no-untyped-def]
    raise NotImplementedError


@overload(_widen)
def _widen_typed(x):  # type: ignore[no-untyped-def]
    if x == types.uint16:
        return lambda x: bf16_to_f32(x)
    return lambda x: x


@overload(_narrow)
def _narrow_typed(x, like):  # type: ignore[no-untyped-def]
    if like == types.uint16:
        return lambda x, like: f32_to_bf16(x)
    return lambda x, like: x


@nb.njit(cache=True, nogil=True, error_model="numpy")
def forward(gate_up, out, first, last):
    """out[i, f] = g / (1 + exp(-g)) * u for rows ``first`` to ``last``; gate_up [M, 2F], out [M, F]."""
    width = out.shape[1]
    for i in range(first, last):
        for f in range(width):
            g, u = _widen(gate_up[i, f]), _widen(gate_up[i, width + f])
            y = g / (_ONE + exp_f32(-g)) * u
            out[i, f] = _narrow(y, out[i, f])


@nb.njit(cache=True, nogil=True, error_model="numpy")
def backward(dy, gate_up, out, first, last):
    """out[i] = [dgate, dup]: dup = dy * silu(g); dgate = (dy * u) * (s * (1 + g * (1 - s))) with s = 1 / (1 + exp(-g))."""
    width = dy.shape[1]
    for i in range(first, last):
        for f in range(width):
            d, g, u = _widen(dy[i, f]), _widen(gate_up[i, f]), _widen(gate_up[i, width + f])
            below = _ONE + exp_f32(-g)
            s = _ONE / below
            dgate = (d * u) * (s * (_ONE + g * (_ONE - s)))
            dup = d * (g / below)
            out[i, f] = _narrow(dgate, out[i, f])
            out[i, width + f] = _narrow(dup, out[i, f])
