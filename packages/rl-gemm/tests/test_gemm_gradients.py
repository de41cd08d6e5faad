"""Gradients: order, accuracy, main_grad, and repeat."""

from types import SimpleNamespace

import pytest
import torch

import rl_gemm
from rl_contract import ContractError, TokenShards
from rl_contract.testing import on_ranks
from rl_gemm import layers, ops, reference

TYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 129, 200])
def test_weight_gradient_adds_token_blocks_in_packed_order(dtype, tokens):
    dy, x = torch.randn(tokens, 67).to(dtype), torch.randn(tokens, 130).to(dtype)
    assert torch.equal(ops.grad_weight(dy, x), reference.grad_weight(dy, x))
    assert torch.equal(ops.grad_weight(dy.float(), x), reference.grad_weight(dy, x))


def test_another_token_order_or_block_is_noticed():
    dy, x = torch.randn(300, 128), torch.randn(300, 256)
    got = ops.grad_weight(dy, x)
    assert (ops.grad_weight(dy.flip(0), x.flip(0)) != got).float().mean() > 0.4
    assert (reference.chain(dy.t(), x.t()) != got).float().mean() > 0.4


@pytest.mark.parametrize("dtype", TYPES)
def test_input_gradient_equals_reference(dtype):
    dy, weight = torch.randn(35, 192).to(dtype), torch.randn(192, 70).to(dtype)
    for leaves in (1, 2, 8):
        for fused in (1, 2):
            got = ops.grad_input(dy, weight, leaves, fused)
            assert torch.equal(got, reference.grad_input(dy, weight, leaves, fused))
    turned = weight.t().contiguous().t()
    assert torch.equal(ops.grad_input(dy, turned, 2), ops.grad_input(dy, weight, 2))
    assert torch.equal(ops.grad_input(dy.t().contiguous().t(), weight, 2), ops.grad_input(dy, weight, 2))


def test_batch_input_gradient_of_a_row_alone():
    dy, weight = torch.randn(257, 128).to(torch.bfloat16), torch.randn(128, 96).to(torch.bfloat16)
    full = ops.grad_input(dy, weight, 4)
    for row in (0, 3, 63, 64, 255, 256):
        assert torch.equal(ops.grad_input(dy[row : row + 1], weight, 4)[0], full[row])


@pytest.mark.field_report("R41")
def test_gradients_against_fp64():
    x, weight, bias = torch.randn(3, 50, 64), torch.randn(96, 64), torch.randn(96)
    ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    rl_gemm.swiglu(rl_gemm.column_parallel_linear(*ours, leaves=4, fused=2)).pow(2).sum().backward()
    gate, up = torch.nn.functional.linear(*exact).chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).pow(2).sum().backward()
    for a, b in zip(ours, exact):
        assert (a.grad - b.grad).abs().max() < 2e-6 * b.grad.abs().max()


def test_main_grad_takes_the_fp32_sum_and_no_gradient_is_returned():
    x = torch.randn(70, 32).to(torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(48, 32).to(torch.bfloat16))
    bias = torch.nn.Parameter(torch.randn(48).to(torch.bfloat16))
    weight.main_grad, bias.main_grad = torch.ones(48, 32), torch.ones(48)
    dy = torch.randn(70, 48).to(torch.bfloat16)
    for _ in range(2):
        rl_gemm.row_parallel_linear(x, weight, bias, leaves=2).backward(dy)
    assert weight.grad is None
    assert bias.grad is None
    dw = reference.grad_weight(dy, x)
    db = reference.grad_weight(dy, torch.ones(70, 1))[:, 0]
    assert torch.equal(weight.main_grad, 1 + dw + dw)
    assert torch.equal(bias.main_grad, 1 + db + db)


def test_without_main_grad_the_gradient_has_the_weight_type():
    x = torch.randn(70, 32).to(torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(48, 32).to(torch.bfloat16))
    weight.main_grad = None
    rl_gemm.linear(x, weight).sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, reference.grad_weight(torch.ones(70, 48), x).to(torch.bfloat16))


