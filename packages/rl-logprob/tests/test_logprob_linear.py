"""Log-probability from hidden states: the bits of materialised logits, of every world size, and right gradients."""

from types import SimpleNamespace

import pytest
import torch

import rl_gemm
import rl_logprob as lp
from rl_contract import ContractError, SingleRank, TokenShards, launches, reset_launches, shares
from rl_contract.testing import ThreadRank, on_ranks
from rl_logprob import linear, linear_cpu, linear_gpu


def bits(x):
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


class MisorderedRank(ThreadRank):
    """Joins partials in ring order from its own rank, as some transports do."""

    def all_reduce(self, partial, *, out_dtype=None):
        parts = self.everyone(partial)
        total = parts[self.rank].clone()
        for i in range(1, self.world_size):
            total += parts[(self.rank + i) % self.world_size]
        return total if out_dtype is None else total.to(out_dtype)


def make(tokens, hidden, vocab, tile, dtype=torch.float32, seed=0, pad=0.0):
    g = torch.Generator().manual_seed(seed)
    padded = lp.padded_vocab_size(vocab, tile)
    h = torch.randn(tokens, hidden, generator=g).to(dtype)
    w = (torch.randn(padded, hidden, generator=g) * 0.3).to(dtype)
    w[vocab:] = pad
    return h, w, torch.randint(0, vocab, (tokens,), generator=g)


def scored(h, w, targets, comm=None, *, grads=None, **kw):
    """(logp, entropy, dhidden, dweight of this rank's rows)"""
    h = h.clone().requires_grad_()
    rows = w if comm is None else w.chunk(comm.world_size)[comm.rank]
    rows = rows.clone().requires_grad_()
    logp, entropy = lp.linear_logprob(h, rows, targets, comm=comm, return_entropy=True, **kw)
    if grads is not None:
        (logp * grads[0] + entropy * grads[1]).sum().backward()
    return logp.detach(), entropy.detach(), h.grad, rows.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_equals_materialised_logits(dtype, monkeypatch):
    h, w, targets = make(203, 72, 3001, 64, dtype)
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    kw = {"vocab_size": 3001, "vocab_tile": 64, "temperature": 0.7}
    want, want_entropy = lp.selected_logprob(logits, targets, return_entropy=True, **kw)
    # an engine holds another padding of the head
    engine = lp.selected_logprob(logits[:, :3008].contiguous(), targets, **kw)
    assert torch.equal(bits(engine), bits(want))
    for elements in (1, 203 * 128, 1 << 30):
        monkeypatch.setattr(linear_cpu, "CHUNK_ELEMENTS", elements)
        reset_launches()
        got, entropy = lp.linear_logprob(h, w, targets, return_entropy=True, **kw)
        chunks = next(r["count"] for r in launches() if r["kernel"].endswith("tile_stats"))
        assert chunks == {1: 47, 203 * 128: 24, 1 << 30: 1}[elements]
        assert torch.equal(bits(got), bits(want))
        assert torch.equal(bits(entropy), bits(want_entropy))
    assert torch.equal(bits(lp.linear_logprob(h, w, targets, **kw)), bits(want))


def test_layout_tp_1_2_4_8_over_a_quarter_million_tokens():
    h, w, targets = make(1 << 18, 8, 59, 8, torch.bfloat16)
    kw = {"vocab_size": 59, "vocab_tile": 8, "temperature": 0.9}
    want = lp.linear_logprob(h, w, targets, **kw)
    for world in (2, 4, 8):

        def body(comm):
            rows = w.chunk(comm.world_size)[comm.rank]
            return lp.linear_logprob(h, rows, targets, comm=comm, leaves=8, **kw)

        for got in on_ranks(world, body):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.field_report("R43")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layout_gradients_equal_at_every_world_size(dtype):
    """Every world holds its share of 8 leaves; targets live on other ranks than the rank that asks."""
    h, w, targets = make(61, 40, 1000, 16, dtype, pad=float("nan"))
    g = torch.Generator().manual_seed(3)
    grads = (torch.randn(61, generator=g), torch.randn(61, generator=g))
    kw = {"vocab_size": 1000, "vocab_tile": 16, "temperature": 0.8, "leaves": 8, "grads": grads}
    want = scored(h, w, targets, **kw)
    for world in (2, 4, 8):
        results = on_ranks(world, lambda comm: scored(h, w, targets, comm, **kw))
        for logp, entropy, dh, _ in results:
            assert torch.equal(bits(logp), bits(want[0]))
            assert torch.equal(bits(entropy), bits(want[1]))
            assert torch.equal(bits(dh), bits(want[2]))
        dw = torch.cat([r[3] for r in results])
        assert torch.equal(bits(dw), bits(want[3]))


