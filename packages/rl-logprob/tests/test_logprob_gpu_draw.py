"""One call that draws, scores and ranks on a GPU: the bits of the single operators, alone, padded and in a graph."""

import pytest
import torch

import rl_logprob as lp
from rl_logprob import draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

V = 151936


def batch(rows, seed=0):
    """Logits [rows, V] of a wider tensor, seeds, positions, temperatures, kinds; every third row is greedy."""
    g = torch.Generator("cuda").manual_seed(seed)
    whole = torch.randn(rows, V + 64, generator=g, device="cuda") * 3
    whole[:, V:] = torch.nan
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=g, device="cuda")
    positions = torch.randint(0, 40960, (rows,), generator=g, device="cuda")
    kinds = (torch.arange(rows, device="cuda") % 3 == 2).long()
    temperature = torch.where(kinds == 1, 1.0, torch.rand(rows, generator=g, device="cuda") + 0.5)
    return whole[:, :V], seeds, positions, temperature, kinds


def call(given, out=None, bad=None):
    out = torch.full((3, len(given[0])), -7, device="cuda") if out is None else out
    bad = torch.zeros(1, dtype=torch.int64, device="cuda") if bad is None else bad
    draw.draw_scored(*given, vocab_size=V, bad=bad, out=out)
    return out, bad


def wanted(logits, seeds, positions, temperature, kinds):
    drawn = lp.gumbel_sample(logits, seeds, positions, vocab_size=V, temperature=temperature)
    ids = torch.where(kinds == 1, lp.greedy_sample(logits, vocab_size=V), drawn)
    logp = lp.selected_logprob(logits, ids, vocab_size=V, temperature=temperature)
    return ids, logp, (logits >= logits.gather(1, ids[:, None])).sum(1)


@pytest.mark.parametrize("rows", [1, 3, 16, 65, 256])
def test_bits_are_those_of_the_single_operators(rows):
    given = batch(rows)
    found = draw.unpack(call(given)[0], rows)
    ids, logp, ranks = wanted(*given)
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.logprobs.view(torch.int32), logp.view(torch.int32))
    assert torch.equal(found.ranks, ranks)
    # temperature 1 as a number takes another way there
    given = (*given[:3], torch.ones_like(given[3]), given[4])
    found = draw.unpack(call(given)[0], rows)
    assert torch.equal(found.logprobs, lp.selected_logprob(given[0], found.ids, vocab_size=V))


def test_batch_row_alone_equals_row_in_batch():
    given = batch(64, seed=5)
    whole = call(given)[0]
    for i in (0, 1, 2, 63):
        alone = call(tuple(x[i : i + 1] for x in given))[0]
        assert torch.equal(alone[:2, 0], whole[:2, i])
        assert torch.equal(draw.unpack(alone, 1).logprobs[0], draw.unpack(whole, 64).logprobs[i])


def test_graph_padding_and_bad_rows():
    given = batch(8, seed=9)
    bad, out = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((3, 8), -7, device="cuda")
    call(given, out, bad)
    eager, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given, out, bad)
    out.fill_(-7)
    graph.replay()
    assert torch.equal(out[:2], eager[:2])
    assert torch.equal(draw.unpack(out, 8).logprobs, draw.unpack(eager, 8).logprobs)
    assert int(bad) == 0
    given[4][5:] = draw.PADDING
    given[0][1, 77], given[0][3, 0], given[0][6, 1] = torch.nan, torch.inf, torch.nan
    given[0][2] = -torch.inf
    graph.replay()
    assert int(bad) == 3
    found = draw.unpack(out, 8)
    assert torch.isnan(found.logprobs[:5]).tolist() == [False, True, True, True, False]
    assert torch.equal(found.ids[[0, 4]], draw.unpack(eager, 8).ids[[0, 4]])
    assert found.ids[1:4].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("world", "rows"), [(2, 1), (2, 64), (4, 65), (8, 7)])
def test_ranks_that_share_the_vocabulary_have_the_bits_of_one(world, rows):
    """Their steps one after the other on one GPU; a tile of 128 ids is cut in two at every boundary."""
    from rl_logprob import triton_draw_ranks as ranks

    logits, seeds, positions, temperature, kinds = batch(rows, seed=world)
    whole, _ = call((logits, seeds, positions, temperature, kinds))
    shards = [x.contiguous() for x in logits.chunk(world, 1)]
    edges = [x[:, :128].contiguous() for x in (*shards[1:], shards[-1])]
    steps = [
        ranks.Step(own, edge, seeds, positions, temperature, kinds, rank, V)
        for rank, (own, edge) in enumerate(zip(shards, edges))
    ]
    found = torch.stack([step.best for step in steps])
    bad, out = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((world, 3, rows), -7, device="cuda")
    sums = torch.stack([step.pick(found, bad, own) for step, own in zip(steps, out)])
    for step, own in zip(steps, out):
        step.finish(sums, own)
        assert torch.equal(own[:2], whole[:2])
        assert torch.equal(own[2].view(torch.int32)[:rows], whole[2].view(torch.int32)[:rows])
    assert int(bad) == 0
