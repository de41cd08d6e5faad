"""CPU SwiGLU: contract swiglu.

Order: element-wise, nothing is summed across elements. Rounds to fp32 after exp(-g), 1 + exp(-g), the division and the
product with up, then once to the model's type.
"""

import numpy as np

from rl_contract.arrays import narrow, widen
from rl_contract.jit import kernel
from rl_contract.primitives import exp_f32

_ONE = np.float32(1.0)


@kernel
def forward(gate_up, out, first, last):
    """out[i, f] = g / (1 + exp(-g)) * u for rows ``first`` to ``last``; gate_up [M, 2F], out [M, F]."""
    width = out.shape[1]
    for i in range(first, last):
        for f in range(width):
            g, u = widen(gate_up[i, f]), widen(gate_up[i, width + f])
            out[i, f] = narrow(g / (_ONE + exp_f32(-g)) * u, out[i, f])


@kernel
def backward(dy, gate_up, out, first, last):
    """out[i] = [dgate, dup], with s = 1 / (1 + exp(-g)).

    dup = dy * (g / (1 + exp(-g))); dgate = (dy * u) * (s * (1 + g * (1 - s))).
    """
    width = dy.shape[1]
    below = np.empty(width, np.float32)
    for i in range(first, last):
        # three short loops, because one long one has too many arrays for the vectoriser to tell apart
        for f in range(width):
            below[f] = _ONE + exp_f32(-widen(gate_up[i, f]))
        for f in range(width):
            d, g = widen(dy[i, f]), widen(gate_up[i, f])
            out[i, width + f] = narrow(d * (g / below[f]), out[i, width + f])
        for f in range(width):
            d, g, u = widen(dy[i, f]), widen(gate_up[i, f]), widen(gate_up[i, width + f])
            s = _ONE / below[f]
            out[i, f] = narrow((d * u) * (s * (_ONE + g * (_ONE - s))), out[i, f])
