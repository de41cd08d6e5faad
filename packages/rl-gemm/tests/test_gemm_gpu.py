"""The GPU half against the one promise: whatever evaluates a contract on this GPU gives the same fp32 bits.

Adversarial data (normal, exponents spread over 2**-10 to 2**10, cancelling halves), odd sizes, NaN-poisoned memory.
The reference is one Triton kernel with fixed tiles, itself compared with the CPU model of the matrix unit.
"""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import rl_gemm
from rl_contract import ContractError, launches, reset_launches
from rl_gemm import mma, ops, plans, vendor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

M_LIST = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 257, 1000, 2049)
SHAPES = ((4096, 4096), (1536, 4096), (1000, 4096), (1040, 3072), (128, 512))  # N, K
DATA = ("normal", "spread", "cancel")


def matrix(rows, columns, kind, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    if kind == "spread":
        x = torch.ldexp(x, torch.randint(-10, 11, x.shape, generator=generator, device="cuda"))
    if kind == "cancel":
        half = columns // 2
        noise = 2.0**-7 * torch.randn(rows, half, generator=generator, device="cuda")
        x[:, half : 2 * half] = -x[:, :half] * (1 + noise)
    return x.bfloat16()


def reference(a, b, leaves=1, fused=1):
    """fp32 by the pointer kernel with one tile for every shape."""
    from rl_gemm import gpu

    kernel = plans.Kernel(kind="leaf", block_m=16, block_n=32, block_k=16, warps=4, stages=3)
    return gpu._launch(kernel, a, b, leaves, 1 if leaves == 1 else fused, None, torch.float32)


def equal(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.fixture(autouse=True)
def poisoned():
    """Freed blocks full of NaN, so that an output that nobody wrote shows."""
    junk = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    del junk


@pytest.mark.parametrize("leaves", [1, 2, 8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_m_and_backend_has_the_same_fp32_bits(n, k, leaves):
    if k % (16 * leaves):
        pytest.skip("K not divisible")
    reset_launches()
    for kind in DATA:
        x, weight = matrix(max(M_LIST), k, kind, 1), matrix(n, k, kind, 2)
        want = reference(x, weight, leaves)
        for m in M_LIST:
            assert equal(ops.matmul_tree(x[:m], weight, leaves), want[:m]), (kind, m)
            y = ops.matmul(x[:m], weight, None, leaves, torch.bfloat16)
            assert torch.equal(y.view(torch.int16), want[:m].bfloat16().view(torch.int16)), (kind, m)
    assert len({r["plan"] for r in launches()}) > 1


def test_every_kernel_of_the_plan_file_has_the_same_fp32_bits():
    from rl_gemm import gpu

    checked = 0
    for kind in DATA:
        x, weight = matrix(333, 4096, kind, 3), matrix(1032, 4096, kind, 4)
        want = {g: reference(x, weight, g) for g in (1, 2, 4, 8, 16)}
        assert not equal(want[1], want[2])
        for kernel in plans.shipped("sm90").kernels.values():
            if kernel.kind == "gated":
                continue
            for leaves in (1, 2, 4, 8, 16) if kernel.kind in ("tree", "hopper") else (1, 8):
                if not gpu._fits(kernel, x, weight, 4096 // leaves, 1):
                    continue
                got = gpu._launch(kernel, x, weight, leaves, 1, None, torch.float32)
                assert equal(got, want[leaves]), (kernel.name, leaves, kind)
                checked += 1
    assert checked >= 100


def test_the_reference_is_the_cpu_model():
    for kind in DATA:
        x, weight = matrix(33, 4096, kind, 5), matrix(65, 4096, kind, 6)
        for leaves in (1, 8):
            assert equal(reference(x, weight, leaves).cpu(), mma.tree(x.cpu(), weight.cpu(), leaves))


def test_a_wrong_order_shows():
    x, weight = matrix(64, 4096, "normal", 7), matrix(512, 4096, "normal", 8)
    flipped = reference(x.flip(1), weight.flip(1))
    assert (flipped.view(torch.int32) != reference(x, weight).view(torch.int32)).float().mean() > 0.5


def test_batch_row_alone_equals_row_in_batch():
    for n, k in SHAPES:
        x, weight = matrix(1000, k, "cancel", 9), matrix(n, k, "cancel", 10)
        whole = ops.matmul_tree(x, weight, 1)
        for i in (0, 1, 16, 500, 999):
            assert equal(ops.matmul_tree(x[i : i + 1].clone(), weight, 1), whole[i : i + 1])


@pytest.mark.parametrize("m", [5, 300])
def test_layout_tp_1_2_4_8(m):
    x, weight = matrix(m, 4096, "spread", 11), matrix(1024, 4096, "spread", 12)
    want = ops.matmul_tree(x, weight, 8)
    for world in (2, 4, 8):
        parts = [
            ops.matmul_tree(x.chunk(world, 1)[r], weight.chunk(world, 1)[r].contiguous(), 8 // world)
            for r in range(world)
        ]
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        assert equal(parts[0], want)


@pytest.mark.parametrize(("leaves", "fused"), [(1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (8, 2)])
@pytest.mark.parametrize("m", [1, 7, 100, 1000])
def test_grad_input_has_the_bits_of_its_tree(m, leaves, fused):
    dy, weight = matrix(m, 6144, "spread", 13), matrix(6144, 1024, "normal", 14)
    want = reference(dy, weight.t(), leaves, fused)
    assert equal(ops.grad_input(dy, weight, leaves, fused), want)
    rounded = ops.grad_input(dy, weight, leaves, fused, "gemm.column", torch.bfloat16)
    assert torch.equal(rounded, want.bfloat16())
    if leaves > 1 and fused == 2:
        order = torch.arange(6144, device="cuda").view(2, leaves, -1).transpose(0, 1).flatten()
        assert equal(reference(dy[:, order], weight[order].t(), leaves), want)


@pytest.mark.parametrize("tokens", [1, 100, 4096, 8192, 9000])
def test_grad_weight_folds_blocks_of_tokens(tokens):
    dy, x = matrix(tokens, 768, "spread", 15), matrix(tokens, 512, "normal", 16)
    want = reference(dy[:8192].t(), x[:8192].t())
    if tokens > 8192:
        want = want + reference(dy[8192:].t(), x[8192:].t())
    assert equal(ops.grad_weight(dy, x), want)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1000, 520)])
@pytest.mark.parametrize("tokens", [100, 8192, 8192 + 77])
def test_main_grad_takes_block_after_block(n, k, tokens):
    """Whoever adds, the library onto main_grad or a kernel and an addition, the bits are those of single blocks."""
    if tokens > 8192 and k == 12288:
        pytest.skip("covered by the smaller shapes")
    dy, x = matrix(tokens, n, "spread", 1), matrix(tokens, k, "cancel", 2)
    start = torch.randn(n, k, device="cuda")
    want = start.clone()
    for begin in range(0, tokens, 8192):
        block = slice(begin, begin + 8192)
        want += ops.grad_weight(dy[block].contiguous(), x[block].contiguous())
    weight = torch.nn.Parameter(matrix(n, k, "normal", 3))
    weight.main_grad = start.clone()
    y = rl_gemm.column_parallel_linear(x, weight)
    y.backward(dy)
    assert weight.grad is None
    assert equal(weight.main_grad, want)


def test_twenty_repeats_of_every_gradient_are_equal():
    x = matrix(2000, 1024, "normal", 17).requires_grad_()
    weight = matrix(6144, 1024, "normal", 18).requires_grad_()
    bias = matrix(1, 6144, "normal", 19)[0].requires_grad_()
    dy = matrix(2000, 6144, "normal", 20)
    first = None
    for _ in range(20):
        grads = torch.autograd.grad(
            rl_gemm.column_parallel_linear(x, weight, bias, leaves=4, fused=2), (x, weight, bias), dy
        )
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads))
    exact = dy.double() @ weight.double()
    assert ((first[0].double() - exact).norm() / exact.norm()) < 5e-3
    exact = dy.double().t() @ x.double()
    assert ((first[1].double() - exact).norm() / exact.norm()) < 5e-3


def test_twenty_repeats_of_row_and_swiglu_gradients_are_equal():
    x = matrix(2000, 2048, "normal", 43).requires_grad_()
    weight = matrix(1024, 1024, "normal", 44).requires_grad_()
    dy = matrix(2000, 1024, "normal", 45)
    first = None
    for _ in range(20):
        y = rl_gemm.row_parallel_linear(rl_gemm.swiglu(x), weight, leaves=8)
        grads = torch.autograd.grad(y, (x, weight), dy)
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads))


