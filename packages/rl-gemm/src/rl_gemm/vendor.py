"""The vendor GEMM without split-K, for the contracts gemm.column and gemm.row on CUDA.

Order: the library's kernels keep one fp32 accumulator per output and walk k upwards in the matrix unit's depth, as
the contract asks, as long as they neither split K nor use another instruction. PyTorch's public switches forbid the
split in cuBLASLt; whether a shape then has the contract's bits is never assumed: ``rl_gemm.plans`` routes a shape
here only under a certificate. Rounds once, from the accumulator to the output type, after the bias.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

NAME = "cublaslt-nosplit"
ALIGNMENT = 256  # bytes; the library's choice of algorithm looks at the addresses up to here

_lock = threading.RLock()


@contextmanager
def no_split_k() -> Iterator[None]:
    """cuBLASLt, split-K forbidden, for the calls inside; the process-wide switches are restored on the way out.

    This is the only place that touches them. The lock keeps this package's own threads apart; code elsewhere that
    changes the same switches while a call is inside would defeat it.
    """
    matmul = torch.backends.cuda.matmul
    with _lock:
        library = torch.backends.cuda.preferred_blas_library()
        reduced = (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        )
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = reduced
            torch.backends.cuda.preferred_blas_library(library)


def _driver() -> str:
    found = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


@cache
def environment(device_index: int) -> dict[str, str]:
    """What a certificate holds for: all that sways the library's choice of algorithm."""
    try:
        cublas = version("nvidia-cublas")
    except PackageNotFoundError:
        cublas = f"cuda-{torch.version.cuda}"
    return {
        "device": torch.cuda.get_device_name(device_index),
        "driver": _driver(),
        "torch": torch.__version__,
        "cublas": cublas,
        "workspace": f"{os.environ.get('CUBLASLT_WORKSPACE_SIZE', '')}/{os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}",
    }


def aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [M, K], b [N, K] (either may be a transposed view) -> [M, N] of ``out_dtype``."""
    with no_split_k():
        return uncertified_matmul(a, b, bias, out_dtype)


def uncertified_matmul(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The library under whatever switches are set; ``tools/certify`` also runs it with split-K allowed."""
    if bias is not None:
        return torch.addmm(bias, a, b.t())
    if out_dtype == a.dtype:
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=out_dtype)
