"""Where tensors lie, told from shapes, strides and pointers: no value is looked at, so nothing waits for a GPU."""

from collections.abc import Iterable
from functools import lru_cache

import torch


def known(x: torch.Tensor) -> bool:
    """Whether ``x`` has a pointer to compare: no tensor that a compiler traces with has one, nor one on meta."""
    return type(x) is torch.Tensor and not x.is_meta and not torch.compiler.is_compiling()


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
    smaller ones span, or there is no element."""
    span, by_stride = 1, sorted((stride, size) for size, stride in dims if size != 1)
    if any(size == 0 for _, size in by_stride):
        return True
    for stride, size in by_stride:
        if stride < span:
            return False
        span += (size - 1) * stride
    return True


@lru_cache(maxsize=1024)
def apart(shape: tuple[int, ...], size: int, x: int, x_strides: tuple[int, ...], y: int, y_strides: tuple[int, ...]
) -> bool:  # fmt: skip
    """Whether all elements of two tensors have places of their own; an engine asks the same at every step.

    Args:
        shape: of both. size: bytes of an element. x, y: addresses of their first elements.
    """
    dims = list(zip(shape, x_strides, strict=True)), list(zip(shape, y_strides, strict=True))
    if 0 in shape:
        return True
    if not all(map(distinct, dims)):
        return False
    behind = [first + (1 + sum((n - 1) * s for n, s in d)) * size for first, d in zip((x, y), dims, strict=True)]
    if behind[0] <= y or behind[1] <= x:
        return True
    # views that lie between one another: of one layout, and an offset apart that is one more dimension of it
    offset = abs(x - y)
    return x_strides == y_strides and offset % size == 0 and distinct([(2, offset // size), *dims[0]])
