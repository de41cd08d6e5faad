"""Top-k, top-p and min-p: which ids are kept, and that a trainer that replays them has the sampler's log-probability.

The oracle sorts in Python and adds exact fractions; where it and the kernels could differ by the steps of 2**-42 in
which weights are held, the data keep away or the oracle takes the same steps.
"""

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_gemm
import rl_logprob as lp
from rl_contract import ContractError
from rl_contract.testing import on_ranks
from rl_logprob import linear


def bits(x):
    return x.contiguous().view(torch.int32)


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


VOCAB, TILE = 700, 32


def make(tokens=37, hidden=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=g).bfloat16()
    w = torch.full((lp.padded_vocab_size(VOCAB, TILE), hidden), 9.0, dtype=torch.bfloat16)
    w[:VOCAB] = (torch.randn(VOCAB, hidden, generator=g) * 0.6).bfloat16()
    return h, w, rl_gemm.linear(h, w, out_dtype=torch.float32), g


def drawn(logits, support, temperature=0.8):
    rows = torch.arange(len(logits))
    return lp.gumbel_sample(
        logits, rows * 0 + 5, rows, vocab_size=VOCAB, temperature=temperature, support=support
    )  # fmt: skip


FILTERS = [{"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]


@pytest.mark.field_report("R04")
@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_inside_scored_and_replayed_with_the_same_bits(filters):
    h, w, logits, _ = make()
    kw = {"vocab_size": VOCAB, "temperature": 0.8}
    key = lp.sampling_support(logits, **kw, **filters)
    ids = key.ids(logits, **kw)
    targets = drawn(logits, key)
    kept = [set(row.tolist()) for row in ids.ids.split(ids.starts.diff().tolist())]
    assert all(int(t) in k for t, k in zip(targets, kept))
    assert torch.equal(targets, drawn(logits, ids))
    assert not torch.equal(targets, drawn(logits, None)), "the filters must matter for this to show anything"
    kw["vocab_tile"] = TILE
    want, entropy, rescued = lp.selected_logprob(
        logits, targets, support=key, return_entropy=True, return_rescued=True, **kw
    )
    assert not rescued.any()
    # the exact values: a softmax over the kept ids
    x = logits[:, :VOCAB].double() / 0.8
    mask = torch.tensor([[i in k for i in range(VOCAB)] for k in kept])
    exact = torch.log_softmax(x.masked_fill(~mask, -torch.inf), 1)
    torch.testing.assert_close(want.double(), exact.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        entropy.double(), -torch.where(mask, exact.exp() * exact, 0.0).sum(1), rtol=1e-6, atol=1e-6
    )
    for support in (key, ids):
        got = lp.selected_logprob(logits, targets, support=support, return_entropy=True, **kw)
        assert torch.equal(bits(got[0]), bits(want))
        assert torch.equal(bits(got[1]), bits(entropy))
        got = lp.linear_logprob(h, w, targets, support=support, return_entropy=True, return_rescued=True, **kw)
        assert torch.equal(bits(got[0]), bits(want))
        assert torch.equal(bits(got[1]), bits(entropy))
        assert not got[2].any()
    assert float((want - lp.selected_logprob(logits, targets, **kw)).min()) > 0


def grads(h, w, targets, support, comm=None, **kw):
    h = h.clone().requires_grad_()
    w = (w if comm is None else w.chunk(comm.world_size)[comm.rank]).clone().requires_grad_()
    logp, entropy, rescued = lp.linear_logprob(
        h, w, targets, vocab_size=VOCAB, vocab_tile=TILE, temperature=0.8, support=support, comm=comm, leaves=8,
        return_entropy=True, return_rescued=True, **kw,
    )  # fmt: skip
    g = torch.linspace(-1, 1, len(h))
    with torch.autograd.set_multithreading_enabled(False):
        (logp * g + entropy * g.flip(0)).sum().backward()
    return logp.detach(), entropy.detach(), rescued, h.grad, w.grad


@pytest.mark.parametrize("form", ["key", "ids"])
def test_layout_tp_1_2_4_8_and_chunks(form, monkeypatch):
    h, w, logits, g = make()
    targets = torch.randint(0, VOCAB, (37,), generator=g)
    support = lp.sampling_support(logits, vocab_size=VOCAB, temperature=0.8, top_p=0.8)
    if form == "ids":
        support = support.ids(logits, vocab_size=VOCAB, temperature=0.8)
    want = grads(h, w, targets, support)
    assert 0 < int(want[2].sum()) < 37, "some targets must be outside, some inside"
    monkeypatch.setattr(linear, "CHUNK_ELEMENTS", 37 * TILE * 2)
    for got in (grads(h, w, targets, support), *on_ranks(2, lambda comm: grads(h, w, targets, support, comm)[:4])):
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    for world in (2, 4, 8):
        parts = on_ranks(world, lambda comm: grads(h, w, targets, support, comm))
        assert all(torch.equal(a, b) for part in parts for a, b in zip(part[:4], want))
        assert torch.equal(torch.cat([p[4] for p in parts]), want[4])


@pytest.mark.parametrize("form", ["key", "ids"])
def test_gradients_against_fp64_and_rescued_targets(form):
    h, w, logits, g = make()
    h, w = h.float(), w.float()
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    targets = torch.randint(0, VOCAB, (37,), generator=g)
    support = lp.sampling_support(logits, vocab_size=VOCAB, temperature=0.8, top_k=30)
    ids = support.ids(logits, vocab_size=VOCAB, temperature=0.8)
    logp, _, rescued, dh, dw = grads(h, w, targets, support if form == "key" else ids)
    a, b = h.double().requires_grad_(), w[:VOCAB].double().requires_grad_()
    mask = torch.zeros(37, VOCAB, dtype=torch.bool)
    for t, row in enumerate(ids.ids.split(ids.starts.diff().tolist())):
        mask[t, row.long()] = True
    inside = mask[torch.arange(37), targets]
    assert torch.equal(rescued, ~inside)
    mask[torch.arange(37), targets] = True
    exact = torch.log_softmax((a @ b.t() / 0.8).masked_fill(~mask, -torch.inf), 1)
    entropy = -torch.where(mask, exact.exp() * exact.masked_fill(~mask, 0.0), 0.0).sum(1)
    chosen = exact.gather(1, targets[:, None])[:, 0]
    coefficient = torch.linspace(-1, 1, 37)
    (chosen * coefficient + entropy * coefficient.flip(0)).sum().backward()
    torch.testing.assert_close(logp.double(), chosen.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dh.double(), a.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dw[:VOCAB].double(), b.grad, rtol=1e-4, atol=1e-5)


def test_a_rescued_target_has_the_value_of_a_support_with_it():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    support = lp.sampling_support(logits, vocab_size=4, top_k=2)
    got, rescued = lp.selected_logprob(logits, torch.tensor([3]), vocab_size=4, support=support, return_rescued=True)
    listed_ = lp.SupportIds.from_lists([[0, 1, 3]])
    assert bool(rescued)
    assert torch.equal(got, lp.selected_logprob(logits, torch.tensor([3]), vocab_size=4, support=listed_))


def test_a_support_is_cut_and_joined_by_rows():
    _, _, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, top_p=0.8)
    ids = key.ids(logits, vocab_size=VOCAB)
    for whole in (key, ids):
        again = type(whole).cat([whole[:5], whole[5:5], whole[5:37]])
        assert len(again) == 37
        held = ("threshold", "last_id") if whole is key else ("ids", "starts")
        assert all(torch.equal(getattr(again, name), getattr(whole, name)) for name in held)
    order = torch.randperm(37)
    assert torch.equal(key[order].threshold, lp.sampling_support(logits[order], vocab_size=VOCAB, top_p=0.8).threshold)


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


def test_refusals():
    logits, targets = torch.randn(3, 20), torch.zeros(3, dtype=torch.int64)
    key = lp.sampling_support(logits, vocab_size=20, top_k=2)
    cases = [
        (lambda: lp.sampling_support(logits, vocab_size=20, top_p=0.0), "top_p=0.0 in row 0"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_p=1.5), "top_p=1.5"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_p=math.nan), "top_p=nan"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_k=-2), "top_k=-2"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_k=2.0), "top_k=2.0; needs an integer"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_k=torch.ones(3)), "needs integers"),
        (lambda: lp.sampling_support(logits, vocab_size=20, min_p=torch.tensor([0.0, 0.5, 2.0])), "min_p=2.0 in row 2"),
        (lambda: lp.sampling_support(logits, vocab_size=20, min_p=torch.zeros(2)), r"floats \[3\]"),
        (lambda: lp.sampling_support(logits, vocab_size=20, temperature=0.0), "temperature 0.0"),
        (lambda: lp.sampling_support(torch.empty(0, 2**21), vocab_size=2**21), "up to 1048576"),
        (lambda: lp.selected_logprob(logits, targets, vocab_size=20, support=key[:2]), "support has 2 rows"),
        (lambda: lp.selected_logprob(logits, targets, vocab_size=20, support=[1]), "support is a list"),
        (lambda: lp.gumbel_sample(logits, targets, targets, vocab_size=20, support=key[:1]), "support has 1 rows"),
        (
            lambda: lp.selected_logprob(
                logits, targets, vocab_size=20, support=lp.SupportIds.from_lists([[1], [20], [2]])
            ),
            r"ids 1\.\.20; supported: 0\.\.19",
        ),
        (lambda: lp.SupportKey([1], 2), "threshold is list"),
        (lambda: lp.SupportKey(torch.zeros(3), 2), "last_id is int"),
        (lambda: lp.SupportIds([1], torch.tensor([0, 1])), "ids is list"),
        (lambda: lp.SupportIds(torch.zeros(1, dtype=torch.int32), [0, 1]), "starts is list"),
        (lambda: lp.SupportKey(torch.zeros(3), torch.zeros(2, dtype=torch.int64)), "last_id"),
        (lambda: lp.SupportIds(torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2])), "climb from 0"),
        (
            lambda: lp.selected_logprob(
                logits, targets, vocab_size=20, support=lp.SupportKey(torch.full((3,), math.nan), targets)
            ),
            "threshold of row 0 is NaN",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ContractError, match=message):
            call()


