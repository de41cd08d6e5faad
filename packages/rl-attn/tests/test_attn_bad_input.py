"""What the contract does not cover is refused at once, by name, with nothing half-written."""

from functools import partial

import numpy as np
import pytest
import torch

import rl_attn
from rl_contract import ContractError, MissingSupport


def packed_call(**change):
    tokens, cu = 6, torch.tensor([0, 6])
    call = {
        "q": torch.zeros(tokens, 4, 16),
        "k": torch.zeros(tokens, 2, 16),
        "v": torch.zeros(tokens, 2, 16),
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "scale": 0.25,
        **change,
    }
    return rl_attn.attention_packed(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def paged_call(**change):
    cache = torch.zeros(4, 2, 16, 32)
    call = {
        "q": torch.zeros(3, 4, 16),
        "cache": rl_attn.PagedKV.from_vllm_cpu(cache, num_kv_heads=2, head_dim=16),
        "query_start_loc": torch.tensor([0, 1, 3]),
        "seq_lens": torch.tensor([20, 2]),
        "block_table": torch.tensor([[0, 3], [2, 99]]),
        "scale": 0.25,
        **change,
    }
    return rl_attn.attention_paged(call.pop("q"), call.pop("cache"), **call)


def test_the_plain_calls_pass():
    assert packed_call().shape == (6, 4, 16)
    assert paged_call().shape == (3, 4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(6, 3, 16), "v": torch.zeros(6, 3, 16)}, "multiple of Hkv"),
        ({n: torch.zeros(6, 4, 12) for n in "qkv"}, "head_dim=12"),
        ({n: torch.zeros(6, 4, 264) for n in "qkv"}, "head_dim=264"),
        ({"q": torch.zeros(6, 4, 16).half()}, "float16"),
        ({n: torch.zeros(6, 4, 16).half() for n in "qkv"}, "float16"),
        ({"v": torch.zeros(6, 2, 8)}, "supported: q"),
        ({"q": torch.zeros(6, 64)}, "supported: q"),
        ({"causal": False}, "causal=False"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"window_size": (127, 0)}, "window_size"),
        ({"softcap": 30.0}, "softcap"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        ({"colour": 1}, "colour=1; supported: causal=True, sliding_window=None, .*dropout=None; leave it out"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"key_tile": 24, "segment": 48}, "key_tile=24"),
        ({"segment": 100}, "segment=100"),
        ({"cu_seqlens_q": torch.tensor([0, 5])}, "cu_seqlens_q"),
        ({"cu_seqlens_k": torch.tensor([0, 7, 6])}, "cu_seqlens_k"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, "same sequences"),
        ({"cu_seqlens_q": torch.tensor([0.0, 6.0])}, "cu_seqlens_q"),
        ({"positions": torch.tensor([0, 1, 2, 3, 4, 6])}, "position 6 in row 5"),
        ({"positions": torch.tensor([-1, 1, 2, 3, 4, 5])}, "position -1 in row 0"),
        ({"positions": torch.arange(5)}, "positions"),
        ({"positions": torch.arange(6.0)}, r"positions .* torch\.float32"),
        ({"segment": 512.0}, r"segment=512\.0"),
        ({"key_tile": 64.0}, r"key_tile=64\.0"),
        ({"key_tile": True}, "key_tile=True"),
        ({"scale": "0.25"}, "scale='0.25'"),
        ({"scale": 1e300}, r"scale=1e\+300"),
        ({"scale": 3e38}, r"scale=3e\+38"),
        ({"scale": 1e-300}, "scale=1e-300"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 6]), "cu_seqlens_k": torch.tensor([0, 3, 6])}, "position -1"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q as NoneType"),
        ({"cu_seqlens_k": [0, 6]}, "cu_seqlens_k as list"),
        ({"positions": list(range(6))}, "positions as list"),
        ({"k": np.zeros((6, 2, 16))}, "ndarray"),
        ({"sliding_window": torch.tensor([1, 2])}, "sliding_window=tensor"),
        ({"softcap": np.array([1.0, 2.0])}, "softcap=array"),
        ({"family": np.array(["segments", "nosplit"])}, "family=array"),
        ({"segment": 2**40}, "segment=1099511627776"),
        ({"q": torch.zeros(6, 4, 16).to_sparse()}, "q as torch.sparse_coo; supported: torch.strided"),
        ({"q": torch.nested.nested_tensor([torch.zeros(6, 16)], layout=torch.jagged)}, "nested tensor"),
        (
            {"cu_seqlens_q": torch.tensor([0, 6], device="meta")},
            r"cu_seqlens_q on meta .* pass .*q.to\('cpu'\)",
        ),
        ({"cu_seqlens_k": torch.tensor([0, 6], device="meta")}, "cu_seqlens_k on meta"),
        ({"positions": torch.arange(6, device="meta")}, "positions on meta"),
    ],
    ids=str,
)
def test_packed_refuses(change, message):
    with pytest.raises(ContractError, match=message):
        packed_call(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.tensor([[0, 4], [2, 0]])}, "page id 4 for request 0"),
        ({"block_table": torch.tensor([[0, 1], [-1, 0]])}, "page id -1 for request 1"),
        ({"seq_lens": torch.tensor([33, 2])}, r"seq_lens\[0\]=33"),
        ({"seq_lens": torch.tensor([20, 1])}, r"seq_lens\[1\]=1"),
        ({"seq_lens": torch.tensor([-5, 2])}, r"seq_lens\[0\]=-5"),
        ({"query_start_loc": torch.tensor([0, 1, 2])}, "query_start_loc"),
        ({"query_start_loc": torch.tensor([0, 4, 3])}, "query_start_loc"),
        ({"query_start_loc": torch.tensor([1, 1, 3])}, "query_start_loc"),
        ({"query_start_loc": torch.tensor([0, 3])}, "requests"),
        ({"seq_lens": torch.tensor([[20, 2]])}, r"seq_lens \(1, 2\)"),
        ({"block_table": torch.tensor([[0.0, 3.0], [2.9, 99.0]])}, r"block_table of torch\.float32"),
        ({"block_table": torch.tensor([[0, 3], [2, 99]]).bfloat16()}, r"block_table of torch\.bfloat16"),
        ({"seq_lens": torch.tensor([20.0, 2.0])}, r"seq_lens of torch\.float32"),
        ({"seq_lens": torch.tensor([20, 2], dtype=torch.uint8)}, r"seq_lens of torch\.uint8"),
        ({"query_start_loc": torch.tensor([0.0, 1.0, 3.0])}, r"query_start_loc of torch\.float32"),
        ({"segment": 512.0}, r"segment=512\.0"),
        ({"q": torch.zeros(3, 3, 16)}, "multiple of Hkv"),
        ({"q": torch.zeros(3, 4, 24)}, "head_dim 16"),
        ({"q": torch.zeros(3, 4, 16).bfloat16()}, "one dtype"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"causal": False}, "causal"),
        ({"max_query_len": -1}, "max_query_len=-1"),
        ({"max_query_len": True}, "max_query_len=True"),
        ({"max_query_len": 1.5}, r"max_query_len=1\.5"),
        ({"max_query_len": float("nan")}, "max_query_len=nan"),
        ({"max_query_len": 2**63}, "max_query_len=9223372036854775808"),
        ({"max_query_len": "3"}, "max_query_len='3'"),
        ({"max_query_len": [1]}, r"max_query_len=\[1\]"),
        ({"min_query_len": -1}, "min_query_len=-1"),
        ({"min_query_len": True}, "min_query_len=True"),
        ({"min_query_len": None}, "min_query_len=None"),
        ({"out": torch.zeros(200).as_strided((3, 4, 16), (16, 16, 1))}, "share memory"),
        ({"out": torch.zeros(3, 1, 16).expand(3, 4, 16)}, "share memory"),
        ({"out": torch.zeros(200).as_strided((3, 4, 16), (64, 15, 1))}, "share memory"),
        ({"out": "x"}, "out as str 'x'"),
        ({"q": np.zeros((3, 4, 16))}, "ndarray"),
        ({"query_start_loc": [0, 1, 3]}, r"query_start_loc as list '\[0, 1, 3\]'"),
        ({"seq_lens": None}, "seq_lens as NoneType"),
        ({"block_table": None}, "NoneType"),
        ({"cache": torch.zeros(4, 2, 16, 32)}, "cache as Tensor"),
        ({"out": torch.zeros(3, 4, 8)}, r"out \(3, 4, 8\)"),
        ({"out": torch.zeros(3, 4, 16).bfloat16()}, r"out .* torch\.bfloat16"),
        ({"out": torch.zeros(3, 16, 4).transpose(1, 2)}, "last stride of 1"),
        ({"out": torch.zeros(3, 4, 16, requires_grad=True)}, "no gradient"),
        ({"query_start_loc": torch.tensor([0, 1, 3], device="meta")}, "query_start_loc on meta"),
        ({"seq_lens": torch.tensor([20, 2], device="meta")}, "seq_lens on meta"),
        ({"block_table": torch.tensor([[0, 3], [2, 99]], device="meta")}, "one device"),
    ],
    ids=str,
)
def test_paged_refuses(change, message):
    with pytest.raises(ContractError, match=message):
        paged_call(**change)


