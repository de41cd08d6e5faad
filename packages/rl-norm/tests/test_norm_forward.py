"""RMSNorm forward: rounding points, order, and that a row's bits depend on the row alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contract import launches, reset_launches
from rl_norm import ops, reference, rms_norm

TYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1, 5, 16, 100, 128, 4096])
def test_equals_reference(dtype, hidden):
    x, residual, weight = (torch.randn(70, hidden).to(dtype) for _ in range(3))
    weight = weight[0].clone()
    reset_launches()
    assert torch.equal(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)[0])
    y, stream = rms_norm(x, weight, 1e-6, residual=residual)
    want = reference.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(y, want[0])
    assert torch.equal(stream, want[1])
    assert [(r["plan"], r["count"]) for r in launches()] == [("plain", 1), ("residual", 1)]


@pytest.mark.field_report("R20")
def test_r20_row_bits_do_not_change_at_256_rows():
    """R20: same row, same bits at 1, 255, 256, 257 and 4096 rows, with and without residual (16.8 million outputs)."""
    x, residual = (torch.randn(4096, 4096).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(4096).to(torch.bfloat16)
    plain, (fused, stream) = rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6, residual=residual)
    for rows in (1, 255, 256, 257):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6), plain[:rows])
        part = rms_norm(x[:rows], weight, 1e-6, residual=residual[:rows])
        assert torch.equal(part[0], fused[:rows])
        assert torch.equal(part[1], stream[:rows])
    for row in (1, 254, 4095):
        assert torch.equal(rms_norm(x[row], weight, 1e-6), plain[row])


@pytest.mark.field_report("R20")
def test_another_width_of_the_reduction_is_noticed():
    """R20: a launch of 256 threads and one of 1024 add in two orders, and neither is the contract's."""
    x, weight = torch.randn(4096, 4096).to(torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    rstd = ops.rms_norm(x, weight, 1e-6)[1]
    square = x.float() * x.float()
    assert torch.equal(rstd, (1 / (reference.lane_sum(square) / 4096 + 1e-6).double().sqrt()).float())

    def strided(lanes):
        total = torch.zeros(4096, lanes)
        for start in range(0, 4096, lanes):
            total = total + square[:, start : start + lanes]
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        return total[:, 0]

    assert torch.equal(strided(16), reference.lane_sum(square))
    assert (strided(256) != strided(1024)).any()
    for lanes in (1, 256, 1024):
        wrong = (1 / (strided(lanes) / 4096 + 1e-6).double().sqrt()).float()
        assert (wrong != rstd).float().mean() > 0.01


@pytest.mark.field_report("R21")
def test_r21_the_sum_is_rounded_before_the_variance_and_the_product():
    """R21, C2: normalising the unrounded sum would change about a fifth of the outputs."""
    x = torch.randn(64, 4096).to(torch.bfloat16)
    residual = (torch.randn(64, 4096) * 3).to(torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16)
    y, stream = rms_norm(x, weight, 1e-6, residual=residual)
    unrounded = x.float() + residual.float()
    assert torch.equal(stream, unrounded.to(torch.bfloat16))
    assert torch.equal(y, rms_norm(stream, weight, 1e-6))
    late = (unrounded * torch.rsqrt(unrounded.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    assert 0.15 < (late != y).float().mean() < 0.25


@pytest.mark.field_report("R22")
def test_r22_weight_is_applied_before_rounding():
    """R22, C1: rounding to bf16 before the product with weight agrees in about 74 % of the outputs only."""
    x, weight = torch.randn(64, 4096).to(torch.bfloat16), torch.randn(4096).to(torch.bfloat16)
    y = rms_norm(x, weight, 1e-6)
    row = x.float()
    early = (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16) * weight
    assert 0.70 < (early == y).float().mean() < 0.78


@pytest.mark.parametrize(("scale", "changes"), [(0.01, True), (1.0, False)])
def test_eps_is_part_of_the_result(scale, changes):
    """C4: rows of small values show a wrong eps, rows of ordinary size hide it in bf16."""
    x, weight = (torch.randn(64, 1024) * scale).to(torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    a, b = rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-5)
    share = (a != b).float().mean()
    assert share > 0.9 if changes else share < 0.01


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 20),
    hidden=st.integers(1, 200),
    bf16=st.booleans(),
    add=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_batch_row_alone_equals_row_in_batch(rows, hidden, bf16, add, seed):
    g = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    x, residual = (torch.randn(rows, hidden, generator=g).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, generator=g).to(dtype)
    if not add:
        full = rms_norm(x, weight, 1e-6)
        assert torch.equal(full, reference.rms_norm(x, weight, 1e-6)[0])
        assert all(torch.equal(rms_norm(x[i], weight, 1e-6), full[i]) for i in range(rows))
        return
    full, stream = rms_norm(x, weight, 1e-6, residual=residual)
    for i in range(rows):
        y, s = rms_norm(x[i], weight, 1e-6, residual=residual[i])
        assert torch.equal(y, full[i])
        assert torch.equal(s, stream[i])


@pytest.mark.field_report("R34")
def test_batch_padding_rows_leave_real_rows_alone():
    """R34."""
    padded = torch.full((64, 100), float("nan"))
    padded[0] = torch.randn(100)
    weight = torch.randn(100)
    assert torch.equal(rms_norm(padded, weight, 1e-6)[0], rms_norm(padded[:1], weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_any_strides_and_nan_around_the_operands(dtype):
    qkv = torch.full((9, 3, 4, 20), float("nan"), dtype=dtype)
    q = qkv[:, 1, :, 2:18]
    q.copy_(torch.randn(9, 4, 16))
    weight = torch.randn(32).to(dtype)[::2]
    want = rms_norm(q.contiguous(), weight.contiguous(), 1e-6)
    assert torch.equal(rms_norm(q, weight, 1e-6), want)
    turned = q.permute(1, 0, 2)
    assert torch.equal(rms_norm(turned, weight, 1e-6).permute(1, 0, 2), want)
    before = q.clone()
    rms_norm(q, weight, 1e-6, residual=q)
    assert torch.equal(q, before)


@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1e18])
def test_tiny_denormal_and_huge_rows(scale):
    x, weight = torch.randn(50, 333) * scale, torch.randn(333)
    got, want = rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)[0]
    assert torch.equal(got, want)
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_accuracy_against_fp64():
    x, weight = torch.randn(256, 4096), torch.randn(4096)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert ((rms_norm(x, weight, 1e-6) - exact).abs() / exact.abs()).max() < 8 * 2**-24


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_never_show_in_the_bits(threads):
    before = torch.get_num_threads()
    x, weight = torch.randn(301, 1024), torch.randn(1024)
    rstd = ops.rms_norm(x, weight, 1e-6)[1]
    calls = (
        lambda: rms_norm(x, weight, 1e-6),
        lambda: ops.grad_input(x, x, weight, rstd, x),
        lambda: ops.grad_weight(x, x, rstd),
    )
    want = [call() for call in calls]
    try:
        torch.set_num_threads(threads)
        for call, w in zip(calls, want):
            assert torch.equal(call(), w)
    finally:
        torch.set_num_threads(before)


def test_empty_rows():
    y, stream = rms_norm(torch.empty(0, 3, 8), torch.ones(8), 1e-6, residual=torch.empty(0, 3, 8))
    assert y.shape == stream.shape == (0, 3, 8)
