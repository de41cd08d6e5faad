"""SwiGLU: rounding points, rows, gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_gemm
from rl_contract import compare, launches, reset_launches
from rl_gemm import ops, reference

TYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_equals_reference_over_a_million_outputs(dtype):
    gate_up = (torch.randn(256, 2 * 4097) * 4).to(dtype)
    reset_launches()
    got = rl_gemm.swiglu(gate_up)
    assert launches()[0]["kernel"] == "rl_gemm.cpu_swiglu.forward"
    assert got.dtype == dtype
    verdict = compare(got, reference.swiglu(gate_up))
    # the reference's exp is another one; both are within a hair of correctly rounded
    assert verdict.mismatch_count <= 2
    assert verdict.max_ulp <= 1


@pytest.mark.field_report("R24")
def test_rounding_silu_before_the_product_would_differ():
    """R24, C5: about 27 % of the outputs change when silu is rounded to bf16 before the multiplication."""
    gate_up = torch.randn(128, 2 * 14336).to(torch.bfloat16)
    gate, up = gate_up.chunk(2, -1)
    early = (torch.nn.functional.silu(gate.float()).to(torch.bfloat16).float() * up.float()).to(torch.bfloat16)
    got = rl_gemm.swiglu(gate_up)
    assert 0.25 < (early != got).float().mean() < 0.30


@pytest.mark.field_report("R24")
def test_packed_and_separate_inputs_give_the_same_bits():
    gate, up = (torch.randn(17, 100).to(torch.bfloat16) for _ in range(2))
    stacked = torch.stack([gate, up])
    assert torch.equal(rl_gemm.swiglu(torch.cat([gate, up], -1)), rl_gemm.swiglu(torch.cat(tuple(stacked), -1)))
    strided = torch.full((17, 203), float("nan"), dtype=torch.bfloat16)
    strided[:, 3:] = torch.cat([gate, up], -1)
    assert torch.equal(rl_gemm.swiglu(strided[:, 3:]), rl_gemm.swiglu(torch.cat([gate, up], -1)))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), bf16=st.booleans(), seed=st.integers(0, 2**31))
def test_batch_row_alone_equals_row_in_batch(rows, width, bf16, seed):
    g = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * width, generator=g) * 8).to(torch.bfloat16 if bf16 else torch.float32)
    full = rl_gemm.swiglu(gate_up)
    for row in range(rows):
        assert torch.equal(rl_gemm.swiglu(gate_up[row]), full[row])
    # an element's place in its row, and with it the vector lane, does not show either
    turned = torch.cat([half.flip(-1) for half in gate_up.chunk(2, -1)], -1)
    assert torch.equal(rl_gemm.swiglu(turned), full.flip(-1))


def test_extremes():
    inf = float("inf")
    gate = torch.tensor([0.0, -0.0, 88.0, 89.0, -88.0, -89.0, -104.0, 1e30, -1e30, inf, 1e-40])
    got = rl_gemm.swiglu(torch.cat([gate, torch.ones_like(gate)]))
    want = torch.nn.functional.silu(gate.double())
    assert torch.equal(got.isfinite(), want.isfinite())
    finite = want.isfinite()
    assert (got[finite] - want[finite]).abs().max() <= 1e-6 * want[finite].abs().max()
    assert rl_gemm.swiglu(torch.tensor([float("nan"), 1.0])).isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_backward_equals_reference(dtype):
    gate_up, dy = (torch.randn(200, 2 * 515) * 3).to(dtype), torch.randn(200, 515).to(dtype)
    verdict = compare(ops.swiglu_backward(dy, gate_up), reference.swiglu_backward(dy, gate_up))
    assert verdict.mismatch_count <= 2


def test_backward_against_fp64():
    gate_up = (torch.randn(64, 256) * 5).requires_grad_()
    exact = gate_up.detach().double().requires_grad_()
    dy = torch.randn(64, 128)
    rl_gemm.swiglu(gate_up).backward(dy)
    gate, up = exact.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dy.double())
    assert (gate_up.grad - exact.grad).abs().max() < 1e-6 * exact.grad.abs().max()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_never_show_in_the_bits(threads):
    before = torch.get_num_threads()
    gate_up, dy = torch.randn(301, 2 * 1024), torch.randn(301, 1024)
    want = rl_gemm.swiglu(gate_up), ops.swiglu_backward(dy, gate_up)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(rl_gemm.swiglu(gate_up), want[0])
        assert torch.equal(ops.swiglu_backward(dy, gate_up), want[1])
    finally:
        torch.set_num_threads(before)


def test_empty_rows():
    assert rl_gemm.swiglu(torch.empty(0, 4, 10)).shape == (0, 4, 5)


@pytest.mark.parametrize("dtype", TYPES)
def test_gate_up_swiglu_has_the_bits_of_the_two_in_turn(dtype):
    x, weight = torch.randn(3, 67, 96).to(dtype), torch.randn(2 * 4096, 96).to(dtype)
    reset_launches()
    got = rl_gemm.gate_up_swiglu(x, weight)
    assert {r["boundary"] for r in launches()} == {"gemm.column", "swiglu"}
    assert got.shape == (3, 67, 4096)
    assert torch.equal(got, rl_gemm.swiglu(rl_gemm.linear(x, weight)))
    early = rl_gemm.swiglu(rl_gemm.linear(x, weight, out_dtype=torch.float32)).to(dtype)
    # what a fused epilogue would give that leaves out the rounding of gate_up
    assert torch.equal(got, early) == (dtype == torch.float32)


def test_gate_up_swiglu_gradients_are_those_of_the_two_in_turn(on_ranks):
    x, weight = torch.randn(9, 64), torch.randn(64, 64)
    dy = torch.randn(9, 32)

    def gradients(call, comm=None, rank=0, world=1):
        # rank r holds the r-th part of gate and of up
        mine = weight.view(2, world, -1, 64)[:, rank].reshape(-1, 64)
        inputs = x.clone().requires_grad_(), mine.clone().requires_grad_()
        return torch.autograd.grad(call(*inputs, comm), inputs, dy.chunk(world, 1)[rank])

    def fused(a, b, comm):
        return rl_gemm.gate_up_swiglu(a, b, comm=comm, leaves=4)

    want = gradients(
        lambda a, b, comm: rl_gemm.swiglu(rl_gemm.column_parallel_linear(a, b, comm=comm, leaves=4, fused=2))
    )
    got = gradients(fused)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    for dx, _ in on_ranks(2, lambda comm: gradients(fused, comm, comm.rank, 2)):
        assert torch.equal(dx, want[0])