def test_misordered_reduction_of_the_hidden_gradient_is_noticed():
    h, w, targets = make(61, 40, 1000, 16)
    grads = (torch.ones(61), torch.zeros(61))
    kw = {"vocab_size": 1000, "vocab_tile": 16, "leaves": 4, "grads": grads}
    want = scored(h, w, targets, **kw)[2]
    ring = on_ranks(4, lambda comm: scored(h, w, targets, comm, **kw)[2], kind=MisorderedRank)
    assert any(not torch.equal(bits(x), bits(want)) for x in ring)
    # and leaves that follow the world instead of the profile
    other = scored(h, w, targets, **{**kw, "leaves": 1})[2]
    assert not torch.equal(bits(other), bits(want))


@pytest.mark.field_report("R41")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("per_row", [False, True])
def test_r41_gradients_against_fp64(dtype, tolerance, per_row):
    h, w, targets = make(47, 56, 777, 32, dtype)
    g = torch.Generator().manual_seed(1)
    grads = (torch.randn(47, generator=g), torch.randn(47, generator=g))
    temperature = torch.rand(47, generator=g) + 0.5 if per_row else 0.7
    logp, entropy, dh, dw = scored(
        h, w, targets, vocab_size=777, vocab_tile=32, temperature=temperature, leaves=4, grads=grads
    )

    h64, w64 = h.double().requires_grad_(), w[:777].double().requires_grad_()
    t64 = temperature[:, None].double() if per_row else torch.tensor(0.7).double()
    ls = torch.log_softmax(h64 @ w64.T / t64, 1)
    h_oracle = -(ls.exp() * ls).sum(1)
    logp_oracle = ls.gather(1, targets[:, None])[:, 0]
    (logp_oracle * grads[0] + h_oracle * grads[1]).sum().backward()
    torch.testing.assert_close(logp.double(), logp_oracle.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), h_oracle.detach(), rtol=1e-6, atol=2e-6)
    for got, want in ((dh, h64.grad), (dw[:777], w64.grad)):
        assert float((got.double() - want).norm() / want.norm()) < tolerance
    assert not dw[777:].any()


def test_main_grad_takes_the_sum_in_fp32_and_inputs_stay_as_they_were():
    h, w, targets = make(33, 24, 200, 16, torch.bfloat16)
    before = h.clone(), w.clone(), targets.clone()
    own = torch.nn.Parameter(w.clone())
    lp.linear_logprob(h, own, targets, vocab_size=200, vocab_tile=16).sum().backward()
    param = torch.nn.Parameter(w.clone())
    param.main_grad = torch.zeros(w.shape)
    for _ in range(2):
        hidden = h.clone().requires_grad_()
        lp.linear_logprob(hidden, param, targets, vocab_size=200, vocab_tile=16).sum().backward()
    assert param.grad is None
    assert torch.equal(bits((param.main_grad / 2).bfloat16()), bits(own.grad))
    assert all(torch.equal(a, b) for a, b in zip(before, (h, w, targets)))
    assert torch.equal(hidden, h)


