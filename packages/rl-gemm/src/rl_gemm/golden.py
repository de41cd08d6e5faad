"""Inputs of the golden vectors: bf16 matrices computed from a counter, the same on every device and library version.

An element is decided by (seed, row, column) alone, so a test can recompute the few rows it needs of a weight with
150,000 rows.
"""

import torch
from torch import Tensor

KINDS = ("normal", "spread")


def _mix(x: Tensor) -> Tensor:
    """A 64-bit mixing function in wrapping int64 arithmetic (multiplications and logical shifts)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def matrix(rows: Tensor, columns: Tensor | int, kind: str, seed: int) -> Tensor:
    """The elements of matrix ``seed`` at these rows and columns: bf16 [R, C], on the device of ``rows``.

    ``rows`` and ``columns`` are int64 indices; an int stands for the first so many columns. ``normal``: the sum of
    four bytes, centred, over 128, times 1 to 2, so that small values have fine digits. ``spread``: that times 2**-8
    to 2**7.
    """
    if isinstance(columns, int):
        columns = torch.arange(columns, device=rows.device)
    bits = _mix(_mix(rows[:, None] * (1 << 20) + columns) + seed * 0x1E3779B97F4A7C15)
    value = (bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) + ((bits >> 24) & 255) - 510
    x = value.to(torch.float32) / 128 * (1 + ((bits >> 32) & 255).to(torch.float32) / 256)
    if kind == "spread":
        x = torch.ldexp(x, ((bits >> 40) & 15).to(torch.int32) - 8)
    return x.to(torch.bfloat16)
