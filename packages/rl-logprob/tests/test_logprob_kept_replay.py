"""A trainer that replays the kept ids has the sampler's log-probability, on every layout, and exact gradients."""

import pytest
import torch
from kept_case import TILE, VOCAB, make

import rl_gemm
import rl_logprob as lp
from rl_contract.testing import on_ranks
from rl_logprob import linear_cpu

FILTERS = [{"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]


def bits(x):
    return x.contiguous().view(torch.int32)


def drawn(logits, support, temperature=0.8):
    rows = torch.arange(len(logits))
    return lp.gumbel_sample(
        logits, rows * 0 + 5, rows, vocab_size=VOCAB, temperature=temperature, support=support
    )  # fmt: skip


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
    monkeypatch.setattr(linear_cpu, "CHUNK_ELEMENTS", 37 * TILE * 2)
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
