"""The sampler: its choice depends on logits, seed and position alone, and has the right distribution."""

import math

import numpy as np
import pytest
import torch

import rl_logprob as lp
from rl_contract import ContractError
from rl_logprob import sampling


def test_frequencies_follow_the_softmax_over_positions_and_over_seeds():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(100_000, 4)
    n, same, each = 100_000, torch.full((100_000,), 5), torch.arange(100_000)
    for temperature in (1.0, 0.5):
        p = torch.softmax(logits[0].double() / temperature, 0)
        for seeds, positions in ((same, each), (each, same)):
            ids = lp.gumbel_sample(logits, seeds, positions, vocab_size=4, temperature=temperature)
            seen = torch.bincount(ids, minlength=4).double()
            # 0.9999 quantile of chi-squared with 3 degrees of freedom
            assert float(((seen - n * p) ** 2 / (n * p)).sum()) < 21.1


def test_neighbouring_positions_are_independent():
    logits = torch.zeros(1 << 16, 2)
    ids = lp.gumbel_sample(logits, torch.zeros(1 << 16, dtype=torch.int64), torch.arange(1 << 16), vocab_size=2)
    x = ids.double() * 2 - 1
    for lag in (1, 2, 3, 64):
        assert abs(float((x[lag:] * x[:-lag]).mean())) < 4 / math.sqrt(1 << 16)


@pytest.mark.field_report("R30")
def test_batch_choice_does_not_depend_on_mates_order_padding_or_threads():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 5000, generator=g) * 3
    seeds, positions = torch.arange(300) % 7, torch.arange(300)
    whole = lp.gumbel_sample(logits, seeds, positions, vocab_size=4999)
    order = torch.randperm(300, generator=g)
    assert torch.equal(lp.gumbel_sample(logits[order], seeds[order], positions[order], vocab_size=4999), whole[order])
    logits[:, 4999] = float("nan")
    assert torch.equal(lp.gumbel_sample(logits, seeds, positions, vocab_size=4999), whole)
    for i in (0, 150, 299):
        one = lp.gumbel_sample(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], vocab_size=4999)
        assert torch.equal(one, whole[i : i + 1])
    assert not torch.equal(lp.gumbel_sample(logits, seeds + 1, positions, vocab_size=4999), whole)
    assert not torch.equal(lp.gumbel_sample(logits, seeds, positions + 1, vocab_size=4999), whole)


def splitmix_choice(row, seed, position, vocab):
    """The definition, in Python integers and floats, without the shortcut over ids that cannot win."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask)
    values = []
    for i in range(vocab):
        u = ((mix((key + (i + 1) * golden) & mask) >> 12) + 0.5) * 2.0**-52
        values.append(float(row[i]) - math.log(-math.log(u)))
    return max(range(vocab), key=lambda i: (values[i], -i))


def test_choice_equals_the_definition():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 97, generator=g) * 2
    seeds = torch.tensor([lp.request_seed(1, i) for i in range(200)])
    positions = torch.randint(0, 1 << 40, (200,), generator=g)
    ids = lp.gumbel_sample(logits, seeds, positions, vocab_size=97)
    for t in range(200):
        want = splitmix_choice(logits[t], int(seeds[t]) & ((1 << 64) - 1), int(positions[t]), 97)
        assert int(ids[t]) == want


def test_the_bound_never_hides_a_winner():
    """The shortcut's bound is above the noise for random and for extreme hashes."""
    import numba as nb
    import numpy as np

    @nb.njit
    def gap(r):
        return np.array([sampling._noise_bound(x) - sampling._noise(x) for x in r])

    edge = np.array([0, 1, 2, (1 << 52) - 1, (1 << 52) - 2, (1 << 52) - 3, 1 << 51], dtype=np.uint64)
    r = np.concatenate((edge, np.random.default_rng(0).integers(0, 1 << 52, 100_000, dtype=np.uint64)))
    assert gap(r).min() > 0
    assert np.isfinite(gap(r)).all()


