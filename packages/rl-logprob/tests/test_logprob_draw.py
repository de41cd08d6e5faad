"""One call that draws, scores and ranks, on the CPU: the bits of the single operators, and rows that mean nothing."""

import pytest
import torch

import rl_logprob as lp
from rl_contract import ContractError, MissingSupport
from rl_contract.testing import on_ranks
from rl_logprob import draw

V, ROWS = 700, 9


def batch():
    g = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**62), 2**62, (ROWS,), generator=g)
    kinds = (torch.arange(ROWS) % 3 == 2).long()
    temperature = torch.where(kinds == 1, 1.0, torch.rand(ROWS, generator=g) + 0.5)
    logits = torch.randn(ROWS, V + 64, generator=g) * 3
    logits[:, V:] = torch.nan
    return [logits, seeds, torch.arange(ROWS), temperature, kinds]


def call(given, **kw):
    kw = {"bad": torch.zeros(1, dtype=torch.int64), "out": torch.full((3, ROWS), -7), "vocab_size": V, **kw}
    draw.draw_scored(*given, **kw)
    return draw.unpack(kw["out"], ROWS), int(kw["bad"])


def test_bits_are_those_of_the_single_operators():
    given = logits, seeds, positions, temperature, kinds = batch()
    found, bad = call(given)
    drawn = lp.gumbel_sample(logits, seeds, positions, vocab_size=V, temperature=temperature)
    ids = torch.where(kinds == 1, lp.greedy_sample(logits, vocab_size=V), drawn)
    logp = lp.selected_logprob(logits, ids, vocab_size=V, temperature=temperature)
    assert bad == 0
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.logprobs.view(torch.int32), logp.view(torch.int32))
    assert torch.equal(found.ranks, (logits[:, :V] >= logits.gather(1, ids[:, None])).sum(1))


@pytest.mark.parametrize("kind", [draw.DRAWN, draw.GREEDY])
@pytest.mark.parametrize("temperature", [0.0, -0.7, 1e-39, -float("inf"), float("inf"), float("nan")])
def test_a_row_without_a_temperature_is_bad_and_changes_no_other(kind, temperature):
    given = batch()
    # which are finite once divided by what is too small
    given[0][4] = 0.0
    whole, _ = call(given)
    given[3][4], given[4][4] = temperature, kind
    found, bad = call(given)
    rest = torch.arange(ROWS) != 4
    assert bad == 1
    assert int(found.ids[4]) == 0
    assert torch.isnan(found.logprobs).tolist() == (~rest).tolist()
    for mine, theirs in zip(found, whole):
        assert torch.equal(mine[rest], theirs[rest])
    given[4][4] = draw.PADDING
    assert call(given)[1] == 0


@pytest.mark.parametrize("kind", [7, 2, -2, 2**32, -(2**40)])
def test_a_row_of_no_kind_is_bad(kind):
    given = batch()
    given[4][0] = kind
    found, bad = call(given)
    assert (bad, int(found.ids[0])) == (1, 0)
    assert torch.isnan(found.logprobs).tolist() == [True] + [False] * (ROWS - 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bad": torch.zeros(0, dtype=torch.int64)}, "bad is torch.int64 (0,)"),
        ({"bad": torch.zeros(2, dtype=torch.int64)}, "bad is torch.int64 (2,)"),
        ({"bad": torch.tensor(0)}, "bad is torch.int64 ()"),
        ({"bad": [0]}, "bad is list"),
        ({"out": torch.zeros(3, ROWS - 1, dtype=torch.int64)}, "out is torch.int64 (3, 8)"),
        ({"out": None}, "out is NoneType"),
        ({"seeds": [0] * ROWS}, "seeds is list"),
        ({"kinds": torch.zeros(ROWS)}, "kinds are torch.float32"),
        ({"kinds": torch.zeros(ROWS, dtype=torch.int64, device="meta")}, "supported: cpu, cuda"),
    ],
)
def test_what_is_no_room_for_a_step_is_refused_and_nothing_is_written(change, named):
    given = dict(zip(("logits", "seeds", "positions", "temperature", "kinds"), batch()))
    kw = {"bad": torch.zeros(1, dtype=torch.int64), "out": torch.full((3, ROWS), -7)}
    before = kw["out"]
    with pytest.raises((ContractError, MissingSupport)) as error:
        draw.draw_scored(**{**given, **kw, **change}, vocab_size=V)
    assert named in str(error.value)
    assert (before == -7).all()


