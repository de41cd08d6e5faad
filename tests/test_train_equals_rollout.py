"""Train equals rollout, from the packages alone: packed training forward, chunked prefill, decode, any TP, any batch.

Together these are the promise ``train``: if a token's log-probability is the same for every chunking and every batch on
the paged side, and equal to the packed side, then no schedule of a rollout engine can make the two engines differ.
"""

import pytest
import torch
from decoder import VOCAB, Decoder, Rollout, make_weights, shard

from rl_contract import compare, launches, reset_launches
from rl_contract.testing import on_ranks

LENGTHS = [1 + 1, 63, 64, 65, 130, 511, 513, 17]
TEMPERATURE = 0.7


def sequences(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    verdict = compare(torch.cat(a), torch.cat(b))
    assert verdict.mismatch_count == 0, verdict
    assert verdict.nonfinite_count == 0
    assert verdict.valid_count == sum(n - 1 for n in LENGTHS)


@pytest.fixture(scope="module")
def trained():
    return Decoder(make_weights(0)).train_logprob(sequences(), TEMPERATURE)


@pytest.mark.field_report("R26")
@pytest.mark.parametrize("chunk", [7, 64, 513])
def test_train_equals_chunked_rollout(trained, chunk):
    reset_launches()
    rolled = Rollout(Decoder(make_weights(0)), len(LENGTHS), max(LENGTHS)).score(sequences(), chunk, TEMPERATURE)
    assert_equal(trained, rolled)
    layouts = {r["layout"] for r in launches() if r["boundary"] == "attention"}
    assert layouts, "no attention launch was recorded"


@pytest.mark.field_report("R26")
def test_train_equals_decode_token_by_token(trained):
    short = [s[:66] for s in sequences()]
    rolled = Rollout(Decoder(make_weights(0)), len(LENGTHS), 66).score(short, 1, TEMPERATURE)
    for a, b in zip(trained, rolled):
        assert torch.equal(a[: len(b)].view(torch.int32), b.view(torch.int32))


@pytest.mark.field_report("R15")
def test_batch_alone_equals_packed_in_any_order(trained):
    decoder, all_of = Decoder(make_weights(0)), sequences()
    alone = [decoder.train_logprob([s], TEMPERATURE)[0] for s in all_of]
    assert_equal(trained, alone)
    assert_equal(trained, decoder.train_logprob(all_of[::-1], TEMPERATURE)[::-1])


@pytest.mark.field_report("R49")
def test_phase_prefix_hit_equals_cold(trained):
    decoder, s = Decoder(make_weights(0)), sequences()[6]
    rollout = Rollout(decoder, 2, len(s))
    # request 1 shares the first 256 tokens' pages with request 0 and computes only the rest
    rollout.step([(0, s[:256])])
    rollout.table[1, :16] = rollout.table[0, :16]
    rollout.lengths[1] = 256
    (logits,) = rollout.step([(1, s[256:])])
    (cold,) = Rollout(decoder, 1, len(s)).step([(0, s)])
    assert compare(logits, cold[256:]).mismatch_count == 0


@pytest.mark.field_report("R40")
@pytest.mark.parametrize("world", [2, 4])
def test_layout_tp_equals_one_rank(trained, world):
    weights = make_weights(0)
    packed = on_ranks(
        world, lambda comm: Decoder(shard(weights, comm.rank, world), comm).train_logprob(sequences(), TEMPERATURE)
    )
    for rank in packed:
        assert_equal(trained, rank)
    paged = on_ranks(
        world,
        lambda comm: Rollout(Decoder(shard(weights, comm.rank, world), comm), len(LENGTHS), max(LENGTHS)).score(
            sequences(), 100, TEMPERATURE
        ),
    )
    for rank in paged:
        assert_equal(trained, rank)


@pytest.mark.field_report("R14")
@pytest.mark.parametrize("world", [2, 4])
def test_layout_gradients_tp_equal_one_rank(world):
    weights = make_weights(0)
    data = [s[:40] for s in sequences()]

    def gradients(w, comm=None):
        leaves = {k: v.clone().requires_grad_() for k, v in w.items()}
        decoder = Decoder(leaves) if comm is None else Decoder(leaves, comm)
        torch.cat(decoder.train_logprob(data)).sum().backward()
        return {k: v.grad for k, v in leaves.items()}

    one = gradients(weights)
    ranks = on_ranks(world, lambda comm: gradients(shard(weights, comm.rank, world), comm))
    for r, got in enumerate(ranks):
        for name, expected in shard(one, r, world).items():
            assert torch.equal(got[name].view(torch.int16), expected.view(torch.int16)), (name, r)
            assert float(expected.float().abs().max()) > 0, name


def test_another_order_of_addition_is_noticed(trained):
    """One boundary summed in another order must show: otherwise the tests above could not fail."""
    one_leaf = Decoder(make_weights(0), leaves=1)
    got = Rollout(one_leaf, len(LENGTHS), max(LENGTHS)).score(sequences(), 513, TEMPERATURE)
    assert compare(torch.cat(trained), torch.cat(got)).mismatch_count > 0
