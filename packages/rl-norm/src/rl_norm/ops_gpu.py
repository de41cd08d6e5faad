"""The ops of ``ops.py`` on a GPU: the same checks, then the Triton kernels."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_contract import ContractError, Launch, MissingSupport, record_launch
from rl_norm import ops

ARCHS = ("sm90", "gfx942", "gfx950")


@cache
def _kernels(device_index: int) -> Any:
    properties = torch.cuda.get_device_properties(device_index)
    name = f"sm{properties.major}{properties.minor}"
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    if name not in ARCHS:
        raise MissingSupport(f"rl_norm got a {properties.name} ({name}); supported GPUs: {ARCHS}")
    try:
        from rl_norm import triton_norm
    except ImportError as error:
        raise MissingSupport(f"rl_norm on a GPU needs Triton ({error}); install a PyTorch build with Triton") from error
    return triton_norm


def _ready(x: Tensor, kernel: str, plan: str = "-") -> Any:
    if x.dtype != torch.bfloat16:
        raise ContractError(f"rms_norm on a GPU got {x.dtype}; supported: bfloat16; convert the model")
    kernels = _kernels(x.device.index or 0)
    phase = "capture" if torch.cuda.is_current_stream_capturing() else "eager"
    record_launch(Launch("norm", f"rl_norm.triton.{kernel}", plan, phase=phase))
    return kernels


@ops.rms_norm.register_kernel("cuda")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    ops.check(x, weight, eps)
    y, _, rstd = _ready(x, "forward", "plain").forward(x, None, weight, eps)
    return y, rstd


@ops.add_rms_norm.register_kernel("cuda")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    ops.check(x, weight, eps, residual)
    return _ready(x, "forward", "residual").forward(x, residual, weight, eps)


@ops.grad_input.register_kernel("cuda")
def _grad_input(dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None = None) -> Tensor:
    return _ready(stream, "grad_input").grad_input(dy, stream, weight, rstd, dstream)


@ops.grad_weight.register_kernel("cuda")
def _grad_weight(dy: Tensor, stream: Tensor, rstd: Tensor, heads: int = 1, leaves: int = 1) -> Tensor:
    parts = _ready(stream, "grad_weight", f"tree{leaves}").grad_weight(dy, stream, rstd, heads, leaves)
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0].clone()