def test_paged_writes_where_it_is_told_to():
    want, want_lse = paged_call(return_lse=True)
    room = torch.full((5, 4, 40), torch.nan)
    out, lse = paged_call(out=room[1:4, :, 8:24], max_query_len=2, return_lse=True)
    assert out.data_ptr() == room[1:4, :, 8:24].data_ptr()
    assert torch.equal(room[1:4, :, 8:24], want)
    assert torch.equal(lse, want_lse)
    untouched = torch.ones_like(room, dtype=torch.bool)
    untouched[1:4, :, 8:24] = False
    assert bool(room[untouched].isnan().all())


def test_an_output_lies_apart_from_what_is_read():
    keys = torch.zeros(4, 2, 16, 32)
    cache = rl_attn.PagedKV.from_vllm_cpu(keys, num_kv_heads=2, head_dim=16)
    for out in (keys.view(-1)[:192].view(3, 4, 16), keys[3, 1, 1:].reshape(-1)[-192:].view(3, 4, 16)):
        with pytest.raises(ContractError, match=r"out .* in the memory of the cache"):
            paged_call(cache=cache, out=out)
    both = torch.zeros(6, 4, 16)
    with pytest.raises(ContractError, match="out in the memory of q"):
        paged_call(q=both[:3], out=both[2:5])
    want = paged_call(q=torch.ones(3, 4, 16))
    # of one storage, yet apart
    both[:3] = 1.0
    assert torch.equal(paged_call(q=both[:3], out=both[3:]), want)
    # heads first is a place of its own for every element
    assert torch.equal(paged_call(q=both[:3], out=torch.zeros(4, 3, 16).transpose(0, 1)), want)