@pytest.mark.parametrize(
    "bad", [torch.zeros(256, 24, dtype=torch.bfloat16), torch.zeros(512, 24), torch.zeros(24, 256)]
)
def test_another_main_grad_is_refused_and_nothing_is_written(bad):
    h, w, targets = make(33, 24, 200, 16)
    param = torch.nn.Parameter(w.clone())
    assert param.shape == (256, 24)
    param.main_grad = bad
    with pytest.raises(ContractError, match=r"main_grad is torch\.(float32|bfloat16) \("):
        lp.linear_logprob(h, param, targets, vocab_size=200, vocab_tile=16).sum().backward()
    assert not bad.any()
    assert param.grad is None


def test_repeat_backward_gives_the_same_bits_and_frozen_inputs_get_none():
    h, w, targets = make(33, 24, 200, 16)
    grads = (torch.ones(33), torch.zeros(33))
    a, b = (scored(h, w, targets, vocab_size=200, vocab_tile=16, grads=grads) for _ in range(2))
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b))
    hidden = h.clone().requires_grad_()
    lp.linear_logprob(hidden, w, targets, vocab_size=200, vocab_tile=16).sum().backward()
    assert torch.equal(bits(hidden.grad), bits(a[2]))
    rows = w.clone().requires_grad_()
    lp.linear_logprob(h, rows, targets, vocab_size=200, vocab_tile=16).sum().backward()
    assert torch.equal(bits(rows.grad), bits(a[3]))


