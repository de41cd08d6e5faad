"""A product of more rows than a certificate reaches: the library's calls write to their rows of one output."""

from contextlib import nullcontext

import pytest
import torch

from rl_gemm import vendor


@pytest.mark.parametrize("views", ["nt", "nn"])
# the library adds a bias of the output's own type alone
@pytest.mark.parametrize(
    ("out_dtype", "with_bias"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
@pytest.mark.parametrize("m", [5, 8, 9, 16, 21])
def test_rows_are_written_to_their_place(views, out_dtype, with_bias, m, monkeypatch):
    generator = torch.Generator().manual_seed(m)
    # whole numbers, whose sums are exact in any order
    x, y = (torch.randint(-5, 6, (n, 6), generator=generator).bfloat16() for n in (m, 10))
    bias = torch.randint(-5, 6, (10,), generator=generator).bfloat16() if with_bias else None
    weight = torch.nn.Parameter(y if views == "nt" else y.t().contiguous())
    calls = []

    def noting(stock):
        def call(*args, out_dtype=None, out):
            calls.append(out)
            # a CPU has no product with a type of its own
            return out.copy_(stock(*(a.float() for a in args)))

        return call

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
    monkeypatch.setattr(vendor, "no_split_k", nullcontext)
    out = vendor.product_by_rows(views, out_dtype, 8, x, weight, bias)
    want = x.float() @ y.float().t() + (0 if bias is None else bias.float())
    assert out.dtype == out_dtype
    assert not out.requires_grad
    assert torch.equal(out, want.to(out_dtype))
    assert [len(o) for o in calls] == [8] * (m // 8) + [m % 8] * (m % 8 > 0)
    assert {o.untyped_storage().data_ptr() for o in calls} == {out.untyped_storage().data_ptr()}
    assert [o.storage_offset() for o in calls] == [80 * i for i in range(len(calls))]