def test_lists_of_ids_hold_integers_alone():
    want = lp.SupportIds.from_lists([[1, 5], [7]])
    for rows in ([np.array([1, 5]), torch.tensor([7])], [(1, np.int64(5)), [7]]):
        got = lp.SupportIds.from_lists(rows)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.starts, want.starts)
    for rows, words in (
        ([[1.5], [5.9]], "row 0 lists the id 1.5"),
        ([[1], [5.0]], "row 1 lists the id 5.0"),
        ([[True]], "the id True"),
        ([["1"]], "the id '1'"),
        (["12"], "row 0 of the kept ids is '12'"),
        ([[1], 3], "row 1 of the kept ids is 3"),
        ([[-1]], "the id -1"),
        ([[2**31]], "the id 2147483648"),
        ([np.array([1.5])], "the id 1.5"),
        ([torch.tensor([1.0])], "the id 1.0"),
    ):
        with pytest.raises(ContractError, match=words):
            lp.SupportIds.from_lists(rows)


def users(logits, h, w, support, temperature, **kw):
    """Every function that takes a support, by name."""
    targets = torch.zeros(len(logits), dtype=torch.int64)
    given_ = {"vocab_size": VOCAB, "temperature": temperature, "support": support}
    return {
        "selected": lambda: lp.selected_logprob(logits, targets, vocab_tile=TILE, **given_, **kw),
        "linear": lambda: lp.linear_logprob(h, w, targets, vocab_tile=TILE, **given_, **kw),
        "gumbel": lambda: lp.gumbel_sample(logits, targets, targets, **given_),
        "ids": lambda: support.ids(logits, vocab_size=VOCAB, temperature=temperature),
    }


