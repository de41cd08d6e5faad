"""The chain: its order, and that a row's bits depend on nothing but the row.

Every comparison is on fp32 accumulators (``out_dtype=float32``), since rounding to bf16 hides most wrong orders.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_gemm
from rl_contract import launches, reset_launches
from rl_contract.threads import for_ranges
from rl_gemm import ops, reference

TYPES = (torch.bfloat16, torch.float32)
ROWS = (1, 2, 7, 8, 16, 17, 63, 64, 65, 128, 129, 256)


def accumulators(x, weight, leaves=1):
    return ops.matmul_tree(x, weight, leaves)


def poisoned(shape, dtype, pad=3):
    """A tensor inside a buffer whose other elements are NaN, and which no vector width divides."""
    buffer = torch.full((shape[0] + 2 * pad, shape[1] + 2 * pad), float("nan"), dtype=dtype)
    inner = buffer[pad:-pad, pad:-pad]
    inner.copy_(torch.randn(shape))
    return inner


@pytest.mark.parametrize("dtype", TYPES)
def test_chain_equals_reference_over_a_million_outputs(dtype):
    x, weight = torch.randn(256, 96).to(dtype), torch.randn(4099, 96).to(dtype)
    reset_launches()
    got = accumulators(x, weight)
    assert got.numel() > 1_000_000
    assert torch.equal(got, reference.chain(x, weight))
    assert [(r["kernel"], r["plan"], r["count"]) for r in launches()] == [("rl_gemm.cpu.gemm", "tree1", 1)]


def reversed_chain(x, weight):
    return reference.chain(x.flip(1), weight.flip(1))


def two_chains(x, weight):
    return reference.tree(x, weight, 2)


def fused_multiply_add(x, weight):
    # the product of two fp32 is exact in fp64, so one rounding to fp32 remains
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = (total.double() + x[:, k : k + 1].double() * weight[:, k].double()).float()
    return total


def bias_first(x, weight):
    bias = torch.ones(len(weight))
    total = bias + torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1].float() * weight[:, k].float()
    return total


@pytest.mark.parametrize("wrong", [reversed_chain, two_chains, fused_multiply_add])
def test_a_misordered_kernel_is_noticed(wrong):
    # fp32 inputs, since a product of two bf16 fits fp32 and an FMA would then round as the chain does
    x, weight = torch.randn(64, 256), torch.randn(512, 256)
    differ = (wrong(x, weight) != accumulators(x, weight)).float().mean()
    assert differ > 0.4


def test_a_bias_added_first_is_noticed():
    x, weight, bias = torch.randn(64, 256), torch.randn(512, 256), torch.ones(512)
    got = rl_gemm.linear(x, weight, bias)
    assert torch.equal(got, reference.linear(x, weight, bias))
    assert (bias_first(x, weight) != got).float().mean() > 0.4


@pytest.mark.field_report("R18")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(512, 1024), (129, 333)])
def test_batch_row_alone_equals_row_in_batch(dtype, size):
    """R18: the row of a GEMM does not change with the number of rows, contiguous or sliced, in both weight layouts."""
    k, n = size
    x, weight = torch.randn(max(ROWS), k).to(dtype), torch.randn(n, k).to(dtype)
    full = accumulators(x, weight)
    sliced = torch.randn(max(ROWS), k + 5).to(dtype)
    sliced[:, 5:] = x
    other_layout = weight.t().contiguous().t()
    for m in ROWS:
        for row in {0, m // 2, m - 1}:
            assert torch.equal(accumulators(x[row : row + 1], weight)[0], full[row]), (m, row)
        for left in (x[:m], sliced[:m, 5:]):
            for right in (weight, other_layout):
                assert torch.equal(accumulators(left, right), full[:m]), m


@pytest.mark.field_report("R09", "R14")
def test_batch_micro_batch_size_leaves_rows_alone():
    """R09, R14: scoring 4 sequences at once, two at a time or one at a time gives the same rows."""
    hidden = torch.randn(4 * 128, 256).to(torch.bfloat16)
    up, down = torch.randn(512, 256).to(torch.bfloat16), torch.randn(256, 256).to(torch.bfloat16)

    def block(x):
        act = rl_gemm.swiglu(rl_gemm.column_parallel_linear(x, up))
        return rl_gemm.row_parallel_linear(act, down, leaves=4, out_dtype=torch.float32)

    whole = block(hidden)
    for size in (128, 256, 384):
        assert torch.equal(torch.cat([block(x) for x in hidden.split(size)]), whole)


@pytest.mark.field_report("R34")
def test_batch_padding_rows_leave_real_rows_alone():
    """R34: a batch of one padded to 64 rows, even with NaN, keeps its row."""
    weight = torch.randn(300, 200).to(torch.bfloat16)
    padded = torch.full((64, 200), float("nan"), dtype=torch.bfloat16)
    padded[0] = torch.randn(200)
    assert torch.equal(accumulators(padded, weight)[0], accumulators(padded[:1], weight)[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_around_the_operands_never_gets_in(dtype):
    for m, n, k in ((3, 17, 31), (5, 64, 16), (66, 65, 130), (1, 1, 1)):
        x, weight = poisoned((m, k), dtype), poisoned((n, k), dtype)
        assert torch.equal(accumulators(x, weight), reference.chain(x, weight))
        turned = poisoned((k, n), dtype).t()
        assert torch.equal(accumulators(x, turned), reference.chain(x, turned))


def test_any_strides_give_the_bits_of_the_contiguous_call():
    x, weight = torch.randn(8, 96), torch.randn(70, 96)
    want = accumulators(x[:, ::3], weight[:, ::3])
    assert torch.equal(want, accumulators(x[:, ::3].contiguous(), weight[:, ::3].contiguous()))
    assert torch.equal(accumulators(x.t()[:8].t()[:, :8], weight[:, :8]), accumulators(x[:, :8].clone(), weight[:, :8]))
    spread = torch.randn(1, 96).expand(8, 96)
    assert torch.equal(accumulators(spread, weight), accumulators(spread.contiguous(), weight))
    column = torch.randn(70, 1).expand(70, 96)
    assert torch.equal(accumulators(x, column), accumulators(x, column.contiguous()))


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-42])
def test_huge_tiny_and_denormal_values_follow_the_chain(scale):
    """1e30: products overflow, infinities meet; 1e-30: products are denormal or zero; 1e-42: inputs are denormal."""
    x, weight = torch.randn(33, 200) * scale, torch.randn(65, 200) * (1e-3 if scale < 1e-40 else scale)
    got, want = accumulators(x, weight), reference.chain(x, weight)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(1.0), want.nan_to_num(1.0))


def test_cancelling_sums_follow_the_chain():
    half = torch.randn(64, 128) * 1e6
    x = torch.cat([half, torch.randn(64, 3), -half], dim=1)
    weight = torch.ones(256, x.shape[1]) + torch.randn(256, 1)
    got = accumulators(x, weight)
    assert torch.equal(got, reference.chain(x, weight))
    assert not torch.equal(got, reversed_chain(x, weight))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_never_show_in_the_bits(threads, monkeypatch):
    before = torch.get_num_threads()
    x, weight, dy = torch.randn(300, 256), torch.randn(1000, 256), torch.randn(300, 1000)
    calls = (
        lambda: accumulators(x, weight),
        lambda: ops.grad_weight(dy, x),
        lambda: ops.grad_input(dy, weight, 8),
    )
    want = [call() for call in calls]
    shared = []
    monkeypatch.setattr(
        ops, "for_ranges", lambda body, count, work: (shared.append(work), for_ranges(body, count, work))
    )
    try:
        torch.set_num_threads(threads)
        for call, w in zip(calls, want):
            assert torch.equal(call(), w)
        assert min(shared) > 2e6
    finally:
        torch.set_num_threads(before)


def test_callers_in_several_threads_at_once():
    x, weight = torch.randn(64, 256), torch.randn(512, 256)
    want, got = accumulators(x, weight), [None] * 8

    def call(i):
        for _ in range(5):
            got[i] = accumulators(x, weight)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert all(torch.equal(g, want) for g in got)


@pytest.mark.field_report("R33")
@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 150),
    parts=st.integers(1, 40),
    depth=st.integers(0, 3),
    bf16=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_reference(m, n, parts, depth, bf16, seed):
    g = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    k = parts * 2**depth
    x, weight = torch.randn(m, k, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype)
    assert torch.equal(accumulators(x, weight, 2**depth), reference.tree(x, weight, 2**depth))
    bias = torch.randn(n, generator=g).to(dtype)
    got = rl_gemm.linear(x, weight, bias, leaves=2**depth)
    assert got.dtype == dtype
    assert torch.equal(got, reference.linear(x, weight, bias, 2**depth))


@pytest.mark.parametrize("dtype", TYPES)
def test_accuracy_against_fp64(dtype):
    x, weight = torch.randn(64, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    # k roundings of at most half an ulp each bound a chain; a random walk stays far below
    assert ((accumulators(x, weight) - exact).abs() / size).max() < 32 * 2**-24


def test_output_is_rounded_once():
    x, weight = torch.randn(64, 256).to(torch.bfloat16), torch.randn(4096, 256).to(torch.bfloat16)
    bias = torch.randn(4096).to(torch.bfloat16)
    total = accumulators(x, weight)
    once = (total + bias.float()).to(torch.bfloat16)
    twice = (total.to(torch.bfloat16).float() + bias.float()).to(torch.bfloat16)
    got = rl_gemm.linear(x, weight, bias)
    assert torch.equal(got, once)
    assert not torch.equal(got, twice)


def test_leading_dimensions_and_empty_inputs():
    x, weight = torch.randn(2, 3, 5, 16), torch.randn(24, 16)
    assert torch.equal(rl_gemm.linear(x, weight).view(30, 24), rl_gemm.linear(x.view(30, 16), weight))
    assert torch.equal(rl_gemm.linear(x[0, 0, 0], weight), rl_gemm.linear(x.view(30, 16), weight)[0])
    assert rl_gemm.linear(x[:0], weight).shape == (0, 3, 5, 24)
    assert rl_gemm.linear(x, weight[:0]).shape == (2, 3, 5, 0)
    assert rl_gemm.linear(x[:0], weight, leaves=2, out_dtype=torch.bfloat16).dtype == torch.bfloat16
