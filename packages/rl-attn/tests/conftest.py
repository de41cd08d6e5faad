"""Seeded sequences, pages in shuffled order, and ranks in threads."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import rl_attn
from rl_contract.testing import on_ranks


@dataclass
class Sequence:
    """One sequence, and its attention as one packed call: what every other path must give."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]


def make_sequence(length, heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16, seed=0, **tiles) -> Sequence:
    """Scores with a spread of about 3, values that cancel, a few tiny ones."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, h, head_dim, generator=g) for h in (heads, kv_heads, kv_heads))
    v[::2] *= -1e3
    v[5::7] *= 1e-30
    q, k, v = (3 * q).to(dtype), k.to(dtype), v.to(dtype)
    cu = torch.tensor([0, length])
    scale = head_dim**-0.5
    out, lse = rl_attn.attention_packed(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=scale, return_lse=True, **tiles
    )
    return Sequence(q, k, v, scale, out, lse)


def make_pages(sequences, block_size, seed=0, spare=3, layout="vllm_cpu"):
    """A cache poisoned with NaN, holding the sequences on pages in random order -> (PagedKV, block_table).

    Table entries behind a sequence's last page hold ids that no cache has.
    """
    first = sequences[0]
    kv_heads, head_dim = first.k.shape[1:]
    pages = [-(-s.length // block_size) for s in sequences]
    num_blocks = sum(pages) + spare
    if layout == "vllm_cpu":
        cache = torch.full((num_blocks, kv_heads, block_size, 2 * head_dim), torch.nan, dtype=first.k.dtype)
    else:
        cache = torch.full((2, num_blocks, block_size, kv_heads, head_dim), torch.nan, dtype=first.k.dtype)
    kv = rl_attn.PagedKV.from_layout(layout, cache, num_kv_heads=kv_heads, head_dim=head_dim)
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(sequences), max(pages) + 2), 2**30, dtype=torch.int32)
    for n, s in enumerate(sequences):
        begin = sum(pages[:n])
        table[n, : pages[n]] = ids[begin : begin + pages[n]]
        at = torch.arange(s.length)
        slots = table[n, at // block_size].long() * block_size + at % block_size
        rl_attn.write_paged(kv, s.k, s.v, slots)
    return kv, table


def folded_segments():
    """Largest number of segments per launch since the last reset, as the kernels reported it."""
    from rl_contract import launches

    return [int(row["plan"].rsplit("folded", 1)[1]) for row in launches() if "folded" in row["plan"]]


@pytest.fixture(autouse=True)
def fresh_launches():
    from rl_contract import reset_launches

    reset_launches()


@pytest.fixture
def lab():
    return SimpleNamespace(
        sequence=make_sequence, pages=make_pages, folded_segments=folded_segments, run_ranks=on_ranks
    )
