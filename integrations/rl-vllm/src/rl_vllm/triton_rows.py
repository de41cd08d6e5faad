"""Inputs of the sampling graph: a step's rows picked out of vLLM's tensors in one launch. Moves bytes only.

vLLM's seeds and temperatures lie at addresses that change from step to step, its logits' rows at others than the model
wrote them, so a graph reads copies of them at addresses of its own.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "S"])
def pick_rows_kernel(
    hidden_states, logits_indices, positions, mapping, seeds, temperatures, seq_lens, prefill_lens, hidden, arena,
    counts, rows, stride, H, S, COLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row i of S -> hidden [S, H], arena int64 [4, S]: seed, position of the token to come, kind and, in the last row's
    first half, temperature fp32. ``counts`` int32 [2, S]: tokens sampled (0 in an unfinished prompt), rejected (0).
    Rows from ``rows`` on are padding: kind -1, hidden 0.
    """
    row = tl.program_id(0)
    live = row < rows
    # padding reads the last row and throws it away
    source = tl.minimum(row, rows - 1)
    at = tl.load(logits_indices + source).to(tl.int64)
    request = tl.load(mapping + source).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    for begin in range(0, H, BLOCK):
        mask = begin + columns < H
        x = tl.load(hidden_states + at * stride + begin + columns, mask=mask, other=0.0)
        tl.store(hidden + row.to(tl.int64) * H + begin + columns, tl.where(live, x, 0.0), mask=mask)
    temperature = tl.load(temperatures + request)
    cold = (temperature < COLD) | (row >= rows)
    tl.store(arena + row, tl.load(seeds + request))
    tl.store(arena + S + row, tl.load(positions + at) + 1)
    tl.store(arena + 2 * S + row, tl.where(live, tl.where(cold, 1, 0), -1).to(tl.int64))
    tl.store((arena + 3 * S).to(tl.pointer_type(tl.float32)) + row, tl.where(cold, 1.0, temperature))
    unfinished = tl.load(seq_lens + source) < tl.load(prefill_lens + request)
    tl.store(counts + row, tl.where(unfinished, 0, 1))
    tl.store(counts + S + row, 0)