@pytest.mark.parametrize("m", [1, 16, 64, 500])
@pytest.mark.parametrize("leaves", [1, 8])
def test_graph_replay_equals_eager(m, leaves):
    x, weight = matrix(m, 4096, "normal", 21), matrix(4096, 4096, "normal", 22)
    eager = ops.matmul(x, weight, None, leaves, torch.float32)
    reset_launches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.matmul(x, weight, None, leaves, torch.float32)
    assert {r["phase"] for r in launches()} == {"capture"}
    y.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
        assert equal(y, eager)


def test_bias_is_added_in_fp32_before_the_one_rounding():
    for m in (1, 40, 600):
        x, weight, bias = (
            matrix(m, 2048, "normal", 23),
            matrix(512, 2048, "normal", 24),
            matrix(1, 512, "spread", 25)[0],
        )
        for leaves in (1, 4):
            want = (reference(x, weight, leaves) + bias.float()).bfloat16()
            assert torch.equal(rl_gemm.linear(x, weight, bias, leaves=leaves), want)


def test_accuracy_against_fp64():
    x, weight = matrix(256, 4096, "normal", 26), matrix(1024, 4096, "normal", 27)
    exact = x.double() @ weight.double().t()
    chain, tree = ops.matmul_tree(x, weight, 1).double(), ops.matmul_tree(x, weight, 8).double()
    assert (chain - exact).norm() / exact.norm() < 1e-5
    assert (tree - exact).norm() < (chain - exact).norm()


