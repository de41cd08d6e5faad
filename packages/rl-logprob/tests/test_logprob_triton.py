"""The Triton kernels without a GPU: their arithmetic in Triton's interpreter.

The interpreter reads its switch when kernels are defined, so its checks run in a process of their own. Data are small
integers there, whose products are exact in any order: what is compared is what follows the product.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
ROWS, HIDDEN, VOCAB = 21, 32, 300


def body_statistics():
    """Fused, materialised, gradients and ranks: one function of a row."""
    from rl_logprob import plans
    from rl_logprob import triton_head as head
    from rl_logprob import triton_ranks as ranks
    from rl_logprob import triton_scores as scores

    h = torch.randint(-4, 5, (ROWS, HIDDEN)).float()
    w = torch.randint(-4, 5, (VOCAB, HIDDEN)).float() / 8
    targets = torch.randint(0, VOCAB, (ROWS,))
    logits = h @ w.t()
    g, d = torch.randn(ROWS), torch.randn(ROWS)
    for temp in (torch.empty(0), torch.rand(ROWS) + 0.5):
        found = scores.new_stats(ROWS, 3, True, h.device)
        scores.tile_stats(logits, temp, VOCAB, found, 0)
        state = scores.merge(*found)
        x = logits / temp[:, None] if len(temp) else logits
        want = torch.log_softmax(x.double(), 1)
        full = scores.full(logits, temp, state, VOCAB)
        assert (full - want).abs().max() < 2.5e-6
        assert (state[:, 2] + (want.exp() * want).sum(1)).abs().max() < 1e-6
        at = torch.arange(ROWS)
        assert torch.equal(scores.selected(x[at, targets], state), full[at, targets])
        out = torch.full((ROWS,), torch.nan)
        head.target_logits(h, w, VOCAB, targets, temp, 0, out)
        assert torch.equal(out, x[at, targets])
        goal = targets.clone()
        goal[3], goal[4] = VOCAB - 30, -1
        joined = scores.score_logits(found, logits, goal, temp, VOCAB - 30)
        assert torch.isnan(joined[0]).nonzero()[:, 0].tolist() == sorted(
            {3, 4} | set((targets >= VOCAB - 30).nonzero()[:, 0].tolist())
        )
        valid = (goal >= 0) & (goal < VOCAB - 30)
        assert torch.equal(joined[0][valid], full[at, targets][valid])
        assert torch.equal(joined[1][valid], x[at, targets][valid])
        assert torch.equal(joined[2], state)
        again = torch.full((ROWS, 3), torch.nan, dtype=torch.float64), torch.full((ROWS,), torch.nan)
        scores.score(found, out, *again)
        assert torch.equal(again[0], state)
        assert torch.equal(again[1], full[at, targets])
        parts = [[a[i:j].contiguous() for a in found] for i, j in ((0, 1), (1, 3))]
        top = torch.stack([ranks.rank_top(p[0]) for p in parts]).amax(0)
        sums = sum(ranks.rank_sums(*p, top) for p in parts)
        assert torch.equal(ranks.state_of(top, sums, True), state)
        gradient = torch.full((ROWS, 304), torch.nan, dtype=torch.bfloat16)[:, :VOCAB]
        scores.grad_logits(logits, temp, state, targets, g, d, 0, VOCAB, gradient)
        exact = logits.double().requires_grad_()
        logp = torch.log_softmax(exact / (temp[:, None].double() if len(temp) else 1), 1)
        (logp[at, targets] * g - (logp.exp() * logp).sum(1) * d).sum().backward()
        assert (gradient.double() - exact.grad).norm() / exact.grad.norm() < 4e-3
        for kind, block_n, slices in (("pointer", 128, 1), ("tma", 128, 2), ("tma", 256, 1)):
            kernel = plans.Kernel(kind=kind, block_m=16, block_n=block_n, block_k=16, warps=4, stages=2, slices=slices)
            got = scores.new_stats(ROWS, 3, True, h.device)
            head.launch(kernel, h, w, temp, 0, 3, stats=got)
            assert all(torch.equal(a, b) for a, b in zip(got, found, strict=True)), kernel
            out = torch.full((ROWS, 304), torch.nan, dtype=torch.bfloat16)[:, :VOCAB]
            more = {"state": state, "targets": targets, "dlogp": g, "dentropy": d}
            head.launch(kernel, h, w, temp, 0, 3, gradient=more, out=out)
            assert torch.equal(out, gradient), kernel


def body_kept():
    """The CPU's kept ids; fused, materialised and listed supports: one function of a row."""
    import rl_logprob as lp
    from rl_contract import SingleRank
    from rl_logprob import gpu, gpu_grad, linear_gpu, ops, ops_gpu, plans, triton_head, triton_sample, triton_support
    from rl_logprob import triton_scores as scores

    one = torch.empty(0)
    for kind in range(3):
        logits = torch.randn(7, 300) * 3
        if kind == 1:
            logits = logits.round()
        elif kind == 2:
            logits[:, ::3], logits[1] = -torch.inf, 0.25
            logits[0, 5], logits[2, 299], logits[3] = -0.0, torch.nan, -torch.inf
        temp = torch.rand(7) + 0.5
        k = torch.tensor([0, 5, 0, 1, 40, 299, 12])
        p = torch.tensor([0.9, 1.0, 0.5, 1e-9, 0.7, 0.99, 1.0]).double() if kind else torch.ones(7).double()
        least = torch.tensor([0.0, 0.05, 0.2, 0.0, 1e-4, 1.0, 0.0]).double()
        got = triton_support.support(logits, temp, k, p, least, 290)
        want = ops.support(logits, temp, k, p, least, 290)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (kind, got, want)

    h, targets = torch.randint(-2, 3, (ROWS, HIDDEN)).float(), torch.randint(0, 300, (ROWS,))
    w = torch.randint(-2, 3, (512, HIDDEN)).float() / 8
    logits = h @ w.t()
    key = lp.sampling_support(logits, vocab_size=300, top_k=40)
    ids = key.ids(logits, vocab_size=300)
    assert 0 < int(key.outside(logits[torch.arange(ROWS), targets], targets).sum()) < ROWS
    limits = (key.threshold, key.last_id, targets)
    found = scores.new_stats(ROWS, 3, True, h.device)
    scores.tile_stats(logits, one, 300, found, 0, limits)
    listed = scores.new_stats(ROWS, 3, True, h.device)
    scores.tile_stats(ids.mask_(logits[:, :300].clone(), 0, targets), one, 300, listed, 0)
    assert all(torch.equal(a, b) for a, b in zip(found, listed, strict=True))
    cpu = lp.selected_logprob(logits, targets, vocab_size=300, support=key, return_entropy=True)
    state = scores.merge(*found)
    gpu.ready = lambda x: gpu.kernels()
    for wide, given in ((logits, limits[:2]), (logits.t().contiguous().t(), limits[:2]), (logits, (None, None))):
        logp, x, whole = ops_gpu.score(wide, targets, one, 300, 128, True, *given)
        want = lp.selected_logprob(
            logits, targets, vocab_size=300, return_entropy=True, support=None if given[0] is None else key
        )
        assert torch.equal(x, logits[torch.arange(ROWS), targets])
        assert (logp - want[0]).abs().max() < 2e-6
        assert (whole[:, 2] - want[1]).abs().max() < 1e-6
        assert given[0] is None or torch.equal(whole, state)
    assert len(ops_gpu.score(logits[:0], targets[:0], one, 300, 128, True)[0]) == 0
    assert (scores.selected(logits[torch.arange(ROWS), targets], state) - cpu[0]).abs().max() < 2e-6
    assert (state[:, 2] - cpu[1]).abs().max() < 1e-6
    g, d = torch.randn(ROWS), torch.randn(ROWS)
    want = torch.full((ROWS, 304), torch.nan, dtype=torch.bfloat16)[:, :300]
    scores.grad_logits(logits[:, :300], one, state, targets, g, d, 0, 300, want, limits[:2])
    assert (want == 0).sum(1).min() >= 300 - 41
    for kind, block_n, slices in (("pointer", 128, 1), ("tma", 256, 2)):
        kernel = plans.Kernel(kind=kind, block_m=16, block_n=block_n, block_k=16, warps=4, stages=2, slices=slices)
        got = scores.new_stats(ROWS, 3, True, h.device)
        triton_head.launch(kernel, h, w[:300], one, 0, 3, stats=got, kept=limits)
        assert all(torch.equal(a, b) for a, b in zip(got, found, strict=True)), kernel
        out = torch.full((ROWS, 304), torch.nan, dtype=torch.bfloat16)[:, :300]
        more = {"state": state, "targets": targets, "dlogp": g, "dentropy": d}
        triton_head.launch(kernel, h, w[:300], one, 0, 3, gradient=more, out=out, kept=limits)
        assert torch.equal(out, want), kernel
    seeds, places = torch.arange(ROWS) * 7, torch.arange(ROWS)
    got = triton_sample.sample(logits, seeds, places, one, 300, False, limits[:2])
    assert torch.equal(got, lp.gumbel_sample(logits, seeds, places, vocab_size=300, support=key))

    fused = plans.Kernel(kind="pointer", block_m=16, block_n=128, block_k=16, warps=4, stages=2)
    gpu.ready = lambda x: gpu.kernels()
    gpu.processors_of = lambda index: 3
    gpu_grad._library_adds = lambda *a: False
    gpu.choose = lambda *a: ("fused", fused)
    # the interpreter's dot product has an order of its own
    gpu.GPU_GRAD_BLOCK = gpu_grad.GPU_GRAD_BLOCK = 128
    gpu_grad.FEW_TOKENS = 0
    main = torch.nn.Parameter(w)

    @torch.no_grad()
    def both(support, keep=0):
        main.main_grad = torch.zeros_like(w)
        comm = SingleRank()
        x, _, state, kept = linear_gpu.forward(h, main.data, targets, one, comm, 300, True, 1, keep, support)
        dh, _ = linear_gpu.backward(h, main, targets, one, state, g, d, comm, 300, 1, True, True, kept, support)
        return x, state, dh, main.main_grad

    gpu_grad.GRADIENT_ELEMENTS = 1
    results = [both(key), both(ids), both(key, 4 * ROWS * 300), both(ids, 4 * ROWS * 300)]
    gpu_grad.GRADIENT_ELEMENTS = 1 << 25
    results += [both(key)]
    assert torch.equal(results[0][1], state)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


