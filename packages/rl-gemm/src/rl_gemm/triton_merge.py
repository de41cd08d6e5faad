"""The upper levels of tree(G), contracts gemm.row and gemm.column, over partial sums in a workspace; CUDA and ROCm.

Order: parts are joined by the balanced binary tree in fp32, lower k on the left. Bias is added to the root in fp32,
then the value is rounded once (to nearest, ties to even). Block and warps move no bit.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_contract.triton_launch import Prepared
from rl_gemm.triton_stamps import STAMPS, now, processor


@triton.jit
def _wait_for_previous():
    """Until the kernel before on the stream has ended and its writes are visible."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, False, 1)


@triton.jit(do_not_specialize=["stride_part"])
def merge_kernel(
    parts, bias, out, size, stride_part, N, LEAVES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, stamps=None,
):  # fmt: skip
    """out[i] = round(tree over g of parts[g, i] + bias): the upper levels of tree(G) for parts held in a workspace.

    ``stamps``: None, or int64 [programs, STAMPS] for a profile: as in ``gluon_tree``, places 0, 1, 2 (may go on) and 4.
    """
    if stamps is not None:
        stamps += tl.program_id(0) * STAMPS
        tl.store(stamps, processor().to(tl.int64))
        tl.store(stamps + 1, now())
    if EARLY:
        _wait_for_previous()
    if stamps is not None:
        tl.store(stamps + 2, now())
    part = stride_part.to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if LEAVES == 2:
        root = _load_pair(parts, at, mask, part)
    elif LEAVES == 4:
        root = _load_pair(parts, at, mask, part) + _load_pair(parts + 2 * part, at, mask, part)
    elif LEAVES == 8:
        root = _load_four(parts, at, mask, part) + _load_four(parts + 4 * part, at, mask, part)
    else:
        low = _load_four(parts, at, mask, part) + _load_four(parts + 4 * part, at, mask, part)
        root = low + (_load_four(parts + 8 * part, at, mask, part) + _load_four(parts + 12 * part, at, mask, part))
    if HAS_BIAS:
        root += tl.load(bias + at % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, root.to(out.dtype.element_ty), mask=mask)
    if stamps is not None:
        tl.store(stamps + 4, now())


@triton.jit
def _load_pair(parts, at, mask, part):
    return tl.load(parts + at, mask=mask, other=0.0) + tl.load(parts + part + at, mask=mask, other=0.0)


@triton.jit
def _load_four(parts, at, mask, part):
    return _load_pair(parts, at, mask, part) + _load_pair(parts + 2 * part, at, mask, part)


def can_start_early() -> bool:
    """Whether a kernel may be launched while the one before it on the stream still runs, and wait for it in place."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret


def prepared(
    parts: Tensor, bias: Tensor | None, out: Tensor, early: bool = False, stamps: Tensor | None = None
) -> Callable[[Tensor, Tensor | None, Tensor], None]:
    """``merge`` of any tensors of these shapes, strides, types and device that lie as these do, by 16 bytes."""
    size, block = out.numel(), 1024
    early = early and can_start_early()
    options = {"launch_pdl": True} if early else {}
    fixed = {
        "size": size, "stride_part": parts.stride(0), "N": out.shape[1], "LEAVES": parts.shape[0],
        "HAS_BIAS": bias is not None, "BLOCK": block, "EARLY": early, "stamps": stamps,
    }  # fmt: skip
    return Prepared(merge_kernel, (triton.cdiv(size, block),), fixed, num_warps=4, enable_fp_fusion=False, **options)


def merge(parts: Tensor, bias: Tensor | None, out: Tensor, early: bool = False, stamps: Tensor | None = None) -> None:
    """Join fp32 parts [leaves, M or more, N] by the balanced tree into ``out`` [M, N].

    ``early``: the kernel before on the stream is one of ``triton_gemm.launch`` that wrote these parts; where the GPU
    can, programs of the merge take their places while it runs and wait there. ``stamps``: int64 [programs, STAMPS]
    takes the times of a profile.
    """
    prepared(parts, bias, out, early, stamps)(parts, bias, out)