def test_a_cache_whose_elements_share_memory_is_refused():
    full, one = torch.zeros(10, 2, 16, 8), torch.zeros(1, 2, 16, 8)
    rows = torch.zeros(10, 2, 16, 24)
    for k, v in (
        (one.expand(10, 2, 16, 8), full),
        (full, one.expand(10, 2, 16, 8)),
        (full, full),
        (rows[..., :8], rows[..., 4:12]),
        (full[:5], full.as_strided((5, 2, 16, 8), (256, 8, 16, 1))),
    ):
        with pytest.raises(ContractError, match="share memory"):
            rl_attn.PagedKV(k, v)
    for k, v in (
        (full[:5], full[5:]),
        (rows[..., :8], rows[..., 8:16]),
        (rows[..., 16:], rows[..., :8]),
        (full[:, :1], full[:, 1:]),
        (full[::2], full[1::2]),
        (full[:0], full[:0]),
    ):
        rl_attn.PagedKV(k, v)


def test_tensors_without_memory_lie_nowhere():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        cache = rl_attn.PagedKV.from_vllm_cpu(torch.zeros(4, 2, 16, 32), num_kv_heads=2, head_dim=16)
        x = torch.zeros(3, 2, 16)
        cache.refuse_overlap("write_paged", k=x, v=x)
    k, v = (torch.zeros(4, 2, 16, 16, device="meta") for _ in range(2))
    rl_attn.PagedKV(k, v).refuse_overlap("write_paged", k=k[0].transpose(0, 1))


