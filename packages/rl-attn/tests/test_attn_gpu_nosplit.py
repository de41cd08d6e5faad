"""The certified library on a GPU: one function for every phase, refused where it is not, gradients of ours."""

import pytest
import torch

from rl_attn import attention_packed, attention_paged, nosplit
from rl_attn.counting import count_segments
from rl_attn.testing import DEVICE, Batch, equal
from rl_contract import ContractError, MissingSupport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def library():
    """FlashAttention 3 from an installed wheel, or skip: its certificate names one build."""
    try:
        return nosplit._load("sm90")
    except (MissingSupport, ContractError) as error:
        pytest.skip(str(error))


def one_split(call):
    """Its O and LSE; the library handed back no partial results, however many keys a row sees."""
    out, lse = call()
    with count_segments() as calls:
        again, again_lse = call()
    assert equal(again, out)
    assert equal(again_lse, lse)
    assert [x.unique().tolist() for x in calls] == [[1]]
    return out, lse


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(128, 8, 2), (256, 4, 2), (128, 16, 1)])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nosplit_library_is_one_function_for_every_phase(library, head_dim, heads, kv_heads, page, dtype):
    lengths = (1, 15, 64, 65, 513, 1037, 2049)
    case = Batch(lengths, heads, kv_heads, head_dim, page=page, dtype=dtype, seed=12)
    cu = case.cu
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "scale": case.scale, "family": "nosplit", "return_lse": True}
    out, lse = one_split(lambda: attention_packed(case.q, case.k, case.v, **given))
    # tails of the pages hold NaN, unused entries of the table an id that no cache has: neither is read
    table = case.table
    lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)

    def paged(rows, starts, keys, which):
        given = {
            "query_start_loc": torch.tensor(starts, device=DEVICE, dtype=torch.int32), "seq_lens": keys,
            "block_table": table[which].contiguous(), "scale": case.scale, "family": "nosplit", "return_lse": True,
        }  # fmt: skip
        return one_split(lambda: attention_paged(case.q[rows], case.cache, **given))

    whole, whole_lse = paged(slice(None), cu.tolist(), lens, slice(None))
    last = [int(x) - 1 for x in cu[1:]]
    one, one_lse = paged(last, list(range(len(last) + 1)), lens, slice(None))
    assert equal(whole, out)
    assert equal(whole_lse, lse)
    assert equal(one, out[last])
    assert equal(one_lse, lse[last])
    first, length = int(cu[6]), lengths[6]
    for chunk in (7, 100, 512):
        for start in range(0, length, chunk)[-6:]:
            end = min(length, start + chunk)
            rows = slice(first + start, first + end)
            part, _ = paged(rows, [0, end - start], torch.tensor([end], device=DEVICE, dtype=torch.int32), slice(6, 7))
            assert equal(part, out[rows])
    # the families are different contracts: their bits differ
    assert not equal(out, case.packed()[0].to(dtype))


def test_nosplit_refuses_what_was_not_equal():
    """At head_dim 64 this library's decode differs from its prefill, so it has no certificate there."""
    case = Batch((40,), 4, 4, 64)
    with pytest.raises(ContractError, match="head_dim=64"):
        attention_packed(
            case.q, case.k, case.v, cu_seqlens_q=case.cu, cu_seqlens_k=case.cu, scale=case.scale, family="nosplit"
        )


def test_nosplit_gradients_are_ours_from_the_library_output(library):
    case = Batch((130, 700), seed=6)
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    with count_segments() as calls:
        out = attention_packed(q, k, v, cu_seqlens_q=case.cu, cu_seqlens_k=case.cu, scale=case.scale, family="nosplit")
    assert calls[0].unique().tolist() == [1]
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    out = attention_packed(q, k, v, cu_seqlens_q=case.cu, cu_seqlens_k=case.cu, scale=case.scale)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    for x, y in zip(found, ours):
        assert float((x.double() - y.double()).norm() / y.double().norm()) < 6e-3


def test_nosplit_refuses_pages_whose_tails_it_reads(library):
    """With pages of 128 a NaN behind a sequence on its last page reaches the rows of a prefill."""
    case = Batch((40, 513), page=128)
    with pytest.raises(ContractError, match=r"pages of 128 .* \(16, 64\)"):
        attention_paged(
            case.q, case.cache, query_start_loc=case.cu.int(), seq_lens=case.cu.diff().int(), block_table=case.table,
            scale=case.scale, family="nosplit",
        )  # fmt: skip