@pytest.mark.parametrize("bad", [torch.zeros(48, 32, dtype=torch.bfloat16), torch.zeros(32, 48), torch.zeros(47, 32)])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_another_main_grad_is_refused_and_nothing_is_written(which, bad):
    weight, bias = torch.nn.Parameter(torch.randn(48, 32)), torch.nn.Parameter(torch.randn(48))
    weight.main_grad, bias.main_grad = torch.zeros(48, 32), torch.zeros(48)
    (weight if which == "weight" else bias).main_grad = bad
    with pytest.raises(ContractError, match=r"main_grad is torch\.(float32|bfloat16) \("):
        rl_gemm.linear(torch.randn(70, 32), weight, bias).sum().backward()
    assert not weight.main_grad.any()
    assert not bias.main_grad.any()
    assert weight.grad is None


def test_only_asked_gradients_are_computed():
    from rl_contract import launches, reset_launches

    x, weight = torch.randn(4, 32), torch.randn(48, 32, requires_grad=True)
    reset_launches()
    rl_gemm.linear(x, weight).sum().backward()
    assert [r["plan"] for r in launches()] == ["grad_weight", "tree1"]
    with torch.no_grad():
        assert not rl_gemm.linear(x, weight).requires_grad


def test_repeat_backward_gives_the_same_bits():
    x, weight = torch.randn(300, 128).to(torch.bfloat16), torch.randn(512, 128).to(torch.bfloat16)

    def run():
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rl_gemm.column_parallel_linear(a, b, leaves=4, out_dtype=torch.float32).sin().sum().backward()
        return a.grad, b.grad

    for first, second in zip(run(), run()):
        assert torch.equal(first, second)


def test_no_tokens_give_a_zero_weight_gradient():
    weight = torch.randn(6, 8, requires_grad=True)
    rl_gemm.linear(torch.randn(0, 8, requires_grad=True), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6, 8))


def _zigzag(tokens, world):
    """Places of a rank's tokens: chunks r and 2 * world - 1 - r, and one row of padding."""
    chunks = torch.arange(tokens).chunk(2 * world)
    pad = torch.tensor([-1])
    return [torch.cat((chunks[r], chunks[2 * world - 1 - r], pad)) for r in range(world)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("main_grad", [False, True])
def test_layout_weight_gradients_over_context_parallel_ranks_equal_one_rank(dtype, world, main_grad):
    tokens, k, n = 203, 96, 66
    x, dy = torch.randn(tokens, k).to(dtype), torch.randn(tokens, n).to(dtype)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    held = torch.randn(n, k)
    places = _zigzag(tokens, world)

    def gradients(rows, grad, shards):
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        if main_grad:
            w.main_grad = held.clone()
        rl_gemm.column_parallel_linear(rows, w, b, tokens=shards).backward(grad)
        first = w.main_grad if main_grad else w.grad
        v = weight.clone().requires_grad_()
        rl_gemm.row_parallel_linear(rows, v, leaves=2, tokens=shards).backward(grad)
        return first, b.grad, v.grad

    def rank(comm):
        mine = places[comm.rank]
        # what stands in a padding row reaches no gradient
        rows, grad = (torch.where(mine[:, None] >= 0, t[mine], torch.nan) for t in (x, dy))
        return gradients(rows, grad, TokenShards(comm, places))

    one = gradients(x, dy, None)
    for got in on_ranks(world, rank):
        assert all(torch.equal(a, b) for a, b in zip(got, one, strict=True))

    def in_place(comm):
        """A GPU's path: the parameter's main_grad grows where it lies."""
        mine = places[comm.rank]
        rows, grad = (torch.where(mine[:, None] >= 0, t[mine], torch.nan) for t in (x, dy))
        shards, total = TokenShards(comm, places), held.clone()
        parameter = SimpleNamespace(is_cuda=True, main_grad=total, shape=total.shape, device=total.device)
        every = shards.gather_each(grad, rows)
        assert layers._weight_gradient(parameter, *every, "gemm.column", shards) is None
        return total

    for got in on_ranks(world, in_place):
        assert torch.equal(got, held + ops.grad_weight(dy, x))

    def parts_joined(comm):
        mine = places[comm.rank][:-1]
        return comm.all_reduce(ops.grad_weight(dy[mine], x[mine]))

    assert (on_ranks(world, parts_joined)[0] != ops.grad_weight(dy, x)).float().mean() > 0.3