def test_write_refuses_views_of_the_cache_and_writes_nothing():
    keys = torch.arange(4.0 * 2 * 16 * 32).reshape(4, 2, 16, 32)
    cache, before = rl_attn.PagedKV.from_vllm_cpu(keys, num_kv_heads=2, head_dim=16), keys.clone()
    held, apart = cache.k[1].transpose(0, 1)[:3], torch.zeros(3, 2, 16)
    for k, v, name in ((held, apart, "k"), (apart, held, "v")):
        with pytest.raises(ContractError, match=f"got {name} .* in the memory of the cache"):
            rl_attn.write_paged(cache, k, v, torch.arange(3))
    assert torch.equal(keys, before)
    rl_attn.write_paged(cache, held.clone(), apart, torch.arange(3))
    assert torch.equal(cache.k[0, :, :3], before[1, :, :3, :16])


def test_empty_sequences_and_empty_batches_are_fine():
    empty = torch.zeros(0, 4, 16), torch.zeros(0, 2, 16), torch.zeros(0, 2, 16)
    zeros = torch.tensor([0, 0, 0])
    q, k, v = (x.requires_grad_() for x in empty)
    out, lse = packed_call(q=q, k=k, v=v, cu_seqlens_q=zeros, cu_seqlens_k=zeros, return_lse=True)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    out.sum().backward()
    assert k.grad.shape == k.shape
    cu = torch.tensor([0, 0, 6, 6])
    assert torch.equal(packed_call(cu_seqlens_q=cu, cu_seqlens_k=cu), packed_call())
    none = torch.zeros(0, dtype=torch.int64)
    nothing = {"q": torch.zeros(0, 4, 16), "query_start_loc": torch.tensor([0]), "seq_lens": none}
    assert paged_call(**nothing, block_table=torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 4, 16)
    # a request that waits has keys but no query: its pages are not looked at
    waiting = {"query_start_loc": torch.tensor([0, 0, 3]), "seq_lens": torch.tensor([20, 3])}
    assert paged_call(**waiting, block_table=torch.tensor([[77, 78], [2, 99]])).shape == (3, 4, 16)


def test_keys_without_queries_get_zero_gradients():
    k, v = (torch.randn(6, 2, 16, requires_grad=True) for _ in range(2))
    out = packed_call(k=k, v=v, q=torch.zeros(0, 4, 16), cu_seqlens_q=torch.tensor([0, 0]))
    out.sum().backward()
    assert not k.grad.any()
    assert not v.grad.any()


def test_write_refuses_a_slot_beyond_the_cache_and_writes_nothing():
    cache = torch.full((4, 2, 16, 32), 7.0)
    kv = rl_attn.PagedKV.from_vllm_cpu(cache, num_kv_heads=2, head_dim=16)
    with pytest.raises(ContractError, match="slot 64"):
        rl_attn.write_paged(kv, torch.zeros(2, 2, 16), torch.zeros(2, 2, 16), torch.tensor([3, 64]))
    assert bool((cache == 7.0).all())
    with pytest.raises(ContractError, match="supported"):
        rl_attn.write_paged(kv, torch.zeros(2, 3, 16), torch.zeros(2, 3, 16), torch.tensor([3, 4]))


def test_write_refuses_slots_that_are_no_integers_and_writes_nothing():
    cache = torch.full((4, 2, 16, 32), 7.0)
    kv = rl_attn.PagedKV.from_vllm_cpu(cache, num_kv_heads=2, head_dim=16)
    for slots in (torch.tensor([3.9, 4.0]), torch.tensor([True, False])):
        with pytest.raises(ContractError, match=f"slot_mapping of {slots.dtype}"):
            rl_attn.write_paged(kv, torch.zeros(2, 2, 16), torch.zeros(2, 2, 16), slots)
    assert bool((cache == 7.0).all())


def test_check_paged_refuses_what_attention_paged_refuses():
    kv = rl_attn.PagedKV.from_vllm_cpu(torch.zeros(4, 2, 16, 32), num_kv_heads=2, head_dim=16)
    good = {
        "query_start_loc": torch.tensor([0, 1, 3]),
        "seq_lens": torch.tensor([20, 2]),
        "block_table": torch.tensor([[0, 3], [2, 99]]),
    }
    rl_attn.check_paged(kv, **good)
    for name in good:
        with pytest.raises(ContractError, match=f"{name} of torch.float32"):
            rl_attn.check_paged(kv, **{**good, name: good[name].float()})
    for other in (None, kv.k):
        with pytest.raises(ContractError, match=f"check_paged got cache as {type(other).__name__}"):
            rl_attn.check_paged(other, **good)
    with pytest.raises(ContractError, match=r"seq_lens \(1, 2\)"):
        rl_attn.check_paged(kv, **{**good, "seq_lens": good["seq_lens"][None]})
    with pytest.raises(ContractError, match=r"query_start_loc\[0\]=1; supported: .* starts at 0"):
        rl_attn.check_paged(kv, **{**good, "query_start_loc": torch.tensor([1, 1, 3])})


