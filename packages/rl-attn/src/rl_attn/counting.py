"""How many segments the kernels of a GPU ran, as they counted while they ran; off unless a caller asks.

A kernel without a place to count in is compiled without counting, so production runs no code for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_calls: list[Tensor] | None = None


@contextmanager
def count_segments() -> Iterator[list[Tensor]]:
    """Meanwhile every attention call on a GPU appends its counts, int32 ``[2, Tq, Hq]``, one for each row and head.

    ``[0]``: segments that a kernel began and that hold a key which the row sees. ``[1]``: states of segments, none of
    them empty, that were folded into the row's result. Kernels count while they run, a graph anew at each replay. A
    row that sees n keys has ``segments_of(n)`` of both; in the family ``nosplit`` the splits of the library, 1.
    """
    global _calls
    before, _calls = _calls, []
    try:
        yield _calls
    finally:
        _calls = before


def places(q: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Where the kernels of a call on ``q [Tq, Hq, D]`` count: begun and folded segments, int32 ``[Tq, Hq]``."""
    if _calls is None:
        return None, None
    tokens, heads, _ = q.shape
    # both 16 bytes aligned, so that one compilation serves every size
    room = torch.zeros((2, -(-tokens * heads // 4) * 4), dtype=torch.int32, device=q.device)
    counts = room[:, : tokens * heads].unflatten(1, (tokens, heads))
    _calls.append(counts)
    return counts[0], counts[1]
