"""What the GPU tests share: inputs that show a wrong order, and the kernel that the others are compared with."""

import torch
from torch import Tensor

from rl_gemm import plans

M_LIST = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 257, 1000, 2049)
DATA = ("normal", "spread", "cancel")


def matrix(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    """bf16 [rows, columns] on the GPU: normal, exponents spread over 2**-10 to 2**10, or cancelling halves."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    if kind == "spread":
        x = torch.ldexp(x, torch.randint(-10, 11, x.shape, generator=generator, device="cuda"))
    if kind == "cancel":
        half = columns // 2
        noise = 2.0**-7 * torch.randn(rows, half, generator=generator, device="cuda")
        x[:, half : 2 * half] = -x[:, :half] * (1 + noise)
    return x.bfloat16()


def reference(a: Tensor, b: Tensor, leaves: int = 1, fused: int = 1) -> Tensor:
    """fp32 by the pointer kernel with one tile for every shape."""
    from rl_gemm import gpu

    kernel = plans.Kernel(kind="leaf", block_m=16, block_n=32, block_k=16, warps=4, stages=3)
    return gpu.launcher(kernel, a, b, leaves, 1 if leaves == 1 else fused, None, torch.float32)(a, b, None)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether fp32 bits are the same."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