def test_a_cache_of_empty_pages_is_refused():
    with pytest.raises(ContractError, match="pages of 0 tokens"):
        rl_attn.PagedKV.from_vllm_cpu(torch.zeros(4, 2, 0, 32), num_kv_heads=2, head_dim=16)


def test_fused_write_refuses_a_query_without_dimensions():
    kv = rl_attn.PagedKV.from_vllm_cpu(torch.zeros(4, 2, 16, 32), num_kv_heads=2, head_dim=16)
    x, at = torch.zeros(3, 2, 16), torch.arange(3)
    with pytest.raises(ContractError, match=r"q \(\), k \(3, 2, 16\)"):
        rl_attn.norm_rotary_write(torch.tensor(1.0), x, x, at, rl_attn.rope_table(8, 16, 1e4), kv, at)


def test_rotary_refuses_positions_that_are_no_integers():
    x = torch.zeros(3, 2, 16)
    with pytest.raises(ContractError, match=r"positions .* torch\.float32"):
        rl_attn.rotary(x, x, torch.arange(3.0), rl_attn.rope_table(8, 16, 1e4))


@pytest.mark.parametrize("given", [(5, 0), (5, -1), (-1, 512), (5, 512.0), (5.0, 512), (5, True)])
def test_segments_of_refuses_what_is_no_count(given):
    with pytest.raises(ContractError, match=f"segment={given[1]!r}"):
        rl_attn.segments_of(*given)


def test_context_parallel_refuses_no_parts_and_odd_cu_seqlens():
    cu = torch.tensor([0, 8])
    assert [rl_attn.segments_of(n) for n in (0, 1, 1024, 1025)] == [0, 1, 1, 2]
    with pytest.raises(ContractError, match="no parts"):
        rl_attn.cp_merge([], cu)
    for bad in (cu.float(), cu[None], cu[:0]):
        for call in (
            lambda bad=bad: rl_attn.cp_rows(bad, 0, 2),
            lambda bad=bad: rl_attn.cp_split(torch.zeros(8, 1), bad, 0, 2),
            lambda bad=bad: rl_attn.cp_merge([torch.zeros(4, 1)] * 2, bad),
        ):
            with pytest.raises(ContractError, match="cu_seqlens"):
                call()
    with pytest.raises(ContractError, match=r"rank 0\.5 of 2"):
        rl_attn.cp_rows(cu, 0.5, 2)


def test_context_parallel_refuses_rows_that_are_not_the_ranks():
    cu, four = torch.tensor([0, 8]), torch.zeros(4, 1)
    for parts, message in (
        # as many rows together, and of other ranks
        ([torch.zeros(3, 1), torch.zeros(5, 1)], r"part 1 as \(\(5, 1\)"),
        ([four, torch.zeros(4, 2)], r"part 1 as \(\(4, 2\)"),
        ([four, four.bfloat16()], r"part 1 as .*bfloat16"),
        ([four, None], "part 1 as NoneType"),
        ([torch.tensor(1.0)] * 8, "part 0"),
        (torch.zeros(2, 4, 1), "parts as Tensor"),
    ):
        with pytest.raises(ContractError, match=message):
            rl_attn.cp_merge(parts, cu)
    with pytest.raises(ContractError, match=r"cp_split got a tensor \(\); .* pass \[8, ...\]"):
        rl_attn.cp_split(torch.tensor(1.0), cu, 0, 2)
    with pytest.raises(ContractError, match="q as NoneType"):
        rl_attn.context_parallel_attention(None, four, four, cu_seqlens=cu, comm=None, scale=1.0)


