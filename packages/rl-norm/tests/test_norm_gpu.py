"""RMSNorm on a GPU: bits of the written-out order, whatever the batch, the launch and the call's history."""

import pytest
import torch

from rl_contract import ContractError
from rl_norm import ops, reference, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EPS = 1e-6
WIDTHS = (24, 128, 1000, 1024, 2048, 4096, 5120, 8192, 20000)


def rows(m, width, scale=1.0):
    x = torch.randn(m, width) * scale
    # outlier channels, as real hidden states have
    x[:, :: max(1, width // 5)] *= 50
    return x.bfloat16()


@pytest.fixture(autouse=True)
def poisoned():
    torch.manual_seed(0)
    junk = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    del junk


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("m", [1, 67])
def test_bits_are_those_of_the_reference(m, width):
    x, residual, weight, dy = rows(m, width), rows(m, width), rows(1, width)[0], rows(m, width)
    on = [t.cuda() for t in (x, residual, weight, dy)]
    y, stream = rms_norm(on[0], on[2], EPS, residual=on[1])
    want, want_stream = reference.rms_norm(x, weight, EPS, residual, arch="sm90")
    assert torch.equal(y.cpu(), want)
    assert torch.equal(stream.cpu(), want_stream)
    assert torch.equal(rms_norm(on[0], on[2], EPS).cpu(), reference.rms_norm(x, weight, EPS, arch="sm90")[0])
    _, rstd = ops.rms_norm(stream, on[2], EPS)
    dx = ops.grad_input(on[3], stream, on[2], rstd, on[1])
    assert torch.equal(dx.cpu(), reference.grad_input(dy, want_stream, weight, EPS, residual, arch="sm90"))
    dw = ops.grad_weight(on[3], stream, rstd)
    assert torch.equal(dw.cpu(), reference.grad_weight(dy, want_stream, EPS, arch="sm90"))


def test_rsqrt_is_correctly_rounded_for_every_mantissa():
    """Two binades hold every case, since scaling by 4 scales the result by 1/2."""
    import triton
    import triton.language as tl

    from rl_norm.triton_norm import rsqrt_f32

    @triton.jit
    def kernel(x, y, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, rsqrt_f32(tl.load(x + at)))

    bits = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32, device="cuda")
    x, y = bits.view(torch.float32), torch.empty(len(bits), device="cuda")
    kernel[(len(bits) // 1024,)](x, y, BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(y, (1.0 / x.double().sqrt()).float())


def test_another_order_of_lanes_shows():
    x = rows(512, 4096).float()
    squares = x * x
    assert (reference.lane_sum(squares, "sm90") != reference.lane_sum(squares, "cpu")).float().mean() > 0.2


@pytest.mark.parametrize("width", WIDTHS)
def test_batch_row_alone_equals_row_in_batch(width):
    x, weight = rows(1000, width).cuda(), rows(1, width)[0].cuda()
    y = rms_norm(x, weight, EPS)
    for i in (0, 1, 499, 999):
        assert torch.equal(rms_norm(x[i : i + 1].clone(), weight, EPS), y[i : i + 1])
    wide = torch.empty(1000, width + 8, dtype=torch.bfloat16, device="cuda")
    wide[:, :width] = x
    assert torch.equal(rms_norm(wide[:, :width], weight, EPS), y)


def test_graph_replay_equals_eager():
    x, residual, weight = rows(64, 4096).cuda(), rows(64, 4096).cuda(), rows(1, 4096)[0].cuda()
    want = rms_norm(x, weight, EPS, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rms_norm(x, weight, EPS, residual=residual)
    for t in got:
        t.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_twenty_repeats_of_the_gradient_are_equal_and_right():
    x = rows(3000, 1024).cuda().requires_grad_()
    weight = rows(1, 1024)[0].cuda().requires_grad_()
    dy = rows(3000, 1024).cuda()
    first = None
    for _ in range(20):
        grads = torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), dy)
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads))
    wide, w = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w
    for got, want in zip(first, torch.autograd.grad(y, (wide, w), dy.double())):
        assert (got.double() - want).norm() / want.norm() < 5e-3


@pytest.mark.parametrize(("heads", "leaves"), [(8, 1), (8, 4), (32, 8)])
def test_layout_head_leaves_of_the_weight_gradient(heads, leaves):
    dy, x = rows(100 * heads, 128), rows(100 * heads, 128)
    on = [t.cuda() for t in (dy, x)]
    _, rstd = ops.rms_norm(on[1], torch.ones(128, dtype=torch.bfloat16, device="cuda"), EPS)
    whole = ops.grad_weight(*on, rstd, heads, leaves)
    assert torch.equal(whole.cpu(), reference.grad_weight(dy, x, EPS, heads, leaves, arch="sm90"))
    for world in (2, 4):
        if leaves % world:
            continue
        parts = []
        for r in range(world):
            mine = [t.view(100, world, -1, 128)[:, r].reshape(-1, 128) for t in on]
            parts.append(
                ops.grad_weight(*mine, rstd.view(100, world, -1)[:, r].reshape(-1), heads // world, leaves // world)
            )
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        assert torch.equal(parts[0], whole)


@pytest.mark.parametrize(
    ("tokens", "heads", "leaves", "width"), [(8192, 1, 1, 1000), (1100, 16, 2, 128), (8229, 2, 1, 72)]
)
def test_weight_gradients_of_many_rows_fold_their_blocks_in_order(tokens, heads, leaves, width):
    """More blocks than the fold has on their way at once, with and without a rest."""
    dy, x = rows(tokens * heads, width), rows(tokens * heads, width)
    on = [t.cuda() for t in (dy, x)]
    _, rstd = ops.rms_norm(on[1], torch.ones(width, dtype=torch.bfloat16, device="cuda"), EPS)
    found = ops.grad_weight(*on, rstd, heads, leaves)
    assert torch.equal(found.cpu(), reference.grad_weight(dy, x, EPS, heads, leaves, arch="sm90"))


def test_weight_gradients_of_more_blocks_than_a_second_axis_takes():
    """65,536 blocks and a row: the blocks' sums by the CPU's kernel, folded in order."""
    dy, x = rows(65536 * 64 + 1, 8), rows(65536 * 64 + 1, 8)
    on = [t.cuda() for t in (dy, x)]
    _, rstd = ops.rms_norm(on[1], torch.ones(8, dtype=torch.bfloat16, device="cuda"), EPS)
    found = ops.grad_weight(*on, rstd, 1, 1)
    assert torch.equal(found.cpu(), reference.grad_weight(dy, x, EPS, 1, 1, arch="sm90"))


def test_empty_and_refused_inputs():
    weight = torch.ones(64, dtype=torch.bfloat16, device="cuda")
    assert rms_norm(torch.empty(0, 64, dtype=torch.bfloat16, device="cuda"), weight, EPS).shape == (0, 64)
    with pytest.raises(ContractError, match="bfloat16"):
        rms_norm(torch.ones(2, 64, device="cuda"), weight.float(), EPS)
