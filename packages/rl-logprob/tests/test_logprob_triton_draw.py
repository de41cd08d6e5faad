"""The kernels of a step's draw in Triton's interpreter, which is chosen when a kernel is defined: in processes."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


def body_draw():
    """Tokens, log-probabilities and ranks of the single operators; padding and bad rows told apart."""
    from rl_logprob import draw, triton_draw, triton_sample, triton_scores

    for vocab, rows in ((1900, 7), (300, 3), (5000, 2)):
        logits = torch.randn(rows, vocab + 100) * 3
        logits[:, vocab:] = torch.nan
        logits[-1, 5] = logits[-1, 200] = 60.0
        seeds, positions = torch.randint(-(2**62), 2**62, (rows,)), torch.arange(rows) * 1000
        kinds = torch.tensor([draw.DRAWN, draw.GREEDY] * rows)[:rows]
        temp = torch.where(kinds == draw.GREEDY, 1.0, torch.rand(rows) + 0.5)
        bad, out = torch.tensor([5]), torch.full((3, rows), -7)
        triton_draw.draw(logits, seeds, positions, temp, kinds, vocab, bad, out)
        got = draw.unpack(out, rows)
        want = [triton_sample.sample(logits, seeds, positions, temp, vocab, greedy) for greedy in (False, True)]
        ids = torch.where(kinds == draw.GREEDY, want[1], want[0])
        found = triton_scores.new_stats(rows, -(-vocab // 128), False, logits.device)
        triton_scores.tile_stats(logits, temp, vocab, found, 0)
        at = torch.arange(rows)
        logp = triton_scores.selected(logits[at, ids] / temp, triton_scores.merge(*found))
        assert torch.equal(got.ids, ids)
        assert torch.equal(got.logprobs.view(torch.int32), logp.view(torch.int32))
        assert torch.equal(got.ranks, (logits[:, :vocab] >= logits[at, ids][:, None]).sum(1))
        assert int(bad) == 5
        # and the CPU's, whose statistics have functions of their own
        cpu, count = torch.full((3, rows), -7), torch.tensor([0])
        draw.draw_scored(logits, seeds, positions, temp, kinds, vocab_size=vocab, bad=count, out=cpu)
        mine = draw.unpack(cpu, rows)
        assert torch.equal(mine.ids, ids)
        assert torch.equal(mine.ranks, got.ranks)
        assert (mine.logprobs - got.logprobs).abs().max() < 2e-6
        assert int(count) == 0
    # rows 0 to 2 are bad by their logits, those from 6 on by their temperature or their kind; on both devices
    temps = [0.0, 1e-39, -1.0, -torch.inf, torch.inf, torch.nan]
    odd = [7, -2, 2, 2**40, -(2**40), 2**32]
    kinds = torch.tensor([0, 1, 0, 1, 0, -1] + [0] * 6 + [1] * 6 + odd + [-1])
    temp = torch.tensor([1.0, 1.0, 0.7, 1.0, 0.5, 1.0, *temps, *temps, *[1.0] * 6, torch.nan])
    rows = len(kinds)
    logits = torch.randn(rows, 300)
    logits[0, 299], logits[1, 3] = torch.nan, torch.inf
    logits[2] = logits[5] = -torch.inf
    # which are finite once divided by what is too small
    logits[6:18] = 0.0
    for name in ("gpu", "cpu"):
        bad, out = torch.tensor([0]), torch.full((3, rows), -7)
        given = (logits, torch.arange(rows), torch.arange(rows), temp, kinds)
        if name == "gpu":
            triton_draw.draw(*given, 300, bad, out)
        else:
            draw.draw_scored(*given, vocab_size=300, bad=bad, out=out)
        got = draw.unpack(out, rows)
        wrong = [0, 1, 2, *range(6, rows - 1)]
        assert int(bad) == len(wrong) == 21
        assert got.ids[wrong].tolist() == [0] * 21
        assert torch.isnan(got.logprobs[wrong]).all()
        assert not torch.isnan(got.logprobs[3:5]).any()
        assert int(got.ids[3]) == int(logits[3].argmax())
        assert int(got.ranks[3]) == 1
        # a greedy row at another temperature: the largest quotient, so that two that round to one are a tie
        warm = torch.full((1, 300), 1.0)
        warm[0, 7], warm[0, 5] = 1.0 + 2**-23, 1.0
        given = (warm, *[torch.zeros(1, dtype=torch.int64)] * 2, torch.tensor([3.0]), torch.tensor([1]))
        out = torch.full((3, 1), -7)
        if name == "gpu":
            triton_draw.draw(*given, 300, bad, out)
        else:
            draw.draw_scored(*given, vocab_size=300, bad=bad, out=out)
        assert int(draw.unpack(out, 1).ids[0]) == int((warm[0] / 3.0).argmax())


def over_ranks(logits, world, seeds, positions, temp, kinds, vocab, out):
    """What each rank counts as bad, once ``out``, one a rank, is filled; ranks take turns between what crosses them."""
    from rl_logprob import triton_draw_ranks as ranks

    shards = [x.contiguous() for x in logits.chunk(world, 1)]
    steps = []
    for rank, own in enumerate(shards):
        edge = shards[min(rank + 1, world - 1)][:, :128].contiguous()
        steps.append(ranks.Step(own, edge, seeds, positions, temp, kinds, rank, vocab))
    found = torch.stack([step.best for step in steps])
    bad = [torch.tensor([5]) for _ in steps]
    sums = torch.stack([step.pick(found, count, own) for step, count, own in zip(steps, bad, out)])
    for step, own in zip(steps, out):
        step.finish(sums, own)
    return [int(x) - 5 for x in bad]


def body_draw_ranks():
    """One rank's bits, wherever tiles are cut, with ties, bad rows and ranks without ids."""
    from rl_logprob import triton_draw

    cases = [
        # (ids, columns of a rank, ranks): whole tiles, tiles in two, a boundary at 16 columns, ranks without ids
        (2048, 1024, 2), (1900, 950, 2), (1900, 976, 2), (1200, 304, 4), (1100, 144, 8), (300, 160, 4), (130, 128, 2),
        (1299, 433, 4),
    ]  # fmt: skip
    for vocab, columns, world in cases:
        rows = 9
        logits = torch.randn(rows, columns * world) * 3
        logits[:, vocab:] = torch.nan
        # equal ids on two ranks, and on either side of a shared tile
        logits[1, [5, vocab - 1]] = 60.0
        logits[2, [columns - 1, columns]] = 60.0
        logits[4, 7], logits[5, vocab - 1] = torch.nan, torch.inf
        logits[6, :vocab] = -torch.inf
        logits[7, : vocab - 1] = -torch.inf
        seeds, positions = torch.randint(-(2**62), 2**62, (rows,)), torch.arange(rows) * 1000
        kinds = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, -1])
        temp = torch.where(kinds == 1, 1.0, torch.rand(rows) + 0.5)
        bad, whole = torch.tensor([0]), torch.full((3, rows), -7)
        triton_draw.draw(logits, seeds, positions, temp, kinds, vocab, bad, whole)
        out = [torch.full((3, rows), -7) for _ in range(world)]
        counted = over_ranks(logits, world, seeds, positions, temp, kinds, vocab, out)
        assert counted == [int(bad)] * world == [3] * world, (vocab, counted, bad)
        sound = [0, 1, 2, 3, 7]
        for mine in out:
            assert torch.equal(mine[0, :8], whole[0, :8]), (vocab, world)
            assert torch.equal(mine[1, sound], whole[1, sound])
            logp, want = (x[2].view(torch.int32)[:8] for x in (mine, whole))
            assert torch.equal(logp[sound], want[sound])
            assert torch.isnan(logp.view(torch.float32)[4:7]).all()
        # the order of ids decides nothing else: a rank that is asked for another's columns gives other bits
        swapped = torch.cat([*logits.chunk(world, 1)][::-1], 1)
        if vocab == columns * world:
            over_ranks(swapped, world, seeds, positions, temp, kinds, vocab, out)
            assert not torch.equal(out[0][0, :4], whole[0, :4])


@pytest.mark.parametrize("name", ["draw", "draw_ranks"])
def test_interpreter(name):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[f"body_{sys.argv[1]}"]()
