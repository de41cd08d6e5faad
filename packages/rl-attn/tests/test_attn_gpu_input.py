"""What a GPU call is given: poisoned tails, page ids and slots outside the cache, empty requests, refusals."""

import math

import pytest
import torch

from rl_attn import PagedKV, attention_packed, attention_paged, gpu, plans, rope_table, rotary, write_paged
from rl_attn.testing import DEVICE, LENGTHS, Batch, equal
from rl_contract import ContractError, MissingSupport
from rl_contract.profile import KEY_TILE, SEGMENT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def batch():
    return Batch(LENGTHS)


@pytest.fixture(scope="module")
def expected(batch):
    return batch.packed()


@pytest.fixture(autouse=True)
def _own_plans():
    yield
    plans.plan_files.own.clear()


def test_keys_beyond_a_sequence_are_never_read(batch, expected):
    # a packed row of NaN right behind a sequence shares its last key tile
    n = 12
    a, b = int(batch.cu[n]), int(batch.cu[n + 1])
    q, k, v = (torch.cat([x[a:b], torch.full_like(x[:5], torch.nan)]) for x in (batch.q, batch.k, batch.v))
    cu = torch.tensor([0, b - a, b - a + 5], device=DEVICE)
    positions = torch.cat([torch.arange(b - a, device=DEVICE), torch.arange(5, device=DEVICE)])
    out, lse = gpu.packed(q, k, v, cu, cu, positions, batch.scale, KEY_TILE, SEGMENT, torch.float32)
    assert equal(out[: b - a], expected[0][a:b])
    assert equal(lse[: b - a], expected[1][a:b])


def test_cache_above_two_gigabytes():
    page, kv_heads, dim = 16, 2, 128
    blocks = 2**31 // (page * kv_heads * dim) + 40
    cache = torch.full((2, blocks, page, kv_heads, dim), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    kv = PagedKV.from_vllm_split(cache, num_kv_heads=kv_heads, head_dim=dim)
    case = Batch((600,), seed=3)
    at = torch.arange(600, device=DEVICE)
    table = (blocks - 1 - torch.arange(38, device=DEVICE, dtype=torch.int32))[None]
    write_paged(kv, case.k, case.v, table[0, at // page].long() * page + at % page)
    out, lse = case.packed()
    starts, lens = torch.tensor([0, 1], device=DEVICE), torch.tensor([600], device=DEVICE)
    one, one_lse = gpu.paged(
        case.q[-1:], kv.k, kv.v, starts, lens, table, case.scale, KEY_TILE, SEGMENT, out_dtype=torch.float32
    )
    assert equal(one, out[-1:])
    assert equal(one_lse, lse[-1:])


def test_page_outside_the_cache_is_never_followed_and_turns_its_rows_into_nan(batch, expected):
    table = batch.table.clone()
    table[10, 2], table[13, 3], table[14, 5] = 2**30, 2**30, -7
    last = batch.last_rows()
    lens = torch.tensor(batch.lengths, device=DEVICE, dtype=torch.int32)
    for q, starts, rows in (
        (batch.q[last], torch.arange(len(last) + 1, device=DEVICE), last),
        (batch.q, batch.cu, list(range(batch.q.shape[0]))),
    ):
        out, _ = gpu.paged(
            q,
            batch.cache.k,
            batch.cache.v,
            starts,
            lens,
            table,
            batch.scale,
            KEY_TILE,
            SEGMENT,
            out_dtype=torch.float32,
        )
        for n in range(len(last)):
            a, b = int(starts[n]), int(starts[n + 1])
            if n in (10, 13, 14):
                assert bool(out[b - 1].isnan().all())
            else:
                assert equal(out[a:b], expected[0][rows[a:b]])


def test_requests_without_rows_or_keys():
    case = Batch((40, 3), seed=5)
    starts = torch.tensor([0, 0, 1, 1, 2], device=DEVICE)
    lens = torch.tensor([0, 40, 17, 3], device=DEVICE)
    table = torch.stack([case.table[1], case.table[0], case.table[0], case.table[1]])
    rows = [39, 42]
    got, _ = gpu.paged(
        case.q[rows], case.cache.k, case.cache.v, starts, lens, table, case.scale, 16, 32, out_dtype=torch.float32
    )
    want, _ = gpu.packed(case.q, case.k, case.v, case.cu, case.cu, case.positions, case.scale, 16, 32, torch.float32)
    assert equal(got, want[rows])
    none, _ = attention_paged(
        case.q[:0], case.cache, query_start_loc=torch.zeros(3, device=DEVICE, dtype=torch.int32),
        seq_lens=torch.zeros(2, device=DEVICE, dtype=torch.int32), block_table=case.table, scale=case.scale,
        return_lse=True,
    )  # fmt: skip
    assert none.shape == (0, 8, 128)


def test_rotary_has_the_bits_of_the_cpu():
    g = torch.Generator().manual_seed(0)
    for dim, rotary_dim, heads in ((128, 128, 8), (96, 64, 3)):
        q, k = (torch.randn(300, h, dim, generator=g).bfloat16() for h in (heads, 2))
        at = torch.randint(0, 1000, (300,), generator=g)
        table = rope_table(1000, rotary_dim, 1e6)
        want = rotary(q, k, at, table)
        q_gpu, k_gpu = (x.to(DEVICE).requires_grad_() for x in (q, k))
        got = rotary(q_gpu, k_gpu, at.to(DEVICE), table)
        assert all(equal(x.detach().cpu(), y) for x, y in zip(got, want))
        back = torch.autograd.grad(got[0], q_gpu, got[0].detach())[0]
        assert float((back.cpu().double() - q.double()).norm() / q.double().norm()) < 1e-2
    outside = rotary(q_gpu.detach(), k_gpu.detach(), torch.full((300,), 5000, device=DEVICE), table)
    assert bool(outside[0][..., :64].isnan().all())


def test_padding_slots_are_skipped():
    case = Batch((20,), seed=1)
    before = case.cache.k.clone()
    slots = torch.tensor([-1, 2**40], device=DEVICE)
    write_paged(case.cache, case.k[:2], case.v[:2], slots)
    assert torch.equal(before.view(torch.int16), case.cache.k.view(torch.int16))


def test_refusals_name_what_is_supported(batch):
    q, k, v = batch.q[:4], batch.k[:4], batch.v[:4]
    cu = torch.tensor([0, 4], device=DEVICE)
    call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "scale": 0.1}
    with pytest.raises(ContractError, match="float32"):
        attention_packed(q.float(), k.float(), v.float(), **call)
    with pytest.raises(ContractError, match="sliding_window"):
        attention_packed(q, k, v, **call, sliding_window=128)
    with pytest.raises(ContractError, match="ascending"):
        attention_packed(q, k, v, **call, positions=torch.tensor([0, 2, 1, 3], device=DEVICE))
    with pytest.raises(ContractError, match="position 9"):
        attention_packed(q, k, v, **call, positions=torch.tensor([0, 1, 2, 9], device=DEVICE))
    with pytest.raises(ContractError, match="kv heads"):
        attention_packed(q[:, :3], k, v, **call)
    with pytest.raises((ContractError, MissingSupport), match="one device"):
        attention_packed(q, k.cpu(), v, **call)
    assert math.isfinite(gpu.exponent_factor(0.1))
