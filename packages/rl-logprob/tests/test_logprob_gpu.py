"""The GPU half: one function of (row, vocabulary), whatever kernel, batch, slice or number of ranks evaluates it.

Ranks are threads on one GPU. Bits are compared on fp32 through integer views, over millions of outputs; freed memory is
full of NaN.
"""

import pytest
import torch

import rl_gemm
import rl_logprob as lp
from rl_contract import ContractError, TokenShards, launches, reset_launches
from rl_contract import shares as contract_shares
from rl_contract.testing import on_ranks
from rl_logprob import gpu, gpu_grad, linear_gpu, linear_shared, plans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

V = 151936


def same(a, b):
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return torch.equal(a.contiguous().view(width[a.element_size()]), b.contiguous().view(width[b.element_size()]))


def make(tokens, hidden, vocab, *, padded=None, seed=0, shift=0.0, pad=0.0):
    """hidden [T, H], weight [padded, H] with logits of deviation 3 around ``shift``, targets on the GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=g, device="cuda")
    h[:, -1] = 1.0
    w = torch.randn(padded or vocab, hidden, generator=g, device="cuda") * (3.0 / hidden**0.5)
    w[:, -1] = shift
    w[vocab:] = pad
    return h.bfloat16(), w.bfloat16(), torch.randint(0, vocab, (tokens,), generator=g, device="cuda")


def grads(h, w, targets, comm=None, *, g, main=False, **kw):
    """logp, entropy, gradient of hidden, gradient of this rank's rows."""
    h = h.clone().requires_grad_()
    w = (w if comm is None else w.chunk(comm.world_size)[comm.rank]).clone().requires_grad_()
    if main:
        w.main_grad = torch.ones(w.shape, dtype=torch.float32, device=w.device)
    logp, entropy = lp.linear_logprob(h, w, targets, comm=comm, return_entropy=True, **kw)
    # on the calling thread: ranks are threads, and one thread for the device would wait for itself
    with torch.autograd.set_multithreading_enabled(False):
        (logp * g[0] + entropy * g[1]).sum().backward()
    return logp.detach(), entropy.detach(), h.grad, w.main_grad if main else w.grad


@pytest.fixture(autouse=True)
def poisoned():
    junk = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    del junk


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
def test_layout_tokens_on_several_ranks_give_the_weight_gradient_of_one(monkeypatch, temperature, shared):
    """Context parallel ranks, one without a scored row; at temperature 1 no rank holds a row of temperatures."""
    monkeypatch.setattr(linear_shared, "SHARED_TOKENS", 0 if shared else 1 << 30)
    monkeypatch.setattr(contract_shares, "MOST_ELEMENTS", 4 * 256 * 300)
    h, w, targets = make(700, 256, 5000, padded=8192)
    g = torch.randn(2, 700, device="cuda")
    rows = torch.rand(700, device="cuda") + 0.5
    places = torch.arange(700).tensor_split([0, 1, 444])

    def gradients(mine, comm):
        here = mine.cuda()
        heat = rows[here] if temperature == "rows" else temperature
        shards = None if comm is None else TokenShards(comm, places)
        found = grads(
            h[here], w, targets[here], g=g[:, here], main=True, vocab_size=5000, temperature=heat, tokens=shards
        )
        return found[2:]

    dh, dw = gradients(torch.arange(700), None)
    ranks = on_ranks(4, lambda comm: gradients(places[comm.rank], comm))
    assert same(torch.cat([got[0] for got in ranks]), dh)
    assert all(same(got[1], dw) for got in ranks)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
