"""Where tensors lie, told from shapes, strides and pointers: no value is looked at, so nothing waits for a GPU."""

from collections.abc import Iterable

import torch


def known() -> bool:
    """Whether there are pointers to compare: not while a compiler traces."""
    return not torch.compiler.is_compiling()


def reach(x: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of ``x`` and the one behind its last; ``x`` is not empty."""
    first = x.data_ptr()
    steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return first, first + (steps + 1) * x.element_size()


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the stretches of memory that ``x`` and ``y`` span share a byte of one storage."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or not (x.numel() and y.numel()):
        return False
    (a, b), (c, d) = reach(x), reach(y)
    return a < d and c < b


def distinct(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether every element of ``(size, stride)`` dimensions has a place of its own: each stride clears what the
    smaller ones span."""
    span = 1
    for stride, size in sorted((stride, size) for size, stride in dims if size > 1):
        if stride < span:
            return False
        span += (size - 1) * stride
    return True


def interleaved(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether ``x`` and ``y``, of one shape, share no element: apart, or views that differ by an offset alone."""
    if not overlap(x, y):
        return True
    apart = abs(x.data_ptr() - y.data_ptr())
    if x.stride() != y.stride() or apart % x.element_size():
        return False
    dims = zip((2, *x.shape), (apart // x.element_size(), *x.stride()), strict=True)
    return distinct(dims)