def test_ties_take_the_lowest_id_and_masked_ids_are_never_drawn():
    x = torch.zeros(4, 9)
    x[1, 5] = x[1, 7] = 1.0
    x[2, :8] = -torch.inf
    assert lp.greedy_sample(x, vocab_size=9).tolist()[:3] == [0, 5, 8]
    assert lp.gumbel_sample(
        x[2:3], torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), vocab_size=9
    ).tolist() == [8]


@pytest.mark.field_report("R79")
def test_r79_padding_of_the_head_is_never_sampled():
    """Ids from the tokenizer's size on carry the largest logits here, and still are not drawn."""
    logits = torch.zeros(2000, 128)
    logits[:, 100:] = 30.0
    ids = lp.gumbel_sample(logits, torch.zeros(2000, dtype=torch.int64), torch.arange(2000), vocab_size=100)
    assert int(ids.max()) < 100
    assert len(ids.unique()) == 100


def test_request_seed_depends_on_run_and_request():
    seeds = {lp.request_seed(run, request) for run in range(50) for request in range(50)}
    assert len(seeds) == 2500
    assert lp.request_seed(1, "a") == lp.request_seed(1, "a")
    assert all(-(2**63) <= s < 2**63 for s in seeds)


def test_request_seed_keeps_its_values_and_tells_numbers_from_texts():
    # the first eight bytes of sha256 of "1\n1" and of "1\na"
    assert lp.request_seed(1, 1) == lp.request_seed(np.int64(1), np.int32(1)) == 7336315901989508037
    assert lp.request_seed(1, "a") == -4950207571795532665
    names = [1, "1", '"1', '""1', -1, "-1", 10, "10", "01", "a", '"a', "", '"']
    assert len({lp.request_seed(1, name) for name in names}) == len(names)
    # no integer is too large for a seed of its own
    assert len({lp.request_seed(run, 1) for run in (0, 2**64, 2**70, -(2**70))}) == 4
    assert len({lp.request_seed(1, request) for request in (0, 2**64, 2**70, -(2**70))}) == 4
    long = [10**5000, -(10**5000), 10**5000 + 1]
    assert len({lp.request_seed(*pair) for x in long for pair in ((1, x), (x, 1))}) == 6
    assert (
        lp.request_seed(1, 10**4000) == lp.request_seed(1, int("1" + "0" * 4000)) != lp.request_seed(1, str(10**4000))
    )
    assert lp.request_seed(1, "\ud800") != lp.request_seed(1, "?")
    for run, request in ((None, 1), (1.0, 1), ("1", 1), (True, 1), (1, None), (1, 1.0), (1, True), (1, b"1")):
        with pytest.raises(ContractError, match="request_seed got r"):
            lp.request_seed(run, request)


def test_refusals():
    logits, seeds = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    bad = logits.clone()
    bad[2, 1] = float("nan")
    dead = torch.full((3, 8), -torch.inf)
    cases = [
        (lambda: lp.gumbel_sample(bad, seeds, seeds, vocab_size=8), "logits of row 2 hold"),
        (lambda: lp.greedy_sample(dead, vocab_size=8), "logits of row 0 hold"),
        (lambda: lp.gumbel_sample(logits, seeds.int(), seeds, vocab_size=8), "seeds are torch"),
        (lambda: lp.gumbel_sample(logits, seeds, seeds[:2], vocab_size=8), "positions are torch"),
        (lambda: lp.gumbel_sample(logits, [0, 0, 0], seeds, vocab_size=8), "seeds is list"),
        (lambda: lp.gumbel_sample(logits, seeds, None, vocab_size=8), "positions is NoneType"),
        (lambda: lp.greedy_sample([[0.0]], vocab_size=1), "logits is list"),
        (lambda: lp.gumbel_sample(logits, seeds, seeds, vocab_size=8, temperature=1e300), r"temperature=1e\+300"),
        (lambda: lp.gumbel_sample(logits, seeds, seeds, vocab_size=9), "at least vocab_size=9"),
        (lambda: lp.gumbel_sample(logits, seeds, seeds, vocab_size=8, temperature=0), "temperature 0"),
    ]
    for call, message in cases:
        with pytest.raises(ContractError, match=message):
            call()