def test_every_kernel_has_the_statistics_of_materialised_logits(temperature):
    h, w, targets = make(333, 1024, V)
    temp = torch.empty(0, device="cuda")
    if temperature == "rows":
        temperature = temp = torch.rand(333, device="cuda") + 0.5
    elif temperature != 1.0:
        temp = torch.full((333,), temperature, device="cuda")
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    scores = gpu.kernels().scores
    want = scores.new_stats(333, V // 128, True, h.device)
    scores.tile_stats(logits, temp, V, want, 0)
    checked = 0
    for kernel in plans.shipped("sm90").kernels.values():
        for entropy in (True, False):
            got = scores.new_stats(333, V // 128, entropy, h.device)
            gpu.kernels().head.launch(kernel, h, w, temp, 0, 132, stats=got)
            assert all(same(a, b) for a, b in zip(got, want) if a.numel()), (kernel.name, entropy)
            checked += 1
    assert checked >= 4
    kw = {"vocab_size": V, "temperature": temperature, "vocab_tile": 128}
    logp = lp.linear_logprob(h, w, targets, **kw)
    assert same(logp, lp.selected_logprob(logits, targets, **kw))
    assert same(logp, lp.full_logprob(logits, **kw).gather(1, targets[:, None])[:, 0])


def test_every_kernel_has_the_same_gradient_of_logits():
    h, w, targets = make(333, 1024, 4096)
    state = torch.randn(333, 3, device="cuda").double().abs() + 9
    temp, g, d = torch.rand(333, device="cuda") + 0.5, torch.randn(333, device="cuda"), torch.randn(333, device="cuda")
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    for dentropy in (d, d[:0]):
        want = torch.empty(333, 4096, dtype=torch.bfloat16, device="cuda")
        gpu.kernels().scores.grad_logits(logits, temp, state, targets, g, dentropy, 0, 4096, want)
        for kernel in plans.shipped("sm90").kernels.values():
            got = torch.full_like(want, torch.nan)
            more = {"state": state, "targets": targets, "dlogp": g, "dentropy": dentropy}
            gpu.kernels().head.launch(kernel, h, w, temp, 0, 132, gradient=more, out=got)
            assert same(got, want), kernel.name


def test_logits_in_memory_a_chunk_at_a_time_are_the_same(monkeypatch):
    h, w, targets = make(333, 1024, V, padded=152064)
    g = torch.randn(2, 333, device="cuda")
    want = grads(h, w, targets, vocab_size=V, g=g)
    monkeypatch.setattr(gpu, "CHUNK_ELEMENTS", 333 * 9000)
    monkeypatch.setattr(gpu, "choose", lambda *a: ("sm90:materialised", None))
    reset_launches()
    got = grads(h, w, targets, vocab_size=V, g=g)
    assert all(same(a, b) for a, b in zip(got, want))
    assert {"rl_logprob.triton_scores.tile_stats", "rl_logprob.triton_scores.grad_logits"} <= {
        r["kernel"] for r in launches()
    }


def test_whole_distribution_equals_materialised_bit_for_bit():
    h, w, _ = make(4, 256, V)
    full = lp.full_logprob(rl_gemm.linear(h, w, out_dtype=torch.float32), vocab_size=V)
    everything = torch.arange(V, device="cuda")
    for t in range(2):
        assert same(
            lp.linear_logprob(h[t].expand(V, -1).contiguous(), w, everything, vocab_size=V, vocab_tile=128), full[t]
        )
    assert abs(full.double().exp().sum(1) - 1).max() < 2e-6


def test_accuracy_against_fp64():
    h, w, targets = make(100, 1024, V)
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    want = torch.log_softmax(logits.double() / 0.7, 1)
    logp, entropy = lp.linear_logprob(
        h,
        w,
        targets,
        vocab_size=V,
        vocab_tile=128,
        temperature=torch.full((100,), 0.7, device="cuda"),
        return_entropy=True,
    )
    # half a last place of values up to 32, and as much from logit / temperature
    assert (logp.double() - want.gather(1, targets[:, None])[:, 0]).abs().max() < 2.5e-6
    assert (entropy.double() + (want.exp() * want).sum(1)).abs().max() < 2e-6


def test_batch_row_alone_equals_row_in_batch():
    h, w, targets = make(1000, 1024, V)
    kw = {"vocab_size": V, "vocab_tile": 128}
    reset_launches()
    whole, entropy = lp.linear_logprob(h, w, targets, return_entropy=True, **kw)
    for split in ((1, 999), (64, 936), (500, 500), (129, 200, 671)):
        parts = [
            lp.linear_logprob(a, w, b, return_entropy=True, **kw) for a, b in zip(h.split(split), targets.split(split))
        ]
        assert same(torch.cat([p[0] for p in parts]), whole)
        assert same(torch.cat([p[1] for p in parts]), entropy)
    assert len({r["plan"] for r in launches() if r["plan"].startswith("sm90")}) > 1
    order = torch.randperm(1000, device="cuda")
    assert same(lp.linear_logprob(h[order], w, targets[order], **kw), whole[order])


@pytest.mark.parametrize("shift", [-6.0, 0.0, 6.0])
def test_padding_never_shows(shift):
    h, w, targets = make(200, 512, V, padded=155648, shift=shift, pad=float("nan"))
    want = lp.linear_logprob(h, w[:V], targets, vocab_size=V, vocab_tile=128)
    for padded in (152064, 155648):
        assert same(lp.linear_logprob(h, w[:padded], targets, vocab_size=V), want)
    logits = torch.nn.functional.pad(rl_gemm.linear(h, w[:V], out_dtype=torch.float32), (0, 128), value=1e30)
    assert same(lp.selected_logprob(logits, targets, vocab_size=V), want)


@pytest.mark.parametrize("main", [False, True])
def test_layout_tp_1_2_4_8(main):
    padded = lp.padded_vocab_size(20000)
    h, w, targets = make(300, 512, 20000, padded=padded)
    g = torch.randn(2, 300, device="cuda")
    kw = {"vocab_size": 20000, "temperature": 0.8, "leaves": 8, "g": g, "main": main}
    want = grads(h, w, targets, **kw)
    for world in (2, 4, 8):
        parts = on_ranks(world, lambda comm: grads(h, w, targets, comm, **kw))
        for part in parts:
            assert all(same(a, b) for a, b in zip(part[:3], want[:3]))
        assert same(torch.cat([p[3] for p in parts]), want[3])
    assert not main or bool((want[3][20000:] == 1).all())


def test_gradients_against_fp64():
    h, w, targets = make(200, 256, 5003, padded=lp.padded_vocab_size(5003))
    g = torch.randn(2, 200, device="cuda")
    _, _, dh, dw = grads(h, w, targets, vocab_size=5003, temperature=0.7, g=g)
    a, b = h.double().requires_grad_(), w[:5003].double().requires_grad_()
    logp = torch.log_softmax(a @ b.t() / 0.7, 1)
    entropy = -(logp.exp() * logp).sum(1)
    (logp.gather(1, targets[:, None])[:, 0] * g[0] + entropy * g[1]).sum().backward()
    assert (dh.double() - a.grad).norm() / a.grad.norm() < 6e-3
    assert (dw[:5003].double() - b.grad).norm() / b.grad.norm() < 6e-3
    assert not dw[5003:].any()


def test_adding_by_the_library_is_adding_the_chain(monkeypatch):
    h, w, targets = make(512, 4096, 20000, padded=lp.padded_vocab_size(20000))
    g = torch.randn(2, 512, device="cuda")
    kw = {"vocab_size": 20000, "g": g, "main": True}
    monkeypatch.setattr(gpu_grad, "FEW_TOKENS", 0)
    reset_launches()
    want = grads(h, w, targets, **kw)
    kernels = {r["kernel"] for r in launches()}
    monkeypatch.setattr(gpu_grad, "_library_adds", lambda *a: False)
    assert all(same(a, b) for a, b in zip(grads(h, w, targets, **kw), want))
    if not any("cublaslt" in k for k in kernels):
        pytest.skip("no certificate for this machine's library")


def test_kept_logits_change_time_and_memory_only():
    h, w, targets = make(300, 512, 20000, padded=lp.padded_vocab_size(20000))
    g = torch.randn(2, 300, device="cuda")
    kw = {"vocab_size": 20000, "temperature": 0.8, "g": g}
    for leaves in (1, 8):
        want = grads(h, w, targets, leaves=leaves, **kw)
        for room in (4 * 300 * 20000, 4 * 300 * 9000, 4):
            reset_launches()
            got = grads(h, w, targets, leaves=leaves, keep_logits=room, **kw)
            assert all(same(a, b) for a, b in zip(got, want))
            kept = [r["count"] for r in launches() if r["plan"] == "kept"]
            assert bool(kept) == (room > 4)


def test_kept_logits_of_one_library_call_change_time_and_memory_only(monkeypatch):
    h, w, targets = make(300, 1024, V, padded=155648)
    g = torch.randn(2, 300, device="cuda")
    kw = {"vocab_size": V, "g": g, "leaves": 2, "main": True}
    want = grads(h, w, targets, **kw)
    certified = gpu._library_takes(h, V)
    for takes in (True, False):
        monkeypatch.setattr(gpu, "_library_takes", lambda *a, takes=takes: takes)
        reset_launches()
        got = grads(h, w, targets, keep_logits=4 * 300 * V, **kw)
        assert all(same(a, b) for a, b in zip(got, want))
        assert any(r["plan"] == "kept" for r in launches())
    if not certified:
        pytest.skip("no certificate for this machine's library")


@pytest.mark.parametrize("rows", [1, 3, 64, 300])
def test_scoring_without_dispatch_has_the_bits_of_the_operators(monkeypatch, rows):
    """Bad targets and temperatures, logits and targets of any stride."""
    wide = torch.randn(rows, 2 * 20011, device="cuda") * 3
    targets = torch.randint(0, 20000, (rows, 2), device="cuda")
    targets[0, 0] = 20000
    temp = torch.rand(rows, device="cuda") + 0.5
    temp[-1] = 0.0
    found = []
    for traced in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda traced=traced: traced)
        for logits in (wide, wide[:, 1:], wide[:, ::2], wide[:, 1:20011].contiguous()):
            for goal in (targets[:, 0], targets[:, 1]):
                for heat in (1.0, 0.7, temp):
                    kw = {"vocab_size": 20000, "temperature": heat, "nonfinite": "nan"}
                    logp, entropy = lp.selected_logprob(logits, goal, return_entropy=True, **kw)
                    assert same(logp, lp.selected_logprob(logits, goal.contiguous(), **kw))
                    found += [torch.where(torch.isnan(x), torch.nan, x) for x in (logp, entropy)]
    half = len(found) // 2
    assert all(same(a, b) for a, b in zip(found[:half], found[half:], strict=True))
    assert torch.isnan(found[0][0])


def test_targets_of_any_stride_are_read_as_they_stand():
    h, w, targets = make(300, 512, 20000, padded=lp.padded_vocab_size(20000))
    both = torch.stack([targets, targets.flip(0)], 1)
    g = torch.randn(2, 300, device="cuda")
    want = grads(h, w, targets, vocab_size=20000, g=g)
    assert all(same(a, b) for a, b in zip(grads(h, w, both[:, 0], vocab_size=20000, g=g), want))
    with torch.no_grad():
        assert same(lp.linear_logprob(h, w, both[:, 0], vocab_size=20000), want[0])
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    seeds = torch.stack([targets, -targets], 1)
    drawn = lp.gumbel_sample(logits, seeds[:, 0], both[:, 1], vocab_size=20000)
    assert same(drawn, lp.gumbel_sample(logits, targets, targets.flip(0), vocab_size=20000))


def test_a_wrong_order_shows(monkeypatch):
    h, w, targets = make(300, 512, 20000, padded=lp.padded_vocab_size(20000))
    g = torch.randn(2, 300, device="cuda")
    want = grads(h, w, targets, vocab_size=20000, g=g)
    flipped = lp.linear_logprob(h.flip(1), w.flip(1), targets, vocab_size=20000)
    assert not same(flipped, want[0])
    for module in (gpu, gpu_grad):
        monkeypatch.setattr(module, "GPU_GRAD_BLOCK", 2048)
    assert not same(grads(h, w, targets, vocab_size=20000, g=g)[2], want[2])
    # one fp32 sum in two orders, as log_softmax over another split would take it
    x = rl_gemm.linear(h, w[:20000], out_dtype=torch.float32)
    assert not same(torch.logsumexp(x, 1), torch.logsumexp(x.flip(1), 1))


def test_blocks_of_tokens_are_chains_in_packed_order(monkeypatch):
    h, w, targets = make(700, 256, 4096)
    g = torch.randn(2, 700, device="cuda")
    monkeypatch.setattr(linear_gpu, "GPU_TOKEN_BLOCK", 256)
    got = grads(h, w, targets, vocab_size=4096, g=g, main=True)
    monkeypatch.undo()
    total = torch.ones(w.shape, dtype=torch.float32, device="cuda")
    for begin in range(0, 700, 256):
        part = slice(begin, begin + 256)
        own = w.clone().requires_grad_()
        own.main_grad = total
        logp, entropy = lp.linear_logprob(h[part], own, targets[part], vocab_size=4096, return_entropy=True)
        (logp * g[0, part] + entropy * g[1, part]).sum().backward()
    assert same(got[3], total)


def test_memory_stays_bounded_and_hidden_is_left_alone():
    h, w, targets = make(8192, 4096, V, padded=155648)
    before = h.clone()
    h.requires_grad_()
    w.requires_grad_()
    w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    lp.linear_logprob(h, w, targets, vocab_size=V).sum().backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - start - h.grad.numel() * h.grad.element_size()
    assert extra <= 256 << 20, extra / 2**20
    assert same(h.detach(), before)


def test_graph_replay_equals_eager():
    h, w, targets = make(300, 512, 19968)
    eager = lp.linear_logprob(h, w, targets, vocab_size=19968, nonfinite="nan")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lp.linear_logprob(h, w, targets, vocab_size=19968, nonfinite="nan")
    captured.fill_(float("nan"))
    graph.replay()
    assert same(captured, eager)


def test_sampler_equals_the_cpu_and_ignores_its_batch():
    g = torch.Generator("cuda").manual_seed(3)
    logits = torch.randn(50, V, generator=g, device="cuda") * 2
    logits[7, 100] = logits[7, 90000] = 50.0
    seeds = torch.randint(-(2**62), 2**62, (50,))
    positions = torch.arange(50)
    kw = {"vocab_size": V - 1000, "temperature": 0.8}
    got = lp.gumbel_sample(logits, seeds, positions, **kw)
    assert torch.equal(got.cpu(), lp.gumbel_sample(logits.cpu(), seeds, positions, **kw))
    assert torch.equal(lp.greedy_sample(logits, vocab_size=V).cpu(), lp.greedy_sample(logits.cpu(), vocab_size=V))
    for t in (0, 7, 49):
        alone = lp.gumbel_sample(logits[t : t + 1], seeds[t : t + 1], positions[t : t + 1], **kw)
        assert int(alone) == int(got[t])


def test_rows_that_are_not_finite_are_named():
    logits = torch.randn(5, 1000, device="cuda")
    logits[1, 3], logits[2, 4] = float("nan"), float("inf")
    logits[3] = -float("inf")
    targets = torch.zeros(5, dtype=torch.int64, device="cuda")
    with pytest.raises(ContractError, match=r"row 1 hold a NaN.*3 such rows"):
        lp.selected_logprob(logits, targets, vocab_size=1000)
    quiet = lp.selected_logprob(logits, targets, vocab_size=1000, nonfinite="nan")
    assert torch.isnan(quiet).tolist() == [False, True, True, True, False]
    with pytest.raises(ContractError, match="row 1 hold a NaN"):
        lp.gumbel_sample(logits, targets, targets, vocab_size=1000)


def test_bad_targets_and_temperatures():
    h, w, targets = make(5, 256, 1024)
    for place in ("cpu", "cuda"):
        bad = targets.to(place).clone()
        bad[3] = 1000
        with pytest.raises(ContractError, match="target 1000 in row 3"):
            lp.linear_logprob(h, w, bad, vocab_size=1000)
        with pytest.raises(ContractError, match="target 1000 in row 3"):
            lp.selected_logprob(rl_gemm.linear(h, w, out_dtype=torch.float32), bad, vocab_size=1000)
        temperature = torch.ones(5, device=place)
        temperature[2] = -1.0
        with pytest.raises(ContractError, match=r"temperature -1\.0 in row 2"):
            lp.linear_logprob(h, w, targets, vocab_size=1024, temperature=temperature)
    with pytest.raises(ContractError, match="temperature 0"):
        lp.linear_logprob(h, w, targets, vocab_size=1024, temperature=0)
    quiet = lp.linear_logprob(h, w, bad, vocab_size=1000, nonfinite="nan")
    assert torch.isnan(quiet).tolist() == [False, False, False, True, False]


def test_refusals_and_empty_batches():
    h, w, targets = make(5, 256, 1024)
    with pytest.raises(ContractError, match="bfloat16"):
        lp.linear_logprob(h.float(), w.float(), targets, vocab_size=1024)
    with pytest.raises(ContractError, match="multiples of 128"):
        lp.linear_logprob(h, w, targets, vocab_size=1024, vocab_tile=64)
    with pytest.raises(ContractError, match="whole tiles"):
        lp.linear_logprob(h, w[:1000], targets, vocab_size=900)
    assert lp.linear_logprob(h[:0], w, targets[:0], vocab_size=1024).shape == (0,)
    empty = torch.empty(0, 1024, device="cuda")
    assert lp.selected_logprob(empty, targets[:0], vocab_size=1024).shape == (0,)
    assert lp.gumbel_sample(empty, targets[:0], targets[:0], vocab_size=1024).shape == (0,)
