"""What launches on a GPU ask: kernels of the architecture, frozen plans, options, evidence, and who looks on."""

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from rl_attn import plans
from rl_contract import ContractError, Launch, record_launch
from rl_contract.gpu import arch_of, needs_triton

LOG2E = 1.4426950408889634
ARCHS = ("sm90", "gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16)


@cache
def kernels() -> Any:
    """The Triton modules, as attributes ``forward``, ``decode``, ``backward``, ``rotary``.

    Raises:
        MissingSupport: Triton is not installed.
    """
    with needs_triton("rl_attn"):
        from rl_attn import triton_backward, triton_decode, triton_forward, triton_rotary

    class Kernels:
        forward, decode, backward, rotary = triton_forward, triton_decode, triton_backward, triton_rotary

    return Kernels


@cache
def hopper() -> Any:
    """The kernels of sm90 alone, as attributes ``walk``, ``decode``, ``few``, ``fold``, ``tiles``."""
    from rl_attn import triton_hopper, triton_hopper_decode, triton_hopper_few, triton_hopper_fold, triton_hopper_tiles

    class Kernels:
        walk, decode, few = triton_hopper, triton_hopper_decode, triton_hopper_few
        fold, tiles = triton_hopper_fold, triton_hopper_tiles

    return Kernels


@cache
def arch(device_index: int) -> str:
    """Name of the device's contracts.

    Raises:
        MissingSupport: a GPU without a contract.
    """
    return arch_of(device_index, ARCHS, "rl_attn")


def current_plans(x: Tensor) -> plans.Plans:
    """The plan file for the device that holds ``x``."""
    return plans.current(arch(x.device.index or 0) if x.is_cuda else "generic")


# key rows of a stage, as plans count them
STAGE_ROWS = 64


def options(row: plans.Row, key_tile: int = STAGE_ROWS) -> dict[str, Any]:
    """Compiler options of a launch. Contraction is off; on CDNA the two switches that regroup sums are pinned.

    Args:
        key_tile: of the contract, in kernels whose stages hold one each; others have a plan's stages as they are.
    """
    found: dict[str, Any] = {"num_warps": row.warps, "num_stages": stages_for(row, key_tile), "enable_fp_fusion": False}
    if torch.version.hip is not None:
        found |= {"kpack": 1, "matrix_instr_nonkdim": 16}
    elif row.max_registers:
        found["maxnreg"] = row.max_registers
    return found


def stages_for(row: plans.Row, key_tile: int) -> int:
    """Stages in flight: wider key tiles take the room of a plan's with fewer."""
    return max(1, row.stages * STAGE_ROWS // max(STAGE_ROWS, key_tile))


def ring_for(row: plans.Row, key_tile: int) -> int:
    """Tiles of keys or values that a decode on specialised warps has on their way; a plan counts pairs of them."""
    return max(2, 2 * row.stages * 64 // key_tile)


# names of launches, each made once: an engine comes here several times a layer
_launch = lru_cache(maxsize=4096)(Launch)


def record(boundary: str, kernel: str, plan: str = "-", layout: str = "-") -> None:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    record_launch(_launch(boundary, kernel, plan, layout, "capture" if capturing else "eager"))


def direct(*tensors: Tensor) -> bool:
    """Whether kernels on ``tensors`` may be launched without an opaque op around them, which takes longer than they do:
    neither a compiler nor anybody who watches operators is there."""
    for x in tensors:
        if type(x) is not Tensor or not x.is_cuda:
            return False
    if torch.compiler.is_compiling():
        return False
    # forward-mode differentiation is the ops' to refuse
    return not torch._C._len_torch_dispatch_stack() and forward_ad._current_level < 0


def check(where: str, *tensors: Tensor) -> None:
    """Model types of a GPU."""
    for x in tensors:
        if x.dtype not in DTYPES:
            raise ContractError(f"{where} on a GPU got {x.dtype}; supported: {DTYPES}; convert the model")


def check_key_tile(where: str, key_tile: int) -> None:
    """What kernels lay out as a block of keys, and shared memory holds at every head dimension."""
    if key_tile & (key_tile - 1) or key_tile > 128:
        raise ContractError(
            f"{where} on a GPU got key_tile={key_tile}; supported: 16 to 128, a power of two; take it from the profile"
        )


def padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def exponent_factor(scale: float) -> float:
    """c = fp32(fp64(scale) * log2(e))."""
    return float(np.float32(float(scale) * LOG2E))


def block_rows(row: plans.Row, group: int) -> int:
    """Query rows of a program: the plan's, or more where one token's heads need them."""
    return max(row.block_m, padded(group))
