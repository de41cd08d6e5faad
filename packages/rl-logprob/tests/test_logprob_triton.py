"""The Triton kernels without a GPU: their arithmetic in Triton's interpreter, and their compilation for every
architecture.

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
        assert torch.equal(head.target_logits(h, w, targets, temp, 0), x[at, targets])
        parts = [[a[i:j].contiguous() for a in found] for i, j in ((0, 1), (1, 3))]
        top = torch.stack([scores.rank_top(p[0]) for p in parts]).amax(0)
        sums = sum(scores.rank_sums(*p, top) for p in parts)
        assert torch.equal(scores.state_of(top, sums, True), state)
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


def body_head():
    """Slices of tokens, kept logits, chunks in memory, leaves and ranks: the same loss and gradients."""
    import rl_logprob as lp
    from rl_contract import SingleRank
    from rl_logprob import gpu, linear_gpu, plans

    fused = plans.Kernel(kind="pointer", block_m=16, block_n=128, block_k=16, warps=4, stages=2)
    gpu.ready = lambda x: gpu.kernels()
    gpu._processors = lambda index: 3
    gpu._library_adds = lambda *a: False
    gpu._choose = lambda *a: ("fused", fused)
    # small numbers keep every sum of products exact, so that only an order of rounding steps could differ
    h, targets = torch.randint(-2, 3, (ROWS, HIDDEN)).float(), torch.randint(0, 600, (ROWS,))
    w = torch.randint(-2, 3, (1024, HIDDEN)).float() / 8
    w[600:] = torch.nan
    g, d, one = torch.randn(ROWS), torch.randn(ROWS), torch.empty(0)
    main = torch.nn.Parameter(w)

    def both(leaves=1, keep=0):
        main.main_grad = torch.zeros_like(w)
        comm = SingleRank()
        x, state, logits = linear_gpu.forward(h, main.data, targets, one, comm, 600, True, leaves, keep)
        assert sum(t.numel() for kept in logits for t in kept.values()) <= keep // 4
        assert bool(keep >= 4 * ROWS * 600) == (sum(t.numel() for k in logits for t in k.values()) == ROWS * 600)
        dh, own = linear_gpu.backward(h, main, targets, one, state, g, d, comm, 600, leaves, True, True, logits)
        assert own is None
        return x, state, dh, main.main_grad

    gpu.GPU_GRAD_BLOCK = 128
    want = both()
    cpu = lp.full_logprob(h @ w[:600].t(), vocab_size=600)
    assert ((want[0].double() - want[1][:, 0] - want[1][:, 1]) - cpu[torch.arange(ROWS), targets]).abs().max() < 2e-6
    exact, weight = h.double().requires_grad_(), w[:600].double().requires_grad_()
    logp = torch.log_softmax(exact @ weight.t(), 1)
    (logp[torch.arange(ROWS), targets] * g - (logp.exp() * logp).sum(1) * d).sum().backward()
    assert (want[2] - exact.grad).norm() / exact.grad.norm() < 1e-5
    assert (want[3][:600] - weight.grad).norm() / weight.grad.norm() < 1e-5
    assert not want[3][600:].any()
    for keep in (4 * ROWS * 600, 4 * ROWS * 300):
        assert all(torch.equal(a, b) for a, b in zip(both(keep=keep), want, strict=True))
    in_leaves = both(leaves=4)
    assert torch.equal(in_leaves[1], want[1])
    assert all(torch.equal(a, b) for a, b in zip(both(leaves=4, keep=4 * ROWS * 300), in_leaves, strict=True))
    gpu._choose, gpu.CHUNK_ELEMENTS = (lambda *a: ("materialised", None)), ROWS * 4096
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
    temp = torch.tensor([1.0, 0.0, -1.0, torch.inf, 2.0])
    assert torch.isnan(state(torch.randn(5, 300), temp)).all(1).tolist() == [False, True, True, True, False]


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


@pytest.mark.parametrize("name", ["statistics", "head", "nonfinite", "sampler"])
def test_interpreter(name):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("backend", "arch", "width"), [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)])
def test_kernels_compile_without_a_gpu(backend, arch, width):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from rl_logprob import triton_head, triton_sample, triton_scores

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    f, i, n, d = "*fp32", "i32", "*i64", "*fp64"
    given = {
        "temperature": f,
        "state": d,
        "targets": n,
        "dlogp": f,
        "dentropy": f,
        "m": f,
        "s": n,
        "u": n,
        "out": "*bf16",
    }
    shape = {"M": i, "N": i, "K": i, "first": i, "stride": i, "stride_am": i, "stride_bn": i}
    block = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "EVEN_K": True, "UNIT": False}
    stats = {"logits": f, "temperature": f, "m": f, "s": n, "u": n, "T": i, "C": i, "stride": i, "first_tile": i}
    merge = {"m": f, "s": n, "u": n, "state": d, "T": i, "tiles": i, "stride_row": i, "stride_tile": i}
    sample = {"logits": f, "seeds": n, "positions": n, "temperature": f, "values": d, "ids_out": n, "V": i}
    jobs = [
        (
            triton_head.head_pointer_kernel,
            {"a": "*bf16", "b": "*bf16"} | given | shape,
            block | {"ENTROPY": True, "GRADIENT": g},
        )
        for g in (False, True)
    ]
    jobs += [
        (triton_scores.tile_stats_kernel, stats | {"stride_tile": i}, {"ROWS": 16, "UNIT": False, "ENTROPY": True}),
        (triton_scores.merge_kernel, merge, {"ENTROPY": True, "ROWS": 16, "TILES": 128}),
        (
            triton_sample.sample_kernel,
            sample | {"per_program": i, "stride": i},
            {"GREEDY": False, "UNIT": False, "BLOCK": 1024},
        ),
    ]
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    if backend == "hip":
        options |= {"kpack": 1, "matrix_instr_nonkdim": 16}
    for kernel, signature, constants in jobs:
        source = ASTSource(fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        binary = compile(source, target=GPUTarget(backend, arch, width), options=options)
        text = binary.asm["ptx" if backend == "cuda" else "amdgcn"]
        # what the contract calls separate roundings is not contracted: no fp64 fma outside a division
        assert backend != "cuda" or "fma.rn.f64" not in text
        assert (
            kernel is not triton_head.head_pointer_kernel
            or ("wgmma" if backend == "cuda" else "v_mfma_f32_16x16") in text
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[f"body_{sys.argv[1]}"]()
