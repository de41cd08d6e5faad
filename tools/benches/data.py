"""Inputs that show a wrong order: normal, with exponents spread over 2**-20 to 2**20, and cancelling."""

import torch
from torch import Tensor

KINDS = ("normal", "spread", "cancel")


def matrix(rows: int, columns: int, kind: str, seed: int, device: str = "cuda", scale: float = 1.0) -> Tensor:
    """bf16 [rows, columns]."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device)
    if kind == "spread":
        x = torch.ldexp(x, torch.randint(-10, 11, x.shape, generator=generator, device=device))
    if kind == "cancel" and columns > 1:
        # column pairs of opposite sign far apart: large partial sums, a small total
        half = columns // 2
        x[:, half : 2 * half] = -x[:, :half] * (
            1 + 2.0**-7 * torch.randn(rows, half, generator=generator, device=device)
        )
    return (x * scale).bfloat16()
