"""Kept ids on the GPU: the CPU's, replayed with the same bits by every kernel, batch and number of ranks, within the
memory of the head.
"""

import pytest
import torch

import rl_gemm
import rl_logprob as lp
from rl_contract import launches, reset_launches
from rl_contract.testing import on_ranks
from rl_logprob import gpu, gpu_grad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

V = 151936


def same(a, b):
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return torch.equal(a.contiguous().view(width[a.element_size()]), b.contiguous().view(width[b.element_size()]))


def make(tokens, hidden, vocab, *, padded=None, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=g, device="cuda")
    w = torch.randn(padded or vocab, hidden, generator=g, device="cuda") * (3.0 / hidden**0.5)
    w[vocab:] = float("nan")
    return h.bfloat16(), w.bfloat16(), torch.randint(0, vocab, (tokens,), generator=g, device="cuda")


@pytest.fixture(autouse=True)
def poisoned():
    junk = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    del junk


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "flat"])
def test_kept_ids_are_the_cpus(kind):
    g = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(14, V + 3, generator=g, device="cuda") * 3
    if kind == "ties":
        logits = (logits * 4).round() / 4
    elif kind == "masked":
        logits[:, ::2], logits[5] = -torch.inf, -torch.inf
        logits[3, 100], logits[4, 7], logits[2, 11] = torch.nan, torch.inf, -0.0
    elif kind == "flat":
        logits *= 1e-3
    logits[:, V:] = torch.nan
    k = torch.tensor([0, 50, 0, 1, 40, V - 1, 12, 0, 7, 1, 0, V, 2, 9])
    p = torch.tensor([0.9, 1, 0.5, 1e-9, 0.7, 0.99, 1, 0.95, 0.8, 1, 1, 0.999999, 1e-300, 0.2], dtype=torch.float64)
    least = torch.tensor([0, 0.05, 0.2, 0, 1e-4, 1, 0, 0, 5e-324, 0, 0, 0, 0.01, 0], dtype=torch.float64)
    kw = {"vocab_size": V, "temperature": 0.8}
    want = lp.sampling_support(logits.cpu(), top_k=k, top_p=p, min_p=least, **kw)
    got = lp.sampling_support(logits, top_k=k.cuda(), top_p=p.cuda(), min_p=least.cuda(), **kw)
    assert torch.equal(got.threshold.cpu(), want.threshold)
    assert torch.equal(got.last_id.cpu(), want.last_id)
    alone = lp.sampling_support(logits[8:9], top_k=7, top_p=0.8, min_p=5e-324, **kw)
    assert torch.equal(alone.threshold, got.threshold[8:9])
    seeds, positions = torch.arange(14), torch.arange(14) * 3
    fine = torch.tensor([t for t in range(14) if kind != "masked" or t not in (3, 4, 5)])
    rows = fine.cuda()
    drawn = lp.gumbel_sample(logits[rows], seeds[fine], positions[fine], support=got[rows], **kw)
    cpu = lp.gumbel_sample(logits[rows].cpu(), seeds[fine], positions[fine], support=want[fine], **kw)
    assert torch.equal(drawn.cpu(), cpu)


def step(h, w, targets, support, comm=None, leaves=8, **kw):
    h = h.clone().requires_grad_()
    w = (w if comm is None else w.chunk(comm.world_size)[comm.rank]).clone().requires_grad_()
    w.main_grad = torch.ones(w.shape, dtype=torch.float32, device=w.device)
    found = lp.linear_logprob(
        h, w, targets, comm=comm, support=support, return_entropy=True, return_rescued=True, temperature=0.8,
        vocab_size=20000, leaves=leaves, **kw,
    )  # fmt: skip
    g = torch.linspace(-1, 1, len(h), device="cuda")
    with torch.autograd.set_multithreading_enabled(False):
        (found[0] * g + found[1] * g.flip(0)).sum().backward()
    return *(x.detach() for x in found), h.grad, w.main_grad