@pytest.mark.field_report("R09", "R13")
def test_batch_row_alone_equals_row_in_batch():
    h, w, targets = make(130, 48, 600, 32, torch.bfloat16)
    whole = lp.linear_logprob(h, w, targets, vocab_size=600, vocab_tile=32)
    for i in (0, 63, 64, 129):
        alone = lp.linear_logprob(h[i : i + 1], w, targets[i : i + 1], vocab_size=600, vocab_tile=32)
        assert torch.equal(bits(alone), bits(whole[i : i + 1]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = lp.linear_logprob(h, w, targets, vocab_size=600, vocab_tile=32)
    assert torch.equal(bits(inside), bits(whole))


@pytest.mark.field_report("R10", "R16")
def test_r10_r16_the_ratio_of_one_update_is_exactly_one():
    h, w, targets = make(40, 32, 300, 16, torch.bfloat16)
    old = lp.linear_logprob(h, w, targets, vocab_size=300, vocab_tile=16).detach()
    current = lp.linear_logprob(h.clone().requires_grad_(), w, targets, vocab_size=300, vocab_tile=16)
    ratio = (current - old).exp()
    assert torch.equal(ratio, torch.ones(40))
    m = lp.rollout_metrics(old, current, torch.ones(40, dtype=torch.bool))
    assert m["bitwise_equal"]
    assert m["kl_rollout_to_train"] == m["k3"] == 0.0
    assert m["ratio_histogram"]["exactly 1"] == 40


def test_zero_rows_go_through_forward_and_backward():
    h, w, targets = make(0, 24, 200, 16)
    logp, _, dh, dw = scored(h, w, targets, vocab_size=200, vocab_tile=16, grads=(torch.ones(0), torch.ones(0)))
    assert logp.shape == (0,)
    assert dh.shape == (0, 24)
    assert not dw.any()


def test_refusals_name_what_was_given():
    h, w, targets = make(5, 24, 200, 16)  # 256 rows

    def call(h=h, w=w, targets=targets, **kw):
        return lp.linear_logprob(h, w, targets, **{"vocab_size": 200, "vocab_tile": 16, **kw})

    nan_hidden = h.clone()
    nan_hidden[3, 0] = float("nan")
    cases = [
        (lambda: call(w=w[:200]), "weight has 200 rows; supported: whole tiles of 16"),
        (lambda: call(w=w[:192]), "1 shards of 192 rows do not hold vocab_size=200"),
        (lambda: call(w=w[:0]), "weight has 0 rows"),
        (lambda: call(w=w[:, :23]), "needs .T, H. and .V_padded/t, H. with one H"),
        (lambda: call(w=w.bfloat16()), "one type"),
        (lambda: call(leaves=3), "leaves=3"),
        (lambda: call(leaves=2.0), r"leaves=2\.0"),
        (lambda: call(leaves=True), "leaves=True"),
        (lambda: call(keep_logits="all"), "keep_logits=.all."),
        (lambda: call(support=[1]), "support is a list"),
        (lambda: call(leaves=32), "leaves=32 cut 256 ids into parts of 8"),
        (lambda: call(targets=torch.tensor([0, 1, 2, 3, 210])), "target 210 in row 4"),
        (lambda: call(temperature=-0.5), "temperature -0.5"),
        (lambda: call(h=nan_hidden), "logits of row 3 hold"),
        (lambda: on_ranks(2, lambda c: call(w=w.chunk(2)[c.rank], comm=c, leaves=1)), "leaves=1 on 2 ranks"),
        (
            lambda: on_ranks(2, lambda c: call(h=nan_hidden, w=w.chunk(2)[c.rank], comm=c, leaves=2)),
            "logits of row 3 hold",
        ),
    ]
    for call_, message in cases:
        with pytest.raises(ContractError, match=message):
            call_()


def test_unequal_shards_are_refused_on_every_rank():
    """The gather sees ranks with different tiles; a real communicator names them, and none waits."""
    h, w, targets = make(5, 24, 200, 16)
    cut = [w[:112], w[112:]]
    with pytest.raises((ContractError, RuntimeError)):
        on_ranks(
            2,
            lambda c: lp.linear_logprob(h, cut[c.rank], targets, vocab_size=200, vocab_tile=16, comm=c, leaves=2),
        )


@pytest.mark.parametrize("world", [2, 4, 5])
@pytest.mark.parametrize(("main_grad", "kept"), [(False, False), (True, False), (True, True)])
def test_layout_weight_gradient_over_context_parallel_ranks_equals_one_rank(monkeypatch, world, main_grad, kept):
    # a gather of a shared gradient takes several rounds, the last one short
    monkeypatch.setattr(shares, "MOST_ELEMENTS", world * 48 * 100)
    h, w, targets = make(131, 48, 1100, 64)
    grads = torch.randn(2, 131)
    held = torch.randn(w.shape)
    # ranks may hold different numbers of scored rows, or none
    places = torch.arange(131).tensor_split({2: [77], 4: [0, 0, 77], 5: [0, 0, 40, 77]}[world])

    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    support = lp.sampling_support(logits, vocab_size=1100, temperature=0.7, top_k=70) if kept else None

    def gradients(mine, shards):
        x, weight = h[mine].requires_grad_(), w.clone().requires_grad_()
        if main_grad:
            weight.main_grad = held.clone()
        options = {"vocab_size": 1100, "vocab_tile": 64, "return_entropy": True, "tokens": shards}
        options["temperature"] = torch.full((len(mine),), 0.7) if main_grad else 0.7
        options["support"] = support[mine] if kept else None
        logp, entropy = lp.linear_logprob(x, weight, targets[mine], **options)
        (logp * grads[0, mine] + entropy * grads[1, mine]).sum().backward()
        return x.grad, weight.main_grad if main_grad else weight.grad

    dh, dw = gradients(torch.arange(131), None)
    computed = set()

    def spy(ctx, comm, weight, *args, **options):
        computed.add((len(weight), options["needs_weight"]))
        return plain(ctx, comm, weight, *args, **options)

    plain = linear._gradients
    monkeypatch.setattr(linear, "_gradients", spy)
    ranks = on_ranks(world, lambda comm: gradients(places[comm.rank], TokenShards(comm, places)))
    assert torch.equal(torch.cat([got[0] for got in ranks]), dh)
    assert all(torch.equal(got[1], dw) for got in ranks)
    # 24 tiles: five ranks can't share them
    assert computed == {(len(w), False), (len(w) if world == 5 else len(w) // world, True)}

    if kept:
        listed = support.ids(logits, vocab_size=1100, temperature=0.7)
        with pytest.raises(ContractError, match="list of ids beside tokens"):
            lp.linear_logprob(
                h, w, targets, vocab_size=1100, support=listed, tokens=TokenShards(SingleRank(), [torch.arange(131)])
            )
    if not main_grad:
        joined = on_ranks(world, lambda comm: comm.all_reduce(gradients(places[comm.rank], None)[1]))
        assert not torch.equal(joined[0], dw)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": "x"}, "tokens='x'; supported: None, or TokenShards"),
        ({"tokens": 5}, "tokens=5; supported"),
        ({"comm": "x"}, "comm='x'; supported: None"),
        ({"comm": 0}, "comm=0; supported"),
    ],
)
def test_peers_of_another_kind_are_refused_at_once(given, words):
    h, w = torch.randn(3, 8), torch.randn(512, 8)
    with pytest.raises(ContractError, match=words):
        lp.linear_logprob(h, w, torch.zeros(3, dtype=torch.int64), vocab_size=500, **given)


@pytest.mark.parametrize("temperature", [1e-40, torch.tensor([1.0, 1e-40, 1.0])])
def test_a_temperature_that_fp32_holds_in_part_is_refused_by_name(temperature):
    h, w, targets = torch.randn(3, 8), torch.randn(512, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ContractError, match=r"temperature 9\.99\d*e-41 in row [01]; supported: .* at least 1\.18e-38"):
        lp.linear_logprob(h, w, targets, vocab_size=500, temperature=temperature)
    with pytest.raises(ContractError, match="once divided by temperature 2e-38"):
        lp.linear_logprob(h * 1e3, w, targets, vocab_size=500, temperature=2e-38)
    # the smallest that is taken is used as it is
    tiny = torch.finfo(torch.float32).tiny
    small = lp.linear_logprob(torch.zeros(3, 8), w, targets, vocab_size=500, temperature=tiny)
    assert torch.equal(small, lp.linear_logprob(torch.zeros(3, 8), w, targets, vocab_size=500))


def test_no_rows_on_one_rank_is_told_on_a_gpu_too(monkeypatch):
    """The GPU's way without kernels: what has no rows makes the call that peers wait in, and says what it was given."""
    monkeypatch.setattr(linear_gpu.gpu, "ready", lambda x: SimpleNamespace(scores=None))
    met = []

    class Heard(ThreadRank):
        def all_gather_said(self, x, said, *, dim=0):
            met.append((tuple(x.shape), said))
            return super().all_gather_said(x, said, dim=dim)

    def none(comm, said):
        h, targets, w = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), torch.zeros(512, 8)
        x, logp, state, kept = linear_gpu.forward(
            h, w, targets, torch.empty(0), comm, 900, True, leaves=2, said=said
        )  # fmt: skip
        assert (len(x), len(logp), tuple(state.shape), kept) == (0, 0, (0, 3), [])

    on_ranks(2, lambda comm: none(comm, "op(rows=0)"), kind=Heard)
    assert met == [((1, 0), "op(rows=0)")] * 2
    with pytest.raises(ContractError, match=r"different values: rank 0 op\(rows=0\), rank 1 op\(rows=1\)"):
        on_ranks(2, lambda comm: none(comm, f"op(rows={comm.rank})"), kind=Heard)
    none(SingleRank(), "")


@pytest.mark.parametrize("given", [{"temperature": 0.8}, {"leaves": 4}, {"vocab_size": 99}, {"return_entropy": True}])
def test_ranks_given_other_values_are_refused(given):
    h, w, targets = make(5, 24, 100, 16)
    usual = {"vocab_size": 100, "vocab_tile": 16, "leaves": 2, "temperature": 0.7}

    def rank(comm):
        own = {**usual, **given} if comm.rank else usual
        return lp.linear_logprob(h, w.chunk(2)[comm.rank], targets % 99, comm=comm, **own)

    with pytest.raises(ContractError, match="ranks were given different values: rank 0 linear_logprob"):
        on_ranks(2, rank)
