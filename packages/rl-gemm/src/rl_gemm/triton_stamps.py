"""Times that a program notes for a profile, int64 [programs, STAMPS]; production kernels are compiled without them.

Nothing here touches a sum, so no contract speaks of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STAMPS: tl.constexpr = tl.constexpr(16)


def room(programs: int, device: torch.device | str) -> Tensor:
    """Zeros, int64 [programs, STAMPS]."""
    return torch.zeros(programs, STAMPS.value, dtype=torch.int64, device=device)


@triton.jit
def now():
    """Nanoseconds since some start, the same on every multiprocessor; ticks coarsely."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)


@triton.jit
def processor():
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, False, 1)