def test_fused_materialised_listed_kept_batch_and_tp_have_the_same_bits(monkeypatch):
    h, w, targets = make(700, 512, 20000, padded=lp.padded_vocab_size(20000))
    logits = rl_gemm.linear(h, w, out_dtype=torch.float32)
    kw = {"vocab_size": 20000, "temperature": 0.8}
    key = lp.sampling_support(logits, top_p=0.9, top_k=3000, **kw)
    drawn = lp.gumbel_sample(logits, targets, targets, support=key, **kw)
    targets[::2] = drawn[::2]
    ids = key.ids(logits, **kw)
    reset_launches()
    want = step(h, w, targets, key)
    assert {"rl_logprob.triton_head.stats", "rl_logprob.triton_head.gradient"} <= {r["kernel"] for r in launches()}
    assert not want[2][::2].any()
    assert 0 < int(want[2].sum()) < 350
    for support in (key, ids):
        scored = lp.selected_logprob(logits, targets, support=support, return_entropy=True, return_rescued=True, **kw)
        assert all(same(a, b) for a, b in zip(scored, want))
    assert all(same(a, b) for a, b in zip(step(h, w, targets, ids), want))
    for support in (key, ids):
        for room in (4 * 700 * 20000, 4 * 700 * 9000, "auto"):
            assert all(same(a, b) for a, b in zip(step(h, w, targets, support, keep_logits=room), want))
    for world in (2, 4, 8):
        for part in on_ranks(world, lambda comm: step(h, w, targets, key, comm)):
            assert all(same(a, b) for a, b in zip(part[:4], want))
    parts = on_ranks(4, lambda comm: step(h, w, targets, ids, comm))
    assert same(torch.cat([p[4] for p in parts]), want[4])
    one = lp.linear_logprob(h[5:6], w, targets[5:6], support=key[5:6], **kw)
    assert same(one, want[0][5:6])
    # the exact values
    x = logits[:, :20000].double() / 0.8
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[ids._rows(), ids.ids.long()] = True
    mask[torch.arange(700), targets] = True
    exact = torch.log_softmax(x.masked_fill(~mask, -torch.inf), 1)
    assert (want[0].double() - exact.gather(1, targets[:, None])[:, 0]).abs().max() < 2.5e-6
    entropy = -torch.where(mask, exact.exp() * exact.masked_fill(~mask, 0), 0).sum(1)
    assert (want[1].double() - entropy).abs().max() < 2e-6


@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("tokens", [1, 77, 256, 700])
def test_blocks_of_ids_at_once_change_time_only(monkeypatch, tokens, leaves):
    h, w, targets = make(tokens, 4096, 20000, padded=lp.padded_vocab_size(20000))
    reset_launches()
    want = step(h, w, targets, None, leaves=leaves)
    assert ("rl_logprob.triton_few", "tma") in {(r["kernel"], r["plan"]) for r in launches()}
    for name, value in (
        ("FEW_BYTES", 1), ("copy_engine_may", lambda *a: False), ("FEW_TOKENS", 0), ("GRADIENT_ELEMENTS", 1),
        ("_library_adds", lambda *a: False),
    ):  # fmt: skip
        monkeypatch.setattr(gpu if name == "copy_engine_may" else gpu_grad, name, value)
        assert all(same(a, b) for a, b in zip(step(h, w, targets, None, leaves=leaves), want)), name


@pytest.mark.parametrize("tokens", [3, 200, 700])
def test_few_tokens_every_launch_shape_has_the_bits_of_the_chains(tokens):
    """Cancelling data and tiny values; the weight's gradient also in its own type and over what is there."""
    few = gpu.kernels().few
    g = torch.Generator("cuda").manual_seed(tokens)
    n, hidden = 9000, 1032
    d = (torch.randn(tokens, n, generator=g, device="cuda") * 1e-3).bfloat16()
    d[:, 4000:8000] = -d[:, :4000]
    w = torch.randn(n, hidden, generator=g, device="cuda").bfloat16()
    h = (torch.randn(tokens, hidden, generator=g, device="cuda") * 1e-36).bfloat16()
    blocks = [rl_gemm.ops.grad_input(a, b) for a, b in zip(d.split(4096, 1), w.split(4096))]
    want = ((blocks[0] + blocks[1]) + blocks[2]) + 0.0
    chain = rl_gemm.ops.grad_weight(d, h)
    start = torch.randn(n, hidden, generator=g, device="cuda") * 1e-37
    shapes = [few.hidden_shape(tokens, tma) for tma in (True, False)]
    shapes += [few.Shape(rows=128, columns=128, depth=64, warps=8, stages=3, per_sm=1, slices=4)]
    parts = torch.full((3, tokens, hidden), torch.nan, device="cuda")
    for shape in shapes:
        root = torch.full((tokens, hidden), torch.nan, device="cuda")
        few.add_hidden(d, w, root, parts, 4096, True, 132, shape)
        assert same(root, want), shape
        few.add_hidden(d, w, root, parts, 4096, False, 132, shape)
        assert same(root, ((want + blocks[0]) + blocks[1]) + blocks[2]), shape
    assert not same(root, want + want)
    for shape in [few.weight_shape(tokens, tma) for tma in (True, False)] + shapes[2:]:
        total = start.clone()
        few.add_weight(d, h, total, True, 132, shape)
        assert same(total, start + chain), shape
        own = torch.full((n, hidden), torch.nan, device="cuda", dtype=torch.bfloat16)
        few.add_weight(d, h, own, False, 132, shape)
        assert same(own, chain.bfloat16()), shape


