"""What a rollout engine asks of a batch's logits at every step, as one call: tokens, log-probabilities, ranks."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_contract import ContractError
from rl_logprob import gpu, ops
from rl_logprob.checks import check_logits, check_vocab
from rl_logprob.sampling import sample_op

DRAWN, GREEDY, PADDING = 0, 1, -1


class Drawn(NamedTuple):
    """One step of T rows: ids int64 [T], their log-probabilities fp32 [T], nats, and ranks int64 [T] from 1."""

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def new_packed(rows: int, device: torch.device) -> Tensor:
    """Room for one step, int64 [3, T]; see ``unpack``."""
    return torch.empty((3, rows), dtype=torch.int64, device=device)


def unpack(packed: Tensor, rows: int) -> Drawn:
    """Views of the first ``rows`` rows of what ``draw_scored`` has filled."""
    return Drawn(packed[0, :rows], packed[2].view(torch.float32)[:rows], packed[1, :rows])


def draw_scored(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor, *, vocab_size: int,
    vocab_tile: int = 512, bad: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """``gumbel_sample`` or ``greedy_sample``, ``selected_logprob`` of the choice and its rank: their bits, two passes.

    Nothing looks at a device value, so that the call may be captured in a CUDA graph.

    Args:
        logits: fp32 [T, at least vocab_size]; columns from ``vocab_size`` on take no part.
        seeds, positions: int64 [T], as for ``gumbel_sample``.
        temperature: fp32 [T], positive; 1 for a greedy row. Any other makes its row bad.
        kinds: int64 [T]: ``DRAWN``, ``GREEDY``, or ``PADDING`` for a row whose results mean nothing.
        vocab_tile: ids per tile; belongs to the contract.
        bad: int64 [1]; the number of rows with a NaN or +inf or nothing above -inf is added. Such a row gets id 0 and
            a NaN.
        out: int64 [3, T], contiguous, is filled; see ``unpack``.

    Raises:
        ContractError: types or shapes. MissingSupport: a device without kernels.
    """
    check_vocab(vocab_size, vocab_tile)
    check_logits(logits, vocab_size)
    rows = len(logits)
    for name, x, dtype in (
        ("seeds", seeds, torch.int64), ("positions", positions, torch.int64), ("kinds", kinds, torch.int64),
        ("temperature", temperature, torch.float32),
    ):  # fmt: skip
        if x.shape != (rows,) or x.dtype != dtype or not x.is_contiguous():
            raise ContractError(f"{name} are {x.dtype} {tuple(x.shape)}; needs {dtype} [{rows}], contiguous")
    if out.shape != (3, rows) or out.dtype != torch.int64 or not out.is_contiguous() or bad.dtype != torch.int64:
        raise ContractError(f"out is {out.dtype} {tuple(out.shape)}, bad {bad.dtype}; needs int64 [3, {rows}] and [1]")
    if not rows:
        return
    if logits.is_cuda:
        k = gpu.ready(logits)
        gpu.check_tile(vocab_tile)
        columns = logits if logits.stride(1) == 1 else logits.contiguous()
        k.draw.draw(columns, seeds, positions, temperature, kinds, vocab_size, bad, out)
        gpu.record("triton_draw.draw")
        return
    found = unpack(out, rows)
    one = torch.ones(rows)
    best = sample_op(logits, seeds, positions, one, vocab_size, True)
    chosen = torch.where(kinds == DRAWN, sample_op(logits, seeds, positions, temperature, vocab_size, False), best)
    bad += ((chosen < 0) & (kinds != PADDING)).sum()
    found.ids.copy_(chosen.clamp_(min=0))
    own = logits.gather(1, chosen[:, None])
    state = ops.merge_tiles(*ops.tile_stats(logits.contiguous(), temperature, 0, vocab_size, vocab_tile, False))
    found.logprobs.copy_(ops.selected(own[:, 0] / temperature, state))
    found.ranks.copy_((logits[:, :vocab_size] >= own).sum(1))