ROWS = torch.linspace(0.5, 2.0, 37)


@pytest.mark.parametrize(
    ("made", "used", "words"),
    [
        (0.5, 1.0, r"made at temperature 0\.5 and is used at 1, in row 0"),
        (1.0, 0.5, r"made at temperature 1 and is used at 0\.5, in row 0"),
        (ROWS, ROWS.flip(0), r"made at temperature 0\.5 and is used at 2, in row 0"),
        (ROWS, 0.5, "is used at 0.5, in row 1"),
        (0.5, ROWS, r"made at temperature 0\.5 and is used at .*in row 1"),
    ],
)
def test_a_key_is_refused_at_another_temperature(made, used, words):
    h, w, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, temperature=made, top_k=5)
    for call in users(logits, h, w, key, used).values():
        with pytest.raises(ContractError, match=words):
            call()
    for call in users(logits, h, w, key, made).values():
        call()


def test_a_temperature_follows_its_rows_and_costs_no_byte_a_row():
    _, _, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, temperature=ROWS, top_k=5)
    assert torch.equal(key.temperature, ROWS)
    assert torch.equal(key[3:9].to("cpu").temperature, ROWS[3:9])
    assert key[4:5].temperature == float(ROWS[4])
    assert torch.equal(key[torch.tensor([7, 2])].temperature, ROWS[[7, 2]])
    again = lp.SupportKey.cat([key[:1], key[1:1], key[1:2], key[2:]])
    assert torch.equal(again.temperature, ROWS)
    same = lp.SupportKey.cat([key[4:5], key[4:5]])
    assert same.temperature == float(ROWS[4])
    bare = lp.SupportKey(key.threshold, key.last_id)
    assert bare.temperature is lp.SupportKey.cat([key, bare]).temperature is None
    assert pickle.loads(pickle.dumps(same)).temperature == same.temperature
    assert pickle.loads(pickle.dumps(key)).temperature is None
    assert len(pickle.dumps(key)) == len(pickle.dumps(bare))
    # 0.8 in fp64 and in fp32 are one temperature, as they are to the kernels
    near = lp.sampling_support(logits, vocab_size=VOCAB, temperature=torch.full((37,), 0.8), top_k=5)
    near.ids(logits, vocab_size=VOCAB, temperature=0.8)
    with pytest.raises(ContractError, match="temperature -1"):
        lp.SupportKey(key.threshold, key.last_id, -1.0)


