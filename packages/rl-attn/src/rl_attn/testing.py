"""For tests on a GPU: sequences whose rows lie packed and on shuffled pages, bit comparison, counts of segments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_attn import gpu, plans
from rl_attn.attention import write_paged
from rl_attn.counting import count_segments
from rl_attn.paged import PagedKV
from rl_contract.profile import KEY_TILE, SEGMENT

DEVICE = "cuda"
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049, 8193, 1024, 1025)


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN and the sign of zero included."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def use(**row: Any) -> None:
    """Force one launch shape, ahead of the shipped ones."""
    own = gpu.arch(0)
    plans.use(plans.Plans(arch=own, rows=(plans.Row(**row), *plans.shipped(own).rows)))


def require_segments(counts: Tensor, seen: Tensor, segment: int = SEGMENT) -> None:
    """Each row began and folded the segments of the keys it sees, in every head.

    Args:
        counts: of one call, from ``count_segments``. seen: int ``[Tq]``, keys that each row sees.

    Raises:
        AssertionError: naming the first row that did not.
    """
    wanted = (seen.to(counts.device) + segment - 1) // segment
    off = (counts != wanted[:, None]).any(2).any(0).nonzero()
    if off.numel():
        row = int(off[0])
        raise AssertionError(
            f"row {row}, which sees {int(seen[row])} keys, began {counts[0, row].tolist()} and folded "
            f"{counts[1, row].tolist()} segments in its heads; {int(wanted[row])} of {segment} keys were due"
        )


def counted(
    call: Callable[[], tuple[Tensor, Tensor]], seen: Tensor, segment: int = SEGMENT
) -> tuple[Tensor, Tensor, list[int]]:
    """``call()`` with kernels as they are in production: O, LSE. And the segments that each row folded when they count,
    with the same bits.

    Raises:
        AssertionError: other bits, or another number of segments than the keys that a row sees ask for.
    """
    out, lse = call()
    with count_segments() as calls:
        again, again_lse = call()
    assert equal(again, out)
    assert equal(again_lse, lse)
    assert len(calls) == 1
    require_segments(calls[0], seen, segment)
    return out, lse, calls[0][1, :, 0].tolist()


def keys_seen(starts: list[int], seq_lens: list[int]) -> Tensor:
    """How many keys each query row sees, int64 ``[Tq]``: the rows of a request are its last ones."""
    rows = [torch.arange(n - (b - a), n) + 1 for a, b, n in zip(starts[:-1], starts[1:], seq_lens, strict=True)]
    return torch.cat(rows)


class Batch:
    """Sequences on shuffled pages of a cache poisoned with NaN, the same rows packed, and their attention.

    Table entries behind a sequence's last page hold an id that no cache has. ``ran``: how many segments the last call
    folded into each of its rows, as its kernels counted them in a second run with the same bits.
    """

    ran: list[int]

    def __init__(
        self, lengths: tuple[int, ...], heads: int = 8, kv_heads: int = 2, head_dim: int = 128, page: int = 16,
        dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 1.0, layout: str = "vllm_split",
    ) -> None:  # fmt: skip
        g = torch.Generator(DEVICE).manual_seed(seed)
        rows = sum(lengths)
        self.lengths, self.scale = lengths, head_dim**-0.5
        self.q, self.k, self.v = (
            (spread * torch.randn(rows, h, head_dim, generator=g, device=DEVICE)).to(dtype)
            for h in (heads, kv_heads, kv_heads)
        )
        self.cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        self.positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
        pages = [-(-n // page) for n in lengths]
        blocks = sum(pages) + 3
        split = layout == "vllm_split"
        shape = (2, blocks, page, kv_heads, head_dim) if split else (blocks, kv_heads, page, 2 * head_dim)
        cache = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
        self.cache = PagedKV.from_layout(layout, cache, num_kv_heads=kv_heads, head_dim=head_dim)
        ids = torch.randperm(blocks, generator=g, device=DEVICE).int()
        self.table = torch.full((len(lengths), max(pages) + 2), 2**30, device=DEVICE, dtype=torch.int32)
        taken, slots = 0, []
        for n, count in enumerate(pages):
            self.table[n, :count] = ids[taken : taken + count]
            at = torch.arange(lengths[n], device=DEVICE)
            slots.append(self.table[n, at // page].long() * page + at % page)
            taken += count
        write_paged(self.cache, self.k, self.v, torch.cat(slots))

    def packed(self, key_tile: int = KEY_TILE, segment: int = SEGMENT) -> tuple[Tensor, Tensor]:
        """O before its rounding, and LSE."""
        rows = (self.q, self.k, self.v, self.cu, self.cu, self.positions, self.scale, key_tile, segment, torch.float32)
        out, lse, self.ran = counted(lambda: gpu.packed(*rows), self.positions + 1, segment)
        return out, lse

    def paged(
        self,
        rows: Any,
        starts: list[int],
        seq_lens: list[int],
        which: Any,
        key_tile: int = KEY_TILE,
        segment: int = SEGMENT,
    ) -> tuple[Tensor, Tensor]:
        """Query rows ``rows`` of sequences ``which``, each with ``seq_lens`` keys."""
        given = (
            self.q[rows], self.cache.k, self.cache.v, torch.tensor(starts, device=DEVICE, dtype=torch.int32),
            torch.tensor(seq_lens, device=DEVICE, dtype=torch.int32), self.table[which], self.scale, key_tile, segment,
        )  # fmt: skip
        call = lambda: gpu.paged(*given, out_dtype=torch.float32)  # noqa: E731
        out, lse, self.ran = counted(call, keys_seen(starts, seq_lens), segment)
        return out, lse

    def last_rows(self) -> list[int]:
        """The last query row of each sequence."""
        return [int(x) - 1 for x in self.cu[1:]]

    def fp64(self, n: int) -> tuple[Tensor, Tensor]:
        """Attention of sequence ``n`` in fp64: O and LSE."""
        a, b = int(self.cu[n]), int(self.cu[n + 1])
        group = self.q.shape[1] // self.k.shape[1]
        q, k, v = (x[a:b].double() for x in (self.q, self.k, self.v))
        s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.scale
        s = s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), v.repeat_interleave(group, 1)), s.logsumexp(-1).T
