"""Weight gradients on GPUs: blocks of tokens in packed order, each a chain of ``gpu.gemm``, folded left in fp32.

Where a trainer keeps the gradient in fp32, the blocks are added to it one after another; the certified library adds
its accumulators itself, rounded once, which is the same addition.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_contract.evidence import gpu_tally
from rl_gemm import gpu, plans, vendor
from rl_gemm.contract import GPU_TOKEN_BLOCK


def block_key(dy: Tensor, x: Tensor, boundary: str) -> tuple[Any, ...]:
    """What the product of one block is kept by; several blocks are never kept as one."""
    return gpu.gemm_key(dy, x, 1, 1, None, torch.float32, "grad_weight", boundary, "tn")


def onto_key(total: Tensor, dy: Tensor, x: Tensor, boundary: str) -> tuple[Any, ...]:
    """What adding the product of one block to ``total`` is kept by."""
    return "onto", gpu.looks(total), gpu.looks(dy), gpu.looks(x), boundary


def grad_weight(dy: Tensor, x: Tensor, boundary: str) -> Tensor:
    """dy [T, N], x [T, K] -> fp32 [N, K]: blocks of tokens in packed order, each a chain, folded left in fp32."""
    if 0 < dy.shape[0] <= GPU_TOKEN_BLOCK:
        return gpu.gemm(dy, x, operation="grad_weight", boundary=boundary, views="tn")
    total = None
    for start in range(0, dy.shape[0], GPU_TOKEN_BLOCK):
        block = slice(start, start + GPU_TOKEN_BLOCK)
        part = gpu.gemm(dy[block], x[block], operation="grad_weight", boundary=boundary, views="tn")
        total = part if total is None else total.add_(part)
    if total is None:
        return torch.zeros((dy.shape[1], x.shape[1]), dtype=torch.float32, device=dy.device)
    return total


def add_grad_weight(total: Tensor, dy: Tensor, x: Tensor, boundary: str) -> None:
    """total fp32 [N, K] += the blocks of ``grad_weight``, one after another."""
    if not dy.shape[0]:
        gpu.check(dy, x, 1, 1)
    for start in range(0, dy.shape[0], GPU_TOKEN_BLOCK):
        a, b = dy, x
        if dy.shape[0] > GPU_TOKEN_BLOCK:
            a, b = dy[start : start + GPU_TOKEN_BLOCK], x[start : start + GPU_TOKEN_BLOCK]
        key = onto_key(total, a, b, boundary)
        (gpu.known(key) or prepare_onto(key, total, a, b, boundary))(total, a, b)


def prepare_onto(
    key: tuple[Any, ...], total: Tensor, dy: Tensor, x: Tensor, boundary: str
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """What adds one block's product to ``total``; kept for tensors that look alike."""
    own = plans.current(gpu.check(dy, x, 1, 1))
    if _library_adds(own, total, dy, x):
        count = gpu_tally(boundary, f"rl_gemm.{vendor.NAME}", "grad_weight onto main_grad")

        def run(total: Tensor, dy: Tensor, x: Tensor) -> None:
            count()
            with vendor.no_split_k():
                torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)

    else:

        def run(total: Tensor, dy: Tensor, x: Tensor) -> None:
            total.add_(gpu.gemm(dy, x, operation="grad_weight", boundary=boundary, views="tn"))

    return gpu.kept(key, own, run)


def _library_adds(own: plans.Plans, total: Tensor, dy: Tensor, x: Tensor) -> bool:
    """Whether the library is certified for this product; it then adds its accumulators to ``total``, rounded once."""
    tensors = (total, dy, x)
    if not vendor.aligned(*tensors) or not all(t.is_contiguous() for t in tensors):
        return False
    n, k = total.shape
    return own.certified(vendor.environment(dy.device.index or 0), "grad_weight", n, k, len(dy), False)
