"""The oracle: contract `logprob` written with plain torch, one token and one tile at a time. Slow.

The elementary functions are torch's own fp64 ones, so the result may differ from the kernels in the last fp32 bit
where an fp64 value lies next to a rounding boundary; everything else is the contract to the letter.
"""

import torch
from torch import Tensor

from rl_logprob.contract import FIXED_POINT_BITS

_SCALE = float(1 << FIXED_POINT_BITS)


def full_logprob(
    logits: Tensor, *, vocab_size: int, temperature: float | Tensor = 1.0, vocab_tile: int = 512
) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, >=vocab_size] -> (logp fp32 [T, vocab_size], entropy fp64 [T])."""
    temp = torch.as_tensor(temperature, dtype=torch.float32)
    x_TV = (logits[:, :vocab_size] / (temp[:, None] if temp.dim() else temp)).float()
    logp = torch.empty_like(x_TV)
    entropy = torch.empty(len(x_TV), dtype=torch.float64)
    for t, row in enumerate(x_TV.double()):
        top = row.max()
        total = torch.zeros((), dtype=torch.float64)
        weighted = torch.zeros((), dtype=torch.float64)
        for tile in row.split(vocab_tile):
            tile_top = tile.max()
            if tile_top == -torch.inf:
                continue
            d = (tile - tile_top).clamp(min=-690.0)
            e = torch.exp(d) * _SCALE
            s = torch.floor(e + 0.5).to(torch.int64).sum().double() / _SCALE
            u = torch.floor(e * -d + 0.5).to(torch.int64).sum().double() / _SCALE
            w = torch.exp(tile_top - top)
            total = total + s * w
            weighted = weighted + (u - s * (tile_top - top)) * w
        logp[t] = ((row - top) - total.log()).float()
        entropy[t] = total.log() + weighted / total
    return logp, entropy
