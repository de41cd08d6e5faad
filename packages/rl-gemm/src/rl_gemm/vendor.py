"""The vendor GEMM without split-K, for the contracts gemm.column and gemm.row on CUDA.

Order: the library's kernels keep one fp32 accumulator per output and walk k upwards in the matrix unit's depth, as
the contract asks, as long as they neither split K nor use another instruction. PyTorch's public switches forbid the
split in cuBLASLt; whether a shape then has the contract's bits is never assumed: ``rl_gemm.plans`` routes a shape
here only under a certificate. Rounds once, from the accumulator to the output type, after the bias.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

NAME = "cublaslt-nosplit"
ALIGNMENT = 256  # bytes; the library's choice of algorithm looks at the addresses up to here

_LIBRARY = torch._C._BlasBackend.Cublaslt
_WHOLE = (False, False)  # neither reduced sums nor a split K
_lock = threading.RLock()


@cache
def _switches() -> tuple[Callable[..., Any], ...]:
    """Get and set the library, get and set whether bf16 sums may be reduced, and K split: PyTorch's own functions.

    Its public switches look at names, types and versions first, which takes longer than a launch; they are taken where
    a version of PyTorch has no such functions.
    """
    names = "blas_preferred_backend", "cublas_allow_bf16_reduced_precision_reduction"
    found = [getattr(torch._C, f"_{verb}_{name}", None) for name in names for verb in ("get", "set")]
    if all(found) and isinstance(found[2](), tuple):  # type: ignore[misc]
        return tuple(found)  # type: ignore[arg-type]
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library

    def set_reduced(sums: bool, split: bool) -> None:
        matmul.allow_bf16_reduced_precision_reduction = (sums, split)

    def get_reduced() -> tuple[bool, bool]:
        return (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        )

    return library, library, get_reduced, set_reduced


class no_split_k:
    """cuBLASLt, split-K and autocast forbidden, for the calls inside; what was set is restored on the way out.

    This is the only place that touches the switches. The lock keeps this package's own threads apart; code elsewhere
    that changes the same switches while a call is inside would defeat it. Autocast is the thread's own.
    """

    __slots__ = ("_autocast", "_found")
    _found: tuple[Any, tuple[bool, bool]]

    def __enter__(self) -> None:
        get_library, set_library, get_reduced, set_reduced = _switches()
        _lock.acquire()
        self._autocast = torch.is_autocast_enabled("cuda")
        try:
            self._found = get_library(), get_reduced()
            set_library(_LIBRARY)
            # it would make another type of the operands
            if self._autocast:
                torch.set_autocast_enabled("cuda", False)
            if self._found[1] != _WHOLE:
                set_reduced(*_WHOLE)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self._autocast:
            torch.set_autocast_enabled("cuda", True)
        try:
            # nothing was found where reading the switches failed
            if (found := getattr(self, "_found", None)) is not None:
                _, set_library, _, set_reduced = _switches()
                library, reduced = found
                if reduced != _WHOLE:
                    set_reduced(*reduced)
                set_library(library)
        finally:
            _lock.release()


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
        # a plain text: PyTorch's own parses both versions at every comparison
        "torch": str(torch.__version__),
        "cublas": cublas,
        "workspace": f"{os.environ.get('CUBLASLT_WORKSPACE_SIZE', '')}/{os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}",
    }


def aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [M, K], b [N, K] (either may be a transposed view) -> [M, N] of ``out_dtype``."""
    with no_split_k():
        return uncertified_matmul(a, b, bias, out_dtype)


def product(views: str, out_dtype: torch.dtype, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """``matmul`` of x [M, K] and y [N, K], y given as [K, N] where ``views`` is ``nn``, also x as [K, M] for ``tn``."""
    first, second = x.t() if views == "tn" else x, y.t() if views == "nt" else y
    with no_split_k():
        if bias is not None:
            return torch.addmm(bias, first, second)
        if out_dtype == x.dtype:
            return torch.mm(first, second)
        return torch.mm(first, second, out_dtype=out_dtype)


def product_by_rows(views: str, out_dtype: torch.dtype, most: int, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """``product`` of a contiguous x [M, K], by calls of at most ``most`` rows that write to their place."""
    second = y.t() if views == "nt" else y
    out = x.new_empty((x.shape[0], second.shape[1]), dtype=out_dtype)
    # PyTorch refuses to write to a place where a gradient could be asked for; the callers have their own
    with torch.no_grad(), no_split_k():
        for rows, place in zip(x.split(most), out.split(most), strict=True):
            if bias is not None:
                torch.addmm(bias, rows, second, out=place)
            elif out_dtype == x.dtype:
                torch.mm(rows, second, out=place)
            else:
                torch.mm(rows, second, out_dtype=out_dtype, out=place)
    return out


def uncertified_matmul(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The library under whatever switches are set; ``tools/certify`` also runs it with split-K allowed."""
    if bias is not None:
        return torch.addmm(bias, a, b.t())
    if out_dtype == a.dtype:
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=out_dtype)