def body_few():
    """All blocks of ids in one launch: sums that are exact in any order, tails, and NaN where nothing may be read."""
    from rl_logprob import triton_few

    hidden, group = 48, 128
    tma = triton_few.Shape(rows=16, columns=32, depth=16, warps=4, stages=2, per_sm=1, slices=2)
    pointer = triton_few.Shape(rows=16, columns=32, depth=16, warps=4, stages=2)
    for tokens, n, shape in ((1, 300, tma), (21, 300, tma), (21, 256, tma), (37, 100, pointer), (21, 300, pointer)):
        d = torch.randint(-4, 5, (tokens, n)).float()
        wide = torch.full((tokens, 304), torch.nan)[:, :n]
        wide.copy_(d)
        weight, h = torch.randint(-4, 5, (n, hidden)).float(), torch.randint(-4, 5, (tokens, hidden)).float()
        blocks = -(-n // group)
        for first in (True, False):
            root = torch.full((tokens, hidden), torch.nan if first else 0.5)
            parts = torch.full((blocks + 1, tokens, hidden), torch.nan)
            triton_few.add_hidden(wide, weight, root, parts, group, first, 3, shape)
            assert torch.equal(root, d @ weight + (0 if first else 0.5))
            blockwise = [a @ b for a, b in zip(d.split(group, 1), weight.split(group), strict=True)]
            assert torch.equal(parts[:blocks], torch.stack(blockwise))
            assert torch.isnan(parts[blocks]).all()
            total = torch.full((n, hidden), torch.nan if first else 0.5)
            triton_few.add_weight(wide, h, total, not first, 3, shape)
            assert torch.equal(total, d.t() @ h + (0 if first else 0.5))
    # the fold goes from the left: 1 + 2**-24 + 2**-24 is 1, the other way round it is more
    parts = torch.tensor([1.0, 2.0**-24, 2.0**-24])[:, None].expand(3, 5).contiguous()
    root = torch.full((5,), torch.nan)
    triton_few.fold_kernel[(1,)](parts, root, 5, 3, FIRST=True, BLOCK=16)
    assert torch.equal(root, torch.ones(5))
    assert not torch.equal(root, parts.flip(0)[0] + parts.flip(0)[1] + parts.flip(0)[2])


def body_head():
    """Slices of tokens, kept logits, chunks in memory, leaves and ranks: the same loss and gradients."""
    import rl_logprob as lp
    from rl_contract import SingleRank
    from rl_logprob import gpu, gpu_grad, linear_gpu, plans

    fused = plans.Kernel(kind="pointer", block_m=16, block_n=128, block_k=16, warps=4, stages=2)
    gpu.ready = lambda x: gpu.kernels()
    gpu.processors_of = lambda index: 3
    gpu_grad._library_adds = lambda *a: False
    gpu.choose = lambda *a: ("fused", fused)
    # small numbers keep every sum of products exact, so that only an order of rounding steps could differ
    h, targets = torch.randint(-2, 3, (ROWS, HIDDEN)).float(), torch.randint(0, 600, (ROWS,))
    w = torch.randint(-2, 3, (1024, HIDDEN)).float() / 8
    w[600:] = torch.nan
    g, d, one = torch.randn(ROWS), torch.randn(ROWS), torch.empty(0)
    main = torch.nn.Parameter(w)

    @torch.no_grad()
    def both(leaves=1, keep=0):
        main.main_grad = torch.zeros_like(w)
        comm = SingleRank()
        x, logp, state, logits = linear_gpu.forward(h, main.data, targets, one, comm, 600, True, leaves, keep)
        assert sum(t.numel() for kept in logits for t in kept.values()) <= keep // 4
        assert bool(keep >= 4 * ROWS * 600) == (sum(t.numel() for k in logits for t in k.values()) == ROWS * 600)
        dh, own = linear_gpu.backward(h, main, targets, one, state, g, d, comm, 600, leaves, True, True, logits)
        assert own is None
        assert torch.equal(logp, ((x.double() - state[:, 0]) - state[:, 1]).float())
        return x, state, dh, main.main_grad

    # the interpreter's dot product has an order of its own
    gpu.GPU_GRAD_BLOCK = gpu_grad.GPU_GRAD_BLOCK = 128
    gpu_grad.FEW_TOKENS = 0
    want = both()
    cpu = lp.full_logprob(h @ w[:600].t(), vocab_size=600)
    assert ((want[0].double() - want[1][:, 0] - want[1][:, 1]) - cpu[torch.arange(ROWS), targets]).abs().max() < 2e-6
    exact, weight = h.double().requires_grad_(), w[:600].double().requires_grad_()
    logp = torch.log_softmax(exact @ weight.t(), 1)
    (logp[torch.arange(ROWS), targets] * g - (logp.exp() * logp).sum(1) * d).sum().backward()
    assert (want[2] - exact.grad).norm() / exact.grad.norm() < 1e-5
    assert (want[3][:600] - weight.grad).norm() / weight.grad.norm() < 1e-5
    assert not want[3][600:].any()
    # without main_grad every row is written once, padding too, whatever lay there
    unfilled, torch.empty_like = torch.empty_like, lambda x, **kw: unfilled(x, **kw).fill_(torch.nan)
    for few, leaves in ((0, 1), (1024, 1), (1024, 4)):
        gpu_grad.FEW_TOKENS = few
        given = (targets, one, want[1], g, d, SingleRank(), 600, leaves, False, True, [])
        own = linear_gpu.backward(h, torch.nn.Parameter(w, False), *given)[1]
        assert torch.equal(own, want[3]) if few == 0 else (own - want[3]).norm() / want[3].norm() < 1e-6
        nothing = linear_gpu.backward(h[:0], torch.nn.Parameter(w, False), *(x[:0] for x in given[:5]), *given[5:])[1]
        assert not nothing.any()
    torch.empty_like, gpu_grad.FEW_TOKENS = unfilled, 0
    for keep in (4 * ROWS * 600, 4 * ROWS * 300):
        assert all(torch.equal(a, b) for a, b in zip(both(keep=keep), want, strict=True))
    in_leaves = both(leaves=4)
    assert torch.equal(in_leaves[1], want[1])
    by_block, gpu._library_takes = gpu._library_takes, lambda *a: True
    for keep in (4 * ROWS * 600, 4 * ROWS * 300):
        assert all(torch.equal(a, b) for a, b in zip(both(keep=keep), want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(both(leaves=4, keep=keep), in_leaves, strict=True))
    gpu._library_takes = by_block
    gpu_grad.FEW_TOKENS = 1024
    for leaves in (1, 4):
        gpu_grad.FEW_BYTES = 160 << 20
        few = both(leaves)
        assert all((a - b).norm() / b.norm() < 1e-6 for a, b in zip(few[2:], want[2:], strict=True))
        gpu_grad.FEW_BYTES = 1
        assert all(torch.equal(a, b) for a, b in zip(both(leaves), few, strict=True))
    gpu_grad.FEW_TOKENS = 0
    assert all(torch.equal(a, b) for a, b in zip(both(leaves=4, keep=4 * ROWS * 300), in_leaves, strict=True))
    gpu.choose, gpu.CHUNK_ELEMENTS = (lambda *a: ("materialised", None)), ROWS * 4096
    assert all(torch.equal(a, b) for a, b in zip(both(leaves=4), in_leaves, strict=True))
    gpu.STATS_BYTES = 1
    assert torch.equal(both()[1], want[1])


def body_nonfinite():
    """A row with a NaN, a +inf, nothing finite or a meaningless temperature is NaN, and no other."""
    from rl_logprob import triton_scores as scores

    def state(logits, temp):
        found = scores.new_stats(len(logits), 3, True, logits.device)
        scores.tile_stats(logits, temp, logits.shape[1], found, 0)
        return scores.merge(*found)

    logits = torch.randn(5, 300)
    logits[0, 299], logits[1, 3] = torch.nan, torch.inf
    logits[2] = -torch.inf
    logits[3, :256] = -torch.inf
    found = state(logits, torch.empty(0))
    assert torch.isnan(found).all(1).tolist() == [True, True, True, False, False]
    assert not torch.isnan(found[3:]).any()
    tiny = torch.finfo(torch.float32).tiny
    temp = torch.tensor([1.0, 0.0, -1.0, torch.inf, 2.0, 0.9 * tiny, tiny])
    bad = [False, True, True, True, False, True, False]
    assert torch.isnan(state(torch.zeros(7, 300), temp)).all(1).tolist() == bad


def body_sampler():
    """The CPU's choices."""
    import rl_logprob as lp
    from rl_logprob import triton_sample

    logits = torch.randn(6, 2000)
    logits[2, 5] = logits[2, 1500] = 60.0
    seeds, positions = torch.randint(-(2**62), 2**62, (6,)), torch.arange(6)
    temp = torch.full((6,), 0.8)
    got = triton_sample.sample(logits, seeds, positions, temp, 1900, False)
    assert torch.equal(got, lp.gumbel_sample(logits, seeds, positions, vocab_size=1900, temperature=0.8))
    got = triton_sample.sample(logits, seeds, positions, torch.empty(0), 1900, True)
    assert torch.equal(got, lp.greedy_sample(logits, vocab_size=1900))
    logits[1, 3], logits[4, 7] = torch.nan, torch.inf
    got = triton_sample.sample(logits, seeds, positions, temp, 1900, False)
    assert (got < 0).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("name", ["statistics", "kept", "few", "head", "nonfinite", "sampler"])
def test_interpreter(name):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[f"body_{sys.argv[1]}"]()
