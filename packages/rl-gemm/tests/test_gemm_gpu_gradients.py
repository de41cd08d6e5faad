"""Gradients on a GPU have the bits of their tree and of blocks of tokens in packed order, every time."""

import pytest
import torch

import rl_gemm
from rl_gemm import ops
from rl_gemm.testing import equal, matrix, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned"),
]


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
    weight.main_grad = start.clone()  # type: ignore[attr-defined]
    y = rl_gemm.column_parallel_linear(x, weight)
    y.backward(dy)
    assert weight.grad is None
    assert equal(weight.main_grad, want)  # type: ignore[attr-defined]


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
