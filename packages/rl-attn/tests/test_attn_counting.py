"""The GPU kernels say how many segments they ran: here in Triton's interpreter, on a GPU beside the bits."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from rl_attn.testing import keys_seen, require_segments

PREAMBLE = """
    import pytest
    import torch
    from rl_attn import gpu, gpu_rotary, testing
    from rl_contract import launches, reset_launches
    testing.DEVICE = "cpu"
    torch.manual_seed(0)
    heads, kv_heads, dim, page, lengths = 4, 2, 16, 16, [70, 1, 32]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(103, h, dim).half() for h in (heads, kv_heads, kv_heads))
    at = torch.cat([torch.arange(n) for n in lengths])
    cache = torch.full((2, 16, kv_heads, page, dim), torch.nan).half()
    ids, taken, slots = torch.randperm(16), 0, []
    table = torch.full((3, 6), 99, dtype=torch.int32)
    for n, length in enumerate(lengths):
        count = -(-length // page)
        table[n, :count] = ids[taken : taken + count].int()
        rows = torch.arange(length)
        slots.append(table[n, rows // page].long() * page + rows % page)
        taken += count
    gpu_rotary.write(cache[0], cache[1], k, v, torch.cat(slots))

    def packed(segment=32):
        return gpu.packed(q, k, v, cu, cu, at, 0.25, 16, segment, torch.float32)

    def paged(rows, starts, segment=32):
        lens = torch.tensor(lengths, dtype=torch.int32)
        return gpu.paged(
            q[rows], cache[0], cache[1], torch.tensor(starts), lens, table, 0.25, 16, segment, out_dtype=torch.float32
        )

    def ran(call, starts):
        reset_launches()
        out, lse, found = testing.counted(call, testing.keys_seen(starts, lengths), 32)
        return [found[end - 1] for end in starts[1:]], {x["kernel"].removeprefix("rl_attn.triton_") for x in launches()}
"""


def interpreted(program):
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(program)
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]


def test_walk_decode_and_fold_count_the_segments_of_every_row_with_the_same_bits():
    pytest.importorskip("triton")
    interpreted(
        """
        assert ran(packed, cu.tolist()) == ([3, 1, 1], {"forward"})
        # the sequence of one row through segments, the others through the walk
        assert ran(lambda: paged(slice(None), cu.tolist()), cu.tolist()) == ([3, 1, 1], {"decode", "forward"})
        last, starts = (cu[1:] - 1).tolist(), [0, 1, 2, 3]
        assert ran(lambda: paged(last, starts), starts) == ([3, 1, 1], {"decode"})
        gpu.MOST_SPLIT_SEQUENCES = 0
        assert ran(lambda: paged(last, starts), starts) == ([3, 1, 1], {"forward"})
        # three rows, one and two
        gpu.MOST_SPLIT_SEQUENCES, rows, starts = 1024, [67, 68, 69, 70, 101, 102], [0, 3, 4, 6]
        assert ran(lambda: paged(rows, starts), starts) == ([3, 1, 1], {"decode"})
        """
    )


def test_kernels_that_take_other_segments_are_noticed():
    pytest.importorskip("triton")
    interpreted(
        """
        last, starts = (cu[1:] - 1).tolist(), [0, 1, 2, 3]
        for call, seen in (
            (lambda: packed(64), at + 1), (lambda: paged(last, starts, 16), testing.keys_seen(starts, lengths))
        ):
            with testing.count_segments() as calls:
                call()
            testing.require_segments(calls[0], seen, 64 if len(seen) > 4 else 16)
            with pytest.raises(AssertionError, match="of 32 keys were due"):
                testing.require_segments(calls[0], seen, 32)
        """
    )


def test_one_head_that_left_a_segment_out_is_noticed():
    seen = keys_seen([0, 2, 3], [33, 1])
    assert seen.tolist() == [32, 33, 1]
    counts = torch.tensor([1, 2, 1], dtype=torch.int32)[None, :, None].repeat(2, 1, 4)
    require_segments(counts, seen, 32)
    for plane in (0, 1):
        short = counts.clone()
        short[plane, 1, 3] = 1
        with pytest.raises(AssertionError, match="row 1, which sees 33 keys"):
            require_segments(short, seen, 32)
