"""The GPU half against the one promise: whatever evaluates a contract on this GPU gives the same fp32 bits.

Adversarial data (normal, exponents spread over 2**-10 to 2**10, cancelling halves), odd sizes, NaN-poisoned memory.
The reference is one Triton kernel with fixed tiles, itself compared with the CPU model of the matrix unit.
"""

import pytest
import torch

import rl_gemm
from rl_contract import ContractError, launches, reset_launches
from rl_gemm import mma, ops, plans
from rl_gemm.testing import DATA, M_LIST, equal, matrix, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned"),
]

SHAPES = ((4096, 4096), (1536, 4096), (1000, 4096), (1040, 3072), (128, 512))  # N, K


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
                got = gpu.launcher(kernel, x, weight, leaves, 1, None, torch.float32)(x, weight, None)
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
    from rl_gemm import triton_merge

    parts = torch.zeros(16, 35_000, 4096, device="cuda")
    assert parts.numel() > 2**31
    for i in (0, 12, 15):
        parts[i, -1] = torch.randn(4096, device="cuda")
    out = torch.empty(35_000, 4096, device="cuda")
    triton_merge.merge(parts, None, out)
    assert equal(out[-1], parts[0, -1] + (parts[12, -1] + parts[15, -1]))
    assert not out[:-1].any()


def test_compiled_equals_eager():
    x, weight = matrix(40, 1024, "normal", 39), matrix(512, 1024, "normal", 40)
    compiled = torch.compile(lambda a, b: rl_gemm.swiglu(rl_gemm.linear(a, b, leaves=4)), fullgraph=True)
    assert torch.equal(compiled(x, weight), rl_gemm.swiglu(rl_gemm.linear(x, weight, leaves=4)))
