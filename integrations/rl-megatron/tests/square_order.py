"""The order in which a GPU sums the squares of a leaf, written out in torch, and gradients that show another one."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BLOCK, LANES = 8192, 1024


def _lanes(x: Tensor, steps: int) -> Tensor:
    """[n] -> [ceil(n / (steps * LANES))]: chains of ``steps`` in each lane, then neighbours, then theirs."""
    x = torch.nn.functional.pad(x, (0, -x.numel() % (steps * LANES))).view(-1, steps, LANES)
    total = torch.zeros_like(x[:, 0])
    for step in range(steps):
        total = total + x[:, step]
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total[:, 0]


def written_out(leaf: Tensor) -> Tensor:
    """fp64 [] of a leaf of any shape."""
    blocks = _lanes(leaf.flatten().double().square(), BLOCK // LANES)
    return _lanes(blocks, -(-blocks.numel() // LANES))[0]


def parts(grad: Tensor, dim: int, count: int, fused: int) -> list[Tensor]:
    """What each of ``count`` ranks, or leaves, holds of ``grad``."""
    halves = [h.chunk(count, dim) for h in grad.chunk(fused, dim)]
    return [torch.cat(both, dim).contiguous() for both in zip(*halves)]


def gradients(
    sizes: tuple[tuple[int, int], ...], seeds: int, place: str, offset: int = 0
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Gradients of nine magnitudes, element by element, whose first lies ``offset`` elements into its memory."""
    for seed in range(seeds):
        for rows, columns in sizes:
            generator = torch.Generator().manual_seed(seed)
            n = rows * columns
            values = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 3, (n,), generator=generator)
            memory = torch.full((n + offset,), float("nan"))
            memory[offset:] = values
            yield (seed, rows, columns), memory.to(place)[offset:].view(rows, columns)


def check(square_sums: Callable[..., None], name: object, grad: Tensor, leaves: int) -> None:
    """Every cut of ``grad`` gives each leaf the bits of ``written_out``."""
    for dim, fused in ((0, 1), (0, 2), (1, 1)):
        want = torch.stack([written_out(leaf) for leaf in parts(grad, dim, leaves, fused)])
        torch.testing.assert_close(want.sum(), grad.double().square().sum(), rtol=1e-12, atol=0)
        t = 1
        while t <= leaves:
            got = torch.full((t, leaves // t), float("nan"), dtype=torch.float64, device=grad.device)
            for shard, out in zip(parts(grad, dim, t, fused), got):
                square_sums(shard, out, dim, fused)
            assert torch.equal(got.flatten(), want), (name, dim, fused, t)
            t *= 2