def test_strides_views_and_empty_inputs():
    x, weight = matrix(64, 1024, "normal", 28), matrix(512, 1024, "normal", 29)
    want = reference(x, weight)
    wide = torch.empty(64, 2048, device="cuda", dtype=torch.bfloat16)
    wide[:, 1::2] = x
    assert equal(ops.matmul_tree(wide[:, 1::2], weight), want)
    assert equal(ops.matmul_tree(x.t().contiguous().t(), weight.t().contiguous().t()), want)
    padded = torch.zeros(64, 1100, device="cuda", dtype=torch.bfloat16)
    padded[:, 3 : 3 + 1024] = x
    assert equal(ops.matmul_tree(padded[:, 3 : 3 + 1024], weight), want)
    assert equal(ops.matmul_tree(x[:1].expand(64, -1), weight), want[:1].expand(64, -1).contiguous())
    assert ops.matmul_tree(x[:0], weight).shape == (0, 512)
    assert ops.matmul_tree(x, weight[:0]).shape == (64, 0)
    odd = reference(x[:, :1001].contiguous(), weight[:, :1001].contiguous())
    assert equal(ops.matmul_tree(x[:, :1001], weight[:, :1001]), odd)


def test_refusals_name_what_is_supported():
    x, weight = matrix(4, 1000, "normal", 30), matrix(8, 1000, "normal", 31)
    for bad in (torch.float16, torch.float32):
        with pytest.raises(ContractError, match="bfloat16"):
            ops.matmul_tree(x.to(bad), weight.to(bad))
    with pytest.raises(ContractError, match="divisible"):
        ops.matmul_tree(x, weight, 8)


def test_more_than_2_to_the_31_elements():
    m, k = 70_000, 32_768
    x = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    x[:] = matrix(1, k, "normal", 32)
    x[-1] = matrix(1, k, "normal", 33)[0]
    weight = matrix(64, k, "normal", 34)
    y = ops.matmul_tree(x, weight)
    assert equal(y[-1:], reference(x[-1:].clone(), weight))
    assert equal(y[:-1], reference(x[:1].clone(), weight).expand(m - 1, -1).contiguous())


def test_merge_of_more_than_2_to_the_31_elements():
    from rl_gemm import triton_gemm

    parts = torch.zeros(16, 35_000, 4096, device="cuda")
    assert parts.numel() > 2**31
    for i in (0, 12, 15):
        parts[i, -1] = torch.randn(4096, device="cuda")
    out = torch.empty(35_000, 4096, device="cuda")
    triton_gemm.merge(parts, None, out)
    assert equal(out[-1], parts[0, -1] + (parts[12, -1] + parts[15, -1]))
    assert not out[:-1].any()


