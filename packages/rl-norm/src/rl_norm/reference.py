"""Slow oracles in plain torch, written from the contract alone; for tests."""

import torch
from torch import Tensor

from rl_norm.contract import LANES, ROW_BLOCK, gpu_lanes


def lane_sum(x: Tensor, arch: str = "cpu") -> Tensor:
    """fp32 [M, H] -> [M]; the products are already rounded.

    CPU: lanes j, j+16, ... ascending, then lanes joined 8, 4, 2, 1 apart. GPU: min(256, ...) lanes, joined 1, 2, 4,
    ... apart.
    """
    count = LANES if arch == "cpu" else gpu_lanes(x.shape[1])
    lanes = torch.zeros(x.shape[0], count, device=x.device)
    for start in range(0, x.shape[1], count):
        piece = x[:, start : start + count]
        lanes[:, : piece.shape[1]] = lanes[:, : piece.shape[1]] + piece
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:] if arch == "cpu" else lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


def _rstd(x: Tensor, eps: float, arch: str = "cpu") -> Tensor:
    mean = lane_sum(x * x, arch) / x.shape[1]
    return (1.0 / torch.sqrt((mean + torch.tensor(eps, dtype=torch.float32)).double())).float()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, arch: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """x [M, H] -> (y, residual stream); the stream is x itself where there is no residual."""
    stream = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    row = stream.float()
    y = row * _rstd(row, eps, arch)[:, None] * weight.float()
    return y.to(x.dtype), stream


def grad_input(
    dy: Tensor, stream: Tensor, weight: Tensor, eps: float, dstream: Tensor | None = None, arch: str = "cpu"
) -> Tensor:
    """[M, H] -> [M, H], rounded once."""
    rstd = _rstd(stream.float(), eps, arch)[:, None]
    g, xhat = dy.float() * weight.float(), stream.float() * rstd
    dx = rstd * (g - xhat * (lane_sum(g * xhat, arch) / dy.shape[1])[:, None])
    if dstream is not None:
        dx = dx + dstream.float()
    return dx.to(dy.dtype)


def grad_weight(dy: Tensor, stream: Tensor, eps: float, heads: int = 1, leaves: int = 1, arch: str = "cpu") -> Tensor:
    """dy, stream [T * heads, H] -> fp32 [H]."""
    product = dy.float() * (stream.float() * _rstd(stream.float(), eps, arch)[:, None])
    parts = []
    for leaf in product.view(-1, leaves, heads // leaves, dy.shape[1]).unbind(1):
        total = torch.zeros(dy.shape[1], device=dy.device)
        for block in leaf.reshape(-1, dy.shape[1]).split(ROW_BLOCK):
            part = torch.zeros(dy.shape[1], device=dy.device)
            for row in block:
                part = part + row
            total = total + part
        parts.append(total)
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]
