"""RMSNorm gradients: order, accuracy, main_grad, and one tree over heads at every TP size."""

import pytest
import torch

from rl_contract import ContractError, TokenShards
from rl_contract.testing import on_ranks
from rl_norm import ops, reference, rms_norm

TYPES = (torch.bfloat16, torch.float32)
EPS = 1e-6


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_equal_reference(dtype):
    x, residual, dy, dstream = (torch.randn(200, 100).to(dtype) for _ in range(4))
    weight = torch.randn(100).to(dtype)
    a, b, w = (t.clone().requires_grad_() for t in (x, residual, weight))
    y, stream = rms_norm(a, w, EPS, residual=b)
    torch.autograd.backward([y, stream], [dy, dstream])
    s = stream.detach()
    want = reference.grad_input(dy, s, weight, EPS, dstream)
    assert torch.equal(a.grad, want)
    assert torch.equal(b.grad, want)
    assert torch.equal(w.grad, reference.grad_weight(dy, s, EPS).to(dtype))

    a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rms_norm(a, w, EPS).backward(dy)
    assert torch.equal(a.grad, reference.grad_input(dy, x, weight, EPS))
    assert torch.equal(w.grad, reference.grad_weight(dy, x, EPS).to(dtype))


@pytest.mark.field_report("R41")
def test_gradients_against_fp64():
    x, residual, weight = torch.randn(9, 7, 64), torch.randn(9, 7, 64), torch.randn(64)
    ours = [t.clone().requires_grad_() for t in (x, weight, residual)]
    exact = [t.double().requires_grad_() for t in (x, weight, residual)]
    y, stream = rms_norm(*ours[:2], EPS, residual=ours[2])
    (y.pow(3).sum() + stream.sin().sum()).backward()
    s = exact[0] + exact[2]
    y = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS) * exact[1]
    (y.pow(3).sum() + s.sin().sum()).backward()
    for a, b in zip(ours, exact):
        assert (a.grad - b.grad).abs().max() < 2e-6 * b.grad.abs().max()


def test_only_one_output_used():
    x, residual, weight = (torch.randn(5, 16, requires_grad=True) for _ in range(3))
    weight = weight[0].detach().requires_grad_()
    _, stream = rms_norm(x, weight, EPS, residual=residual)
    stream.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 16))
    assert weight.grad is None
    x.grad = None
    y, stream = rms_norm(x, weight, EPS, residual=residual)
    y.sum().backward()
    assert torch.equal(x.grad, reference.grad_input(torch.ones(5, 16), stream.detach(), weight.detach(), EPS))


@pytest.mark.parametrize(("world", "leaves"), [(w, g) for w in (1, 2, 4, 8) for g in (1, 2, 4, 8, 16) if g >= w])
def test_layout_head_norm_weight_gradient(leaves, world, on_ranks):
    """8 heads on 1, 2, 4 or 8 ranks: one tree; leaves beyond the heads count as one a head."""
    q, dy, weight = torch.randn(70, 8, 32), torch.randn(70, 8, 32), torch.randn(32)

    def run(q, dy, comm):
        own, w = q.detach().clone().requires_grad_(), weight.clone().requires_grad_()
        rms_norm(own, w, EPS, comm=comm, leaves=leaves).backward(dy)
        return own.grad, w.grad

    dx, dw = run(q, dy, None)
    want = reference.grad_weight(dy.reshape(-1, 32), q.reshape(-1, 32), EPS, 8, min(leaves, 8))
    assert torch.equal(dw, want)
    ranks = on_ranks(world, lambda c: run(q.chunk(world, 1)[c.rank], dy.chunk(world, 1)[c.rank], c))
    for r in ranks:
        assert torch.equal(r[1], dw)
    assert torch.equal(torch.cat([r[0] for r in ranks], 1), dx)


def test_another_order_of_heads_or_rows_is_noticed():
    q, dy = torch.randn(300 * 8, 64), torch.randn(300 * 8, 64)
    trees = [reference.grad_weight(dy, q, EPS, 8, leaves) for leaves in (1, 2, 4, 8)]
    rstd = ops.rms_norm(q, torch.ones(64), EPS)[1]
    got = ops.grad_weight(dy, q, rstd, 8, 4)
    assert torch.equal(got, trees[2])
    assert all((got != trees[i]).float().mean() > 0.3 for i in (0, 1, 3))
    assert (ops.grad_weight(dy.flip(0), q.flip(0), rstd.flip(0), 8, 4) != got).float().mean() > 0.3


def test_main_grad_takes_the_fp32_sum_and_no_gradient_is_returned():
    x, dy = torch.randn(70, 32).to(torch.bfloat16), torch.randn(70, 32).to(torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(32).to(torch.bfloat16))
    weight.main_grad = torch.ones(32)
    for _ in range(2):
        rms_norm(x, weight, EPS).backward(dy)
    assert weight.grad is None
    dw = reference.grad_weight(dy, x, EPS)
    assert torch.equal(weight.main_grad, 1 + dw + dw)


def test_repeat_and_micro_batch_of_the_input_gradient():
    x, dy, weight = torch.randn(257, 96), torch.randn(257, 96), torch.randn(96)
    rstd = ops.rms_norm(x, weight, EPS)[1]
    full = ops.grad_input(dy, x, weight, rstd)
    for i in (0, 255, 256):
        assert torch.equal(ops.grad_input(dy[i : i + 1], x[i : i + 1], weight, rstd[i : i + 1])[0], full[i])


def test_no_tokens_give_a_zero_weight_gradient():
    weight = torch.ones(8, requires_grad=True)
    rms_norm(torch.empty(0, 8, requires_grad=True), weight, EPS).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize("bad", [torch.zeros(32, dtype=torch.bfloat16), torch.zeros(4, 8), torch.zeros(33)])
def test_another_main_grad_is_refused_and_nothing_is_written(bad):
    weight = torch.nn.Parameter(torch.ones(32))
    weight.main_grad = bad
    with pytest.raises(ContractError, match=r"main_grad is torch\.(float32|bfloat16) \("):
        rms_norm(torch.randn(5, 32), weight, 1e-6).sum().backward()
    assert not bad.any()
    assert weight.grad is None


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("world", [2, 4])
def test_layout_weight_gradient_over_context_parallel_ranks_equals_one_rank(heads, world):
    tokens, width = 207, 64
    x, residual, dy = (torch.randn(tokens, heads, width) for _ in range(3))
    weight = torch.randn(width)
    held = torch.arange(tokens).chunk(world)
    places = [torch.cat((held[r].flip(0), torch.tensor([-1]))) for r in range(world)]
    options = {"leaves": 2} if heads > 1 else {}

    def gradient(x, residual, dy, shards):
        w = weight.clone().requires_grad_()
        y, _ = rms_norm(x, w, EPS, residual=residual, tokens=shards, **options)
        y.backward(dy)
        return w.grad

    def rank(comm):
        mine = places[comm.rank]
        rows = [torch.where(mine[:, None, None] >= 0, t[mine], torch.nan) for t in (x, residual, dy)]
        return gradient(*rows, TokenShards(comm, places))

    one = gradient(x, residual, dy, None)
    assert all(torch.equal(got, one) for got in on_ranks(world, rank))

    def parts_joined(comm):
        mine = held[comm.rank]
        return comm.all_reduce(gradient(x[mine], residual[mine], dy[mine], None))

    assert not torch.equal(on_ranks(world, parts_joined)[0], one)
