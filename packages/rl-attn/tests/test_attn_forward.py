"""One order for every phase: packed, chunked, paged, decode and prefix hits give the same bits of O and LSE."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rl_attn
from rl_attn import segments_of
from rl_attn.reference import attention_reference
from rl_contract.profile import KEY_TILE, SEGMENT

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049]


def bits_equal(a, b):
    """Same bytes: NaN payloads and the sign of zero included."""
    view = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(view), b.view(view))


def check_rows(s, out, lse, first=0, last=None):
    assert bits_equal(out, s.out[first:last].contiguous())
    assert bits_equal(lse, s.lse[first:last].contiguous())


def paged_rows(s, kv, table, first, last):
    """Rows first..last-1 of one sequence, whose first ``last`` keys are in the cache."""
    return rl_attn.attention_paged(
        s.q[first:last],
        kv,
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=torch.tensor([last], dtype=torch.int32),
        block_table=table,
        scale=s.scale,
        return_lse=True,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 8), (17, 4, 4, 24), (65, 8, 1, 256), (513, 6, 2, 40), (1100, 2, 1, 16)],
)
def test_kernel_equals_reference(lab, length, heads, kv_heads, head_dim, dtype):
    s = lab.sequence(length, heads, kv_heads, head_dim, dtype)
    out, lse = attention_reference(s.q, s.k, s.v, torch.arange(length), s.scale)
    check_rows(s, out, lse)
    assert lab.folded_segments() == [segments_of(length)]


@pytest.mark.parametrize(("key_tile", "segment"), [(16, 16), (32, 96), (128, 256), (64, 64)])
def test_kernel_equals_reference_for_other_tiles(lab, key_tile, segment):
    s = lab.sequence(300, key_tile=key_tile, segment=segment)
    check_rows(s, *attention_reference(s.q, s.k, s.v, torch.arange(300), s.scale, key_tile=key_tile, segment=segment))
    assert lab.folded_segments() == [segments_of(300, segment)]


@pytest.mark.field_report("R26", "R49")
@pytest.mark.parametrize("length", LENGTHS)
def test_phase_every_path_equals_packed(lab, length):
    s = lab.sequence(length, seed=length)
    assert lab.folded_segments() == [segments_of(length)]
    kv, table = lab.pages([s], 16, seed=length)
    check_rows(s, *paged_rows(s, kv, table, 0, length))
    for chunk in (1, 7, 16, 64, 100):
        if chunk * 64 < length:
            continue
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            check_rows(s, *paged_rows(s, kv, table, first, last), first, last)
    for first in (length // 2, length - 1):
        check_rows(s, *paged_rows(s, kv, table, first, length), first, length)
    # every row as a decode request of its own, all in one batch
    decode = rl_attn.attention_paged(
        s.q,
        kv,
        query_start_loc=torch.arange(length + 1),
        seq_lens=torch.arange(1, length + 1),
        block_table=table.expand(length, -1),
        scale=s.scale,
        return_lse=True,
    )
    check_rows(s, *decode)
    assert max(lab.folded_segments()) == segments_of(length)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100, 1037])
def test_phase_prefill_in_chunks_as_the_cache_fills(lab, chunk):
    s = lab.sequence(1037, seed=chunk)
    kv, table = lab.pages([s], 32)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    for first in range(0, s.length, chunk):
        at = torch.arange(first, min(first + chunk, s.length))
        slots = table[0, at // 32].long() * 32 + at % 32
        rl_attn.write_paged(kv, s.k[at], s.v[at], slots)
        check_rows(s, *paged_rows(s, kv, table, first, int(at[-1]) + 1), first, int(at[-1]) + 1)
    assert max(lab.folded_segments()) == 2


def test_phase_a_million_outputs_packed_equals_paged(lab):
    s = lab.sequence(2049, heads=8, kv_heads=2, head_dim=64)
    assert s.out.numel() > 1_000_000
    kv, table = lab.pages([s], 128, seed=5)
    check_rows(s, *paged_rows(s, kv, table, 0, 2049))
    assert max(lab.folded_segments()) == 3


@pytest.mark.parametrize("layout", ["vllm_cpu", "vllm_split"])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 256])
def test_page_size_order_and_layout_leave_bits(lab, block_size, layout):
    s = lab.sequence(1030, heads=2, kv_heads=1, dtype=torch.float32)
    for seed in range(2):
        kv, table = lab.pages([s], block_size, seed=seed, layout=layout)
        assert kv.block_size == block_size
        check_rows(s, *paged_rows(s, kv, table, 0, s.length))
    assert max(lab.folded_segments()) == 2


@pytest.mark.field_report("R68")
@pytest.mark.parametrize("layout", ["vllm_cpu", "vllm_split"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_layout_is_named_for_every_number_of_local_kv_heads(lab, kv_heads, layout):
    # R68: with two local heads an axis of size 2 was taken for the axis of keys and values
    s = lab.sequence(130, heads=8, kv_heads=kv_heads, head_dim=128)
    kv, table = lab.pages([s], 16, layout=layout)
    assert kv.num_kv_heads == kv_heads
    check_rows(s, *paged_rows(s, kv, table, 0, 130))


def test_layout_heads_split_over_tp_equal_all_heads(lab):
    s = lab.sequence(1030, heads=8, kv_heads=4)
    cu = torch.tensor([0, s.length])
    for tp in (2, 4):
        parts = [
            rl_attn.attention_packed(
                s.q.chunk(tp, 1)[r], s.k.chunk(tp, 1)[r], s.v.chunk(tp, 1)[r], cu_seqlens_q=cu, cu_seqlens_k=cu,
                scale=s.scale, return_lse=True,
            )
            for r in range(tp)
        ]  # fmt: skip
        check_rows(s, torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1))
    assert max(lab.folded_segments()) == 2


@pytest.mark.field_report("R26", "R30")
def test_batch_row_alone_equals_row_with_33_mates(lab):
    lengths = [600, *[1 + 37 * n % 531 for n in range(32)], 1500]
    sequences = [lab.sequence(n, seed=i) for i, n in enumerate(lengths)]
    kv, table = lab.pages(sequences, 16)
    queries = [1, *[(1 + n) if n < length else length for n, length in enumerate(lengths[1:])]]
    out, lse = rl_attn.attention_paged(
        torch.cat([s.q[s.length - n :] for s, n in zip(sequences, queries)]),
        kv,
        query_start_loc=torch.tensor([0, *queries]).cumsum(0),
        seq_lens=torch.tensor(lengths),
        block_table=table,
        scale=sequences[0].scale,
        return_lse=True,
    )
    begin = 0
    for s, n in zip(sequences, queries):
        check_rows(s, out[begin : begin + n], lse[begin : begin + n], s.length - n, s.length)
        begin += n
    assert max(lab.folded_segments()) == 2


@pytest.mark.field_report("R15", "R86")
@pytest.mark.parametrize("pack", [(17, 1025, 1), (1, 1025, 17), (1025, 1, 17), (0, 17, 0, 1025, 1)])
def test_batch_any_packing_order_equals_alone(lab, pack):
    # R15: packed against alone; R86: padding removed or kept
    sequences = {n: lab.sequence(n, seed=n) for n in pack if n}
    packed = [sequences[n] for n in pack if n]
    cu = torch.tensor([0, *pack]).cumsum(0).int()
    q, k, v = (torch.cat([getattr(s, name) for s in packed]) for name in "qkv")
    out, lse = rl_attn.attention_packed(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=packed[0].scale, return_lse=True
    )
    begin = 0
    for s in packed:
        check_rows(s, out[begin : begin + s.length], lse[begin : begin + s.length])
        begin += s.length


@pytest.mark.field_report("R34", "R86")
@pytest.mark.parametrize("side", ["right", "left"])
def test_batch_padded_rows_equal_packed(lab, side):
    # R86: right padding is later keys that no row sees; left padding is a sequence of its own in front
    s = lab.sequence(1025)
    junk = lab.sequence(31, seed=9)
    pair = (s, junk) if side == "right" else (junk, s)
    q, k, v = (torch.cat([getattr(x, name) for x in pair]) for name in "qkv")
    cu = torch.tensor([0, 1056]) if side == "right" else torch.tensor([0, 31, 1056])
    out, lse = rl_attn.attention_packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=s.scale, return_lse=True)
    rows = slice(0, 1025) if side == "right" else slice(31, 1056)
    check_rows(s, out[rows], lse[rows])
    assert max(lab.folded_segments()) == 2


@pytest.mark.field_report("R26")
@pytest.mark.parametrize("keys", [1, 127, 128, 129, 2047, 2048, 2049, 8192])
def test_phase_one_query_equals_last_row_of_prefill_with_a_long_mate(lab, keys):
    # R26: split counts that follow the longest sequence of the batch
    s = lab.sequence(keys, heads=32, kv_heads=8, head_dim=128) if keys < 1000 else lab.sequence(keys)
    mate = lab.sequence(3000, heads=s.q.shape[1], kv_heads=s.k.shape[1], head_dim=s.q.shape[2], seed=1)
    kv, table = lab.pages([s, mate], 16)
    for batch in ([0], [0, 1], [1, 0, 1, 1, 1, 1, 1]):
        rows = [(s, mate)[n] for n in batch]
        out, lse = rl_attn.attention_paged(
            torch.cat([x.q[-1:] for x in rows]),
            kv,
            query_start_loc=torch.arange(len(batch) + 1),
            seq_lens=torch.tensor([x.length for x in rows]),
            block_table=table[batch],
            scale=s.scale,
            return_lse=True,
        )
        for n, x in enumerate(rows):
            check_rows(x, out[n : n + 1], lse[n : n + 1], x.length - 1)
    assert max(lab.folded_segments()) == segments_of(max(keys, 3000))


def test_positions_say_which_rows_they_are(lab):
    s = lab.sequence(700)
    rows = torch.tensor([699, 3, 512, 511, 0, 64])
    out, lse = rl_attn.attention_packed(
        s.q[rows], s.k, s.v, cu_seqlens_q=torch.tensor([0, 6]), cu_seqlens_k=torch.tensor([0, 700]), positions=rows,
        scale=s.scale, return_lse=True,
    )  # fmt: skip
    assert bits_equal(out, s.out[rows])
    assert bits_equal(lse, s.lse[rows])


def test_strided_inputs_equal_contiguous(lab):
    s = lab.sequence(200)
    qkv = torch.full((200, 11, 40), torch.nan, dtype=torch.bfloat16)
    qkv[:, 1:5, 4:36], qkv[:, 5:7, 4:36], qkv[:, 8:10, 4:36] = s.q, s.k, s.v
    cu = torch.tensor([0, 200])
    check_rows(
        s,
        *rl_attn.attention_packed(
            qkv[:, 1:5, 4:36], qkv[:, 5:7, 4:36], qkv[:, 8:10, 4:36], cu_seqlens_q=cu, cu_seqlens_k=cu, scale=s.scale,
            return_lse=True,
        ),
    )  # fmt: skip


def test_repeat_and_thread_count_leave_bits(lab):
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3, 1):
            torch.set_num_threads(n)
            s = lab.sequence(1500, heads=8, kv_heads=4, head_dim=64)
            results.append((s.out, s.lse))
    finally:
        torch.set_num_threads(threads)
    assert all(bits_equal(o, results[0][0]) and bits_equal(x, results[0][1]) for o, x in results)


def test_nan_in_one_row_stays_in_that_row(lab):
    s = lab.sequence(100, dtype=torch.float32)
    q = s.q.clone()
    q[40, 1] = torch.nan
    cu = torch.tensor([0, 100])
    out, lse = rl_attn.attention_packed(q, s.k, s.v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=s.scale, return_lse=True)
    assert out[40, 1].isnan().all()
    assert lse[40, 1].isnan()
    out[40, 1], lse[40, 1] = s.out[40, 1], s.lse[40, 1]
    check_rows(s, out, lse)


def test_accuracy_against_fp64(lab):
    s = lab.sequence(1300, heads=4, kv_heads=1, head_dim=64, dtype=torch.float32)
    k, v = (x.double().expand(-1, 4, -1) for x in (s.k, s.v))
    scores = torch.einsum("ihd,jhd->hij", s.q.double(), k) * s.scale
    scores.masked_fill_(torch.ones(1300, 1300, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    magnitude = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.abs())
    assert float(((s.out.double() - exact).abs() / magnitude).max()) < 5e-6
    assert float((s.lse.double() - scores.logsumexp(-1).T).abs().max()) < 1e-5


@pytest.mark.field_report("R54")
def test_compiled_caller_equals_eager(lab):
    s = lab.sequence(300)
    cu = torch.tensor([0, 300])

    def call(q, k, v):
        return torch.ops.rl_attn.packed(q, k, v, cu, cu, torch.arange(300), s.scale, KEY_TILE, SEGMENT)

    check_rows(s, *torch.compile(call, backend="aot_eager", fullgraph=True)(s.q, s.k, s.v))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_phase_any_cut_page_and_head_count_equals_packed(lab, data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 8 * draw(st.integers(1, 12))}
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    lengths = draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    sequences = [lab.sequence(n, dtype=dtype, seed=i, **shape) for i, n in enumerate(lengths)]
    seen = [draw(st.integers(1, n)) for n in lengths]
    queries = [draw(st.integers(0, n)) for n in seen]
    kv, table = lab.pages(sequences, draw(st.sampled_from([16, 24, 64, 256])), seed=draw(st.integers(0, 9)))
    out, lse = rl_attn.attention_paged(
        torch.cat([s.q[n - m : n] for s, n, m in zip(sequences, seen, queries)]),
        kv,
        query_start_loc=torch.tensor([0, *queries]).cumsum(0),
        seq_lens=torch.tensor(seen),
        block_table=table,
        scale=sequences[0].scale,
        return_lse=True,
    )
    begin = 0
    for s, n, m in zip(sequences, seen, queries):
        check_rows(s, out[begin : begin + m], lse[begin : begin + m], n - m, n)
        begin += m
