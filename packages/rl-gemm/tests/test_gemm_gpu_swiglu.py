"""SwiGLU on a GPU, alone and behind gate_up in one kernel: the bits of the two in turn."""

from dataclasses import replace

import pytest
import torch

import rl_gemm
from rl_contract import launches, reset_launches
from rl_gemm import plans
from rl_gemm.testing import DATA, M_LIST, matrix, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned"),
]


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