def test_results_share_no_memory_with_what_is_read():
    logits, seeds, positions, temperature, kinds = batch()
    arena = torch.zeros(8 * ROWS, dtype=torch.int64)
    apart = [*arena[: 2 * ROWS].view(2, ROWS), temperature, arena[2 * ROWS : 3 * ROWS]]
    bad, out = torch.zeros(1, dtype=torch.int64), arena[3 * ROWS : 6 * ROWS].view(3, ROWS)
    draw.draw_scored(logits, *apart, vocab_size=V, bad=bad, out=out)
    assert int(bad) == 0
    for given, name in (
        ([logits, out[1], positions, temperature, kinds], "seeds"),
        ([logits, seeds, positions, temperature, arena[6 * ROWS - 1 : 7 * ROWS - 1]], "kinds"),
        ([logits, seeds, positions, out[2].view(torch.float32)[:ROWS], kinds], "temperature"),
    ):
        with pytest.raises(ContractError, match=f"out shares memory with {name}"):
            draw.draw_scored(*given, vocab_size=V, bad=bad, out=out)
    with pytest.raises(ContractError, match="out shares memory with bad"):
        draw.draw_scored(logits, seeds, positions, temperature, kinds, vocab_size=V, bad=out[0, :1], out=out)
    with pytest.raises(ContractError, match="bad shares memory with positions"):
        draw.draw_scored(logits, seeds, positions, temperature, kinds, vocab_size=V, bad=positions[3:4], out=out)


@pytest.mark.parametrize(("world", "columns"), [(2, 350), (2, 384), (4, 191), (8, 100)])
def test_ranks_that_share_the_vocabulary_get_what_one_rank_gets(world, columns):
    given = batch()
    given[0][3, 400], given[0][6, V - 1] = torch.nan, torch.inf
    whole, wrong = call(given)
    wide = torch.full((ROWS, world * columns), torch.nan)
    wide[:, :V] = given[0][:, :V]

    def rank(comm):
        own = wide[:, comm.rank * columns : (comm.rank + 1) * columns]
        return call([own, *given[1:]], comm=comm)

    for found, bad in on_ranks(world, rank):
        assert bad == wrong == 2
        for mine, theirs in zip(found, whole):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_rank_with_too_few_columns_is_refused():
    def rank(comm):
        given = batch()
        given[0] = given[0][:, : V // 2 - (comm.rank == 1)].contiguous()
        return call(given, comm=comm)

    # the other one, which waits among threads, ends with it
    with pytest.raises(ContractError, match=r"logits have shape \(9, 349\); needs \[T, at least vocab_size=350\]"):
        on_ranks(2, rank)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"vocab_size": V - 1}, "vocab_size=699"),
        ({"vocab_tile": 256}, "vocab_tile=256"),
        ({"seeds": torch.arange(ROWS)}, "seeds=int64"),
        ({"rows": 0}, r"seeds=int64 \[0\]"),
    ],
)
def test_ranks_given_other_values_are_refused(given, named):
    def rank(comm):
        own = given if comm.rank else {}
        rows = own.get("rows", ROWS)
        logits, seeds, *rest = (x[:rows] for x in batch())
        seeds = own.get("seeds", seeds)
        kw = {"vocab_size": V, "vocab_tile": 512, **{k: v for k, v in own.items() if k.startswith("vocab")}}
        bad, out = torch.zeros(1, dtype=torch.int64), torch.full((3, rows), -7)
        draw.draw_scored(logits[:, :350].contiguous(), seeds, *rest, bad=bad, out=out, comm=comm, **kw)

    with pytest.raises(ContractError, match=rf"different values: rank 0 draw_scored.*rank 1 .*{named}"):
        on_ranks(2, rank)