def test_write_skips_padding_and_touches_its_slots_only():
    cache = torch.full((4, 2, 16, 32), 7.0)
    kv = rl_attn.PagedKV.from_vllm_cpu(cache, num_kv_heads=2, head_dim=16)
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    rl_attn.write_paged(kv, k, v, torch.tensor([50, -1, 0], dtype=torch.int32))
    expected = torch.full((4, 2, 16, 32), 7.0)
    expected[3, :, 2] = torch.cat([k[0], v[0]], -1)
    expected[0, :, 0] = torch.cat([k[2], v[2]], -1)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ("vllm_cpu", (4, 2, 16, 16), "vllm_cpu"),
        ("vllm_cpu", (4, 16, 2, 32), "vllm_cpu"),
        ("vllm_cpu", (2, 4, 16, 2, 16), "vllm_cpu"),
        ("vllm_split", (4, 2, 16, 32), "vllm_split"),
        ("vllm_split", (4, 2, 16, 2, 16), "vllm_split"),
        ("vllm_split", (2, 4, 2, 16, 16), "vllm_split"),
        ("flashinfer", (4, 2, 16, 32), "'flashinfer'"),
    ],
)
def test_layout_of_another_shape_is_refused(layout, shape, message):
    with pytest.raises(ContractError, match=message):
        rl_attn.PagedKV.from_layout(layout, torch.zeros(shape), num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize("layout", ["vllm_cpu", "vllm_split"])
@pytest.mark.parametrize(
    ("cache", "heads", "message"),
    [
        (None, 2, "cache as NoneType"),
        ([[1.0]], 2, "cache as list"),
        (torch.zeros(4, 4).to_sparse(), 2, "cache as torch.sparse_coo"),
        (torch.zeros(4), "2", "num_kv_heads='2'"),
        (torch.zeros(4), None, "num_kv_heads=None"),
    ],
)
def test_what_is_no_cache_of_an_engine_is_refused(layout, cache, heads, message):
    for make in (getattr(rl_attn.PagedKV, f"from_{layout}"), partial(rl_attn.PagedKV.from_layout, layout)):
        with pytest.raises(ContractError, match=f"layout '{layout}' got {message}"):
            make(cache, num_kv_heads=heads, head_dim=16)


def test_cache_views_that_differ_or_lack_unit_stride_are_refused():
    with pytest.raises(ContractError, match="PagedKV"):
        rl_attn.PagedKV(torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 8, 16))
    with pytest.raises(ContractError, match="stride 1"):
        rl_attn.PagedKV(*(torch.zeros(4, 2, 8, 16).transpose(2, 3) for _ in range(2)))


def test_what_is_no_tensor_or_table_is_named():
    x, slots = torch.zeros(3, 2, 16), torch.arange(3)
    cache = rl_attn.PagedKV(torch.zeros(4, 2, 16, 16), torch.zeros(4, 2, 16, 16))
    table = rl_attn.rope_table(8, 16, 1e4)
    for call, message in (
        (lambda: rl_attn.rotary(x, x, slots, None), "table as NoneType"),
        (lambda: rl_attn.rotary(x.numpy(), x, slots, table), "ndarray"),
        (lambda: rl_attn.norm_rotary_write(x, x, x, slots, None, cache, slots), "table as NoneType"),
        (lambda: rl_attn.norm_rotary_write(x, x, x, slots, table, None, slots), "cache as NoneType"),
        (lambda: rl_attn.write_paged(None, x, x, slots), "cache as NoneType"),
        (lambda: rl_attn.write_paged(cache, x, x, [0, 1, 2]), "list"),
        (lambda: rl_attn.PagedKV(np.zeros((4, 2, 16, 16)), x), "ndarray"),
        (lambda: rl_attn.RopeTable(x.numpy(), x), "ndarray"),
        (lambda: rl_attn.rope_table(8, 16, 1e4, "yarn"), "scaling='yarn'; supported: None, or a mapping"),
        (lambda: rl_attn.cp_rows([0, 8], 0, 2), "cu_seqlens as list"),
        (lambda: rl_attn.cp_split(x.numpy(), torch.tensor([0, 3]), 0, 1), "ndarray"),
    ):
        with pytest.raises(ContractError, match=message):
            call()


def test_another_device_is_missing_support():
    with pytest.raises(MissingSupport, match="meta"):
        packed_call(**{n: torch.zeros(6, 2, 16, device="meta") for n in "qkv"})
    with pytest.raises(ContractError, match="one device"):
        packed_call(q=torch.zeros(6, 2, 16, device="meta"))