def test_library_switches_are_restored():
    matmul = torch.backends.cuda.matmul
    state = lambda: (  # noqa: E731
        torch.backends.cuda.preferred_blas_library(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    before = state()
    with vendor.no_split_k():
        assert state() != before
    assert state() == before
    with pytest.raises(ZeroDivisionError), vendor.no_split_k():
        raise ZeroDivisionError
    assert state() == before


def test_library_that_splits_k_is_no_backend():
    """The layer o at 16 rows: the library's own choice splits K; without the split it has the contract's bits."""
    x, weight = matrix(16, 4096, "normal", 35), matrix(4096, 4096, "normal", 36)
    want = reference(x, weight)
    assert not equal(vendor.uncertified_matmul(x, weight, None, torch.float32), want)
    assert equal(vendor.matmul(x, weight, None, torch.float32), want)


def test_certify_refuses_a_library_that_splits_k():
    """The tool itself, on the layer o at 16 rows: exit status 1 as the library comes, 0 without the split."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tools" / "certify").exists():
        pytest.skip("needs the repository's tools")
    plan = files("rl_gemm") / "plans" / "sm90.json"
    command = [sys.executable, root / "tools" / "certify", "--plan", plan, "--shape", "4096,4096", "--rows", "16"]
    refused, passed = (
        subprocess.run([*command, *more], capture_output=True, text=True, cwd=root) for more in (["--default"], [])
    )
    assert refused.returncode == 1, refused.stderr[-500:]
    assert "refused, other bits at M=[16]" in refused.stdout
    assert passed.returncode == 0, passed.stdout + passed.stderr[-500:]


def test_without_a_certificate_the_kernel_runs(monkeypatch):
    from dataclasses import replace

    x, weight = matrix(512, 4096, "normal", 37), matrix(4096, 4096, "normal", 38)
    bare = replace(plans.shipped("sm90"), certificates=())
    monkeypatch.setitem(plans.plan_files.own, "sm90", bare)
    reset_launches()
    y = ops.matmul_tree(x, weight)
    assert all("triton" in r["kernel"] for r in launches())
    assert equal(y, reference(x, weight))


def test_compiled_equals_eager():
    x, weight = matrix(40, 1024, "normal", 39), matrix(512, 1024, "normal", 40)
    compiled = torch.compile(lambda a, b: rl_gemm.swiglu(rl_gemm.linear(a, b, leaves=4)), fullgraph=True)
    assert torch.equal(compiled(x, weight), rl_gemm.swiglu(rl_gemm.linear(x, weight, leaves=4)))


def gated(m, n, k, warps, stages, **more):
    return plans.Kernel(kind="gated", block_m=m, block_n=n, block_k=k, warps=warps, stages=stages, **more)


GATED = (
    gated(16, 64, 128, 4, 4, swap=True),
    gated(16, 32, 128, 4, 5, per_sm=2),
    gated(32, 64, 64, 4, 5, swap=True, per_sm=2),
    gated(64, 32, 128, 4, 5),
    gated(128, 64, 64, 8, 6),
)


@pytest.fixture
def fused_plan(monkeypatch):
    """The shipped plan with a gated kernel for gate_up of Qwen3-8B, up to 16, 32, 64 and 256 rows."""
    from dataclasses import replace

    own = plans.shipped("sm90")
    sizes = zip((16, 32, 64, 256), (GATED[0], GATED[2], GATED[3], GATED[4]))
    head = {"operation": plans.GATE_UP, "n": 24576, "k": 4096, "leaves": 1}
    rows = [plans.Row(**head, m=m, use=kernel.name) for m, kernel in sizes]
    rows.append(plans.Row(**head, m=plans.ANY_M, use=plans.UNFUSED))
    others = [r for r in own.rows if r.operation != plans.GATE_UP]
    kernels = own.kernels | {kernel.name: kernel for kernel in GATED}
    fused = replace(own, kernels=kernels, rows=(*others, *rows), _index={})
    monkeypatch.setitem(plans.plan_files.own, "sm90", fused)


@pytest.mark.usefixtures("fused_plan")
def test_gate_up_swiglu_has_the_bits_of_the_two_in_turn():
    """Every M of the list, beside the reference chain and the SwiGLU kernel: fused up to 256 rows of one shape."""
    for n, k in ((24576, 4096), (6144, 1024), (1000, 4096)):
        for kind in DATA:
            x, weight = matrix(333, k, kind, 46), matrix(n, k, kind, 47)
            want = rl_gemm.swiglu(reference(x, weight).bfloat16())
            for m in (*(m for m in M_LIST if m <= 257), 333):
                reset_launches()
                got = rl_gemm.gate_up_swiglu(x[:m], weight)
                assert torch.equal(got.view(torch.int16), want[:m].view(torch.int16)), (n, k, kind, m)
                assert {"gemm.column", "swiglu"} == {r["boundary"] for r in launches()}
                fused = {"rl_gemm.triton.gated"} == {r["kernel"] for r in launches()}
                assert fused == (n == 24576 and m <= 256), (n, m)


def test_every_gated_kernel_has_the_bits_of_the_two_in_turn():
    """Odd sizes, where a tile of gate hangs over into up; NaN where nothing may be read or left."""
    from rl_gemm import gpu

    shipped = [k for k in plans.shipped("sm90").kernels.values() if k.kind == "gated"]
    for kind in DATA:
        for f, k in ((1000, 2048), (24, 136), (1, 512)):
            x = torch.full((401, k), float("nan"), device="cuda", dtype=torch.bfloat16)
            x[:333] = matrix(333, k, kind, 48)
            weight = matrix(2 * f, k, kind, 49)
            want = rl_gemm.swiglu(reference(x[:333], weight).bfloat16())
            for kernel in {k.name: k for k in (*GATED, *shipped)}.values():
                out = torch.full((333, f), float("nan"), device="cuda", dtype=torch.bfloat16)
                gpu._gated().launch(kernel, x[:333], weight, out, 132)
                assert torch.equal(out.view(torch.int16), want.view(torch.int16)), (kernel.name, f, k, kind)


@pytest.mark.usefixtures("fused_plan")
def test_gate_up_swiglu_views_gradient_and_graph():
    x, weight = matrix(16, 4096, "normal", 50), matrix(24576, 4096, "normal", 51)
    want = rl_gemm.gate_up_swiglu(x, weight)
    assert torch.equal(rl_gemm.gate_up_swiglu(x[5:6].clone(), weight), want[5:6])
    wide = torch.zeros(16, 4099, device="cuda", dtype=torch.bfloat16)
    wide[:, 3:] = x
    assert torch.equal(rl_gemm.gate_up_swiglu(wide[:, 3:], weight), want)
    assert torch.equal(rl_gemm.gate_up_swiglu(x, weight.t().contiguous().t()), want)
    assert rl_gemm.gate_up_swiglu(x[:0], weight).shape == (0, 12288)
    trained = rl_gemm.gate_up_swiglu(x, weight.requires_grad_())
    assert torch.equal(trained, want)
    trained.sum().backward()
    assert weight.grad.isfinite().all()
    weight = weight.detach()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rl_gemm.gate_up_swiglu(x, weight)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, want)


def test_swiglu_bits_and_gradient():
    gate_up = matrix(300, 2 * 1000, "spread", 41).requires_grad_()
    y = rl_gemm.swiglu(gate_up)
    gate, up = gate_up.detach().double().chunk(2, -1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-30)
    assert torch.equal(rl_gemm.swiglu(gate_up[7:8]), y[7:8])
    dy = matrix(300, 1000, "normal", 42)
    (grad,) = torch.autograd.grad(y, gate_up, dy)
    wide = gate_up.detach().double().requires_grad_()
    g, u = wide.chunk(2, -1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(g) * u, wide, dy.double())
    assert (grad.double() - want).norm() / want.norm() < 5e-3
    values = torch.tensor(
        [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3e38, -3e38, 88.7, -88.8], device="cuda"
    )
    both = torch.stack([values, torch.ones_like(values)]).reshape(1, -1).bfloat16()
    got = rl_gemm.swiglu(both)[0].float()
    assert got[0] == float("inf")
    assert got[1].isnan()
    assert got[2].isnan()
    assert got[5] > 2.9e38
    assert got[6] == 0