def test_a_caller_who_divided_names_the_temperature():
    h, w, logits, _ = make()
    key = lp.sampling_support(logits / 0.5, vocab_size=VOCAB, top_k=5)
    key = dataclasses.replace(key, temperature=0.5)
    whole = lp.sampling_support(logits, vocab_size=VOCAB, temperature=0.5, top_k=5)
    want = users(logits, h, w, whole, 0.5)["linear"]()
    assert torch.equal(users(logits, h, w, key, 0.5)["linear"](), want)


def test_a_support_without_an_id_is_refused_by_name():
    h, w, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, temperature=0.5, top_k=5)
    unknown = lp.SupportKey(key.threshold, key.last_id)
    empty = [not bool(row.any()) for row in logits[:, :VOCAB] >= key.threshold[:, None]]
    first, count = empty.index(True), sum(empty)
    for name, call in users(logits, h, w, unknown, 1.0).items():
        rows = r"\d+" if name == "gumbel" else count
        shown = rf"support of row {first} keeps no id \({rows} such rows\).*another temperature"
        with pytest.raises(ContractError, match=shown):
            call()
    listed_ = lp.SupportIds.from_lists([[], *[[0]] * 36])
    for name, call in users(logits, h, w, listed_, 1.0).items():
        if name != "ids":
            with pytest.raises(ContractError, match="support of row 0 keeps no id"):
                call()
    logp, rescued = users(logits, h, w, unknown, 1.0, nonfinite="nan", return_rescued=True)["selected"]()
    assert bool(rescued[empty].all())
    assert not bool(logp[empty].any())
    # one kept id that equals the target's value is no empty support
    ties = torch.zeros(1, 4)
    only = lp.sampling_support(ties, vocab_size=4, top_k=1)
    got = lp.selected_logprob(ties, torch.tensor([3]), vocab_size=4, support=only)
    torch.testing.assert_close(got, torch.tensor([-math.log(2.0)]))


def test_zero_rows():
    logits, none = torch.empty(0, 20), torch.empty(0, dtype=torch.int64)
    key = lp.sampling_support(logits, vocab_size=20, top_p=0.5)
    assert len(key) == 0
    logp, rescued = lp.selected_logprob(logits, none, vocab_size=20, support=key, return_rescued=True)
    assert logp.shape == rescued.shape == (0,)
    assert lp.gumbel_sample(logits, none, none, vocab_size=20, support=key).shape == (0,)