@pytest.mark.parametrize("tokens", [256, 2048, 16384, 32768])
def test_memory_does_not_grow_with_tokens(tokens):
    h, w, targets = make(tokens, 4096, V, padded=155648)
    h.requires_grad_()
    w.requires_grad_()
    w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    lp.linear_logprob(h, w, targets, vocab_size=V).sum().backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - start - h.grad.numel() * h.grad.element_size()
    print(tokens, extra / 2**20, "MiB")
    assert extra <= 256 << 20, extra / 2**20


def test_graph_replay_of_a_sampling_step_equals_eager():
    g = torch.Generator("cuda").manual_seed(2)
    logits = torch.randn(33, V, generator=g, device="cuda") * 3
    seeds, positions = torch.arange(33, device="cuda") * 5, torch.arange(33, device="cuda")
    p = torch.linspace(0.1, 1.0, 33, dtype=torch.float64, device="cuda")
    k = torch.arange(33, device="cuda") * 40
    temp = torch.linspace(0.5, 1.5, 33, device="cuda")

    def sampling_step():
        kw = {"vocab_size": V, "temperature": temp}
        support = lp.sampling_support(logits, top_k=k, top_p=p, **kw)
        ids = lp.gumbel_sample(logits, seeds, positions, support=support, **kw)
        free = lp.gumbel_sample(logits, seeds, positions, **kw)
        return ids, free, lp.selected_logprob(logits, ids, support=support, nonfinite="nan", **kw)

    eager = sampling_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampling_step()
    for _ in range(2):
        graph.replay()
        assert all(same(a, b) for a, b in zip(captured, eager))
        logits.copy_(torch.randn(33, V, generator=g, device="cuda"))
        eager = sampling_step()
    assert not torch.equal(eager[0], eager[1])


@pytest.mark.parametrize("shift", [-6.0, 0.0, 6.0])
def test_whole_distribution_under_padding_both_paths_every_bit(shift):
    """Three positions times the whole vocabulary, logits of this mean, a head of 151,936 and of 152,064 rows."""
    h, w, _ = make(3, 256, V, padded=152064)
    h[:, -1] = 1.0
    w[:V, -1] = shift
    logits = rl_gemm.linear(h, w[:V], out_dtype=torch.float32)
    assert abs(float(logits.mean()) - shift) < 0.2
    full = lp.full_logprob(logits, vocab_size=V)
    padded = torch.cat([logits, torch.full((3, 128), 1e30, device="cuda")], 1)
    assert same(lp.full_logprob(padded, vocab_size=V), full)
    everything = torch.arange(V, device="cuda")
    before = h.clone()
    for t in range(3):
        rows = h[t].expand(V, -1).contiguous()
        for weight in (w, w[:V]):
            assert same(lp.linear_logprob(rows, weight, everything, vocab_size=V, vocab_tile=128), full[t])
    assert same(h, before)
    # the values before they are rounded to fp32
    empty = torch.empty(0, device="cuda")
    state = lp.ops.merge_tiles(*lp.ops.tile_stats(logits, empty, 0, V, 512, False))
    total = (logits.double() - state[:, :1] - state[:, 1:2]).exp().sum(1)
    print("sum - 1:", (total - 1).abs().max().item())
    assert (total - 1).abs().max() < 1e-7
