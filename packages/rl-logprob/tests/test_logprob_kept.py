"""Top-k, top-p and min-p: which ids are kept.

The oracle sorts in Python and adds exact fractions; where it and the kernels could differ by the steps of 2**-42 in
which weights are held, the data keep away or the oracle takes the same steps.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_logprob as lp
from rl_contract import ContractError


def kept_oracle(row, temperature, top_k, top_p, min_p):
    """The kept ids of one row by the definition: a sort, then exact sums."""
    x = [float(v) for v in (row / torch.tensor(temperature, dtype=torch.float32))]
    top = max(x)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if min_p > 0:
        order = [i for i in order if x[i] - top >= math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weight = [Fraction(math.floor(math.exp(max(x[i] - top, -690.0)) * 2.0**42 + 0.5)) for i in order]
        # 0.9 of 30 equal weights is 27 of them in fp64, though the number 0.9 stands for is a little more
        goal, count, total = Fraction(top_p * float(sum(weight))), 0, Fraction(0)
        while total < goal:
            total += weight[count]
            count += 1
        order = order[:count]
    return sorted(order)


def listed(support, logits, vocab, temperature=1.0):
    found = support.ids(logits, vocab_size=vocab, temperature=temperature)
    return [sorted(part.tolist()) for part in found.ids.split(found.starts.diff().tolist())]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 3, 7, 39, 40, 1000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    st.sampled_from([0.0, 1e-6, 0.05, 0.3, 1.0]),
    # few values, so that ties are common, and masked ids
    st.sampled_from(["normal", "ties", "same", "masked"]),
    st.integers(0, 10_000),
)
def test_kept_ids_are_those_of_the_definition(vocab, temperature, top_k, top_p, min_p, kind, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab + 5, generator=g) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "same":
        logits = torch.zeros_like(logits) - 2.5
    elif kind == "masked":
        logits[:, 1:vocab:2] = -torch.inf
    logits[:, vocab:] = 1e30
    support = lp.sampling_support(
        logits, vocab_size=vocab, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    want = [kept_oracle(row[:vocab], temperature, top_k, top_p, min_p) for row in logits]
    assert listed(support, logits, vocab, temperature) == want


def test_large_rows_and_rows_with_parameters_of_their_own():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 20_000, generator=g) * 4
    k, p, m = torch.tensor([0, 50, 0, 0, 20_000, 17]), [1.0, 1.0, 0.9, 1.0, 0.95, 0.8], [0.0, 0.0, 0.0, 0.02, 0.0, 0.01]
    support = lp.sampling_support(
        logits, vocab_size=20_000, top_k=k, top_p=torch.tensor(p, dtype=torch.float64),
        min_p=torch.tensor(m, dtype=torch.float64),
    )  # fmt: skip
    want = [kept_oracle(logits[t], 1.0, int(k[t]), p[t], m[t]) for t in range(6)]
    assert listed(support, logits, 20_000) == want
    assert len(want[0]) == 20_000
    assert len(want[1]) == 50
    assert 50 < len(want[2]) < 5000


def test_order_of_the_filters_is_min_p_top_k_top_p():
    """Probabilities 0.5, 0.3, 0.1, 0.06, 0.04: every other order keeps other ids."""
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    # min-p leaves three, top-k leaves two of weight 0.8, and 0.6 of that is reached by the first alone (0.625)
    support = lp.sampling_support(logits, vocab_size=5, min_p=0.15, top_k=2, top_p=0.6)
    assert listed(support, logits, 5) == [[0]]
    assert listed(lp.sampling_support(logits, vocab_size=5, top_p=0.6), logits, 5) == [[0, 1]]


def test_edges():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, -1.0, 0.0]])

    def kept(**kw):
        return listed(lp.sampling_support(logits, vocab_size=4, **kw), logits, 4)

    everything = [[0, 1, 2, 3]] * 3
    assert kept() == kept(top_k=4) == kept(top_k=9) == kept(top_k=-1) == kept(top_p=1.0) == everything
    # the likeliest id always stays, of equal ones the lowest
    assert kept(top_k=1) == kept(top_p=1e-12) == [[1], [0], [0]]
    assert kept(top_p=5e-324) == [[1], [0], [0]]
    assert kept(min_p=1.0) == [[1, 2], [0, 1, 2, 3], [0, 1, 3]]
    assert kept(top_k=2) == [[1, 2], [0, 1], [0, 1]]
    assert kept(top_p=0.5) == [[1, 2], [0, 1], [0, 1]]
    assert kept(min_p=5e-324) == everything


def test_rows_that_are_not_finite_keep_everything_and_are_named_by_what_scores_them():
    logits = torch.randn(4, 50)
    logits[1, 49], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    support = lp.sampling_support(logits, vocab_size=50, top_k=3)
    assert [len(row) for row in listed(support, logits, 50)] == [3, 50, 50, 50]
    targets = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ContractError, match="row 1 hold a NaN"):
        lp.selected_logprob(logits, targets, vocab_size=50, support=support)
    # also where the bad id is not kept
    one = lp.SupportKey(torch.full((4,), 1e9), torch.zeros(4, dtype=torch.int64))
    for given_ in (one, lp.SupportIds.from_lists([[0]] * 4)):
        got = lp.selected_logprob(logits, targets, vocab_size=50, support=given_, nonfinite="nan")
        assert torch.isnan(got).tolist() == [False, True, True, True]
    with pytest.raises(ContractError, match="row 1 hold a NaN"):
        lp.gumbel_sample(logits, targets, targets, vocab_size=50, support=given_)


def test_a_cumulative_sum_in_fp32_would_keep_other_ids():
    """What the integers are for: two orders of one fp32 sum keep different ids, the integers the same."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 32_000, generator=g) * 0.5
    p = torch.softmax(logits, 1).sort(1, descending=True).values
    up, down = p.flip(1).cumsum(1).flip(1) > 1 - 0.9, p.cumsum(1) - p < 0.9
    assert not torch.equal(up.sum(1), down.sum(1)), "two orders of an fp32 sum"
    support = lp.sampling_support(logits, vocab_size=32_000, top_p=0.9)
    order = torch.randperm(32_000, generator=g)
    again = lp.sampling_support(logits[:, order], vocab_size=32_000, top_p=0.9)
    assert torch.equal(support.threshold, again.threshold)


def test_zero_rows():
    logits, none = torch.empty(0, 20), torch.empty(0, dtype=torch.int64)
    key = lp.sampling_support(logits, vocab_size=20, top_p=0.5)
    assert len(key) == 0
    logp, rescued = lp.selected_logprob(logits, none, vocab_size=20, support=key, return_rescued=True)
    assert logp.shape == rescued.shape == (0,)
    assert lp.gumbel_sample(logits, none, none, vocab_size=20, support=key).shape == (0,)
