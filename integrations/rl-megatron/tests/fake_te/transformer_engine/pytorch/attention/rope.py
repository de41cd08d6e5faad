from itertools import pairwise
from typing import Any

import torch


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """t [T, heads, D] of packed sequences, freqs [longest, 1, 1, D] fp32; computed in fp32."""
    assert (tensor_format, fused, interleaved, cp_size, freqs.dtype) == ("thd", True, False, 1, torch.float32)
    lengths = [b - a for a, b in pairwise(cu_seqlens.tolist())]
    angle = torch.cat([freqs[:n, 0] for n in lengths])
    low, high = t.float().chunk(2, -1)
    return (t.float() * angle.cos() + torch.cat((-high, low), -1) * angle.sin()).to(t.dtype)
