"""One row, one set of bits, whatever computes it on a GPU: packed, chunks, decode, any page, any mates, a graph.

``Batch`` runs every call twice, as in production and with kernels that count; ``ran`` is what they counted.
"""

import pytest
import torch

from rl_attn import attention_paged, gpu, plans, segments_of, write_paged
from rl_attn.counting import count_segments
from rl_attn.testing import DEVICE, LENGTHS, Batch, counted, equal, keys_seen, require_segments, use
from rl_contract import launches, reset_launches
from rl_contract.profile import KEY_TILE, SEGMENT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


# of the last row of each sequence
SEGMENTS = [1] * 13 + [2, 2, 3, 9, 1, 2]


@pytest.fixture(scope="module")
def batch():
    return Batch(LENGTHS)


@pytest.fixture(scope="module")
def expected(batch):
    return batch.packed()


def _ends(batch):
    """What the last rows of a call on all rows ran."""
    return [batch.ran[n] for n in batch.last_rows()]


@pytest.fixture(autouse=True)
def _own_plans():
    yield
    plans.plan_files.own.clear()


def test_accuracy_against_fp64(batch, expected):
    again, _ = batch.packed()
    assert equal(again, expected[0])
    assert _ends(batch) == SEGMENTS
    for n in (6, 13):
        a, b = int(batch.cu[n]), int(batch.cu[n + 1])
        out, lse = batch.fp64(n)
        # P is rounded to bf16 before its dot: an error of 2**-9 a term at most
        assert float((expected[0][a:b] - out).norm() / out.norm()) < 2e-3
        assert float((expected[1][a:b] - lse).abs().max()) < 2e-3


@pytest.mark.parametrize(
    ("block_m", "warps", "stages"),
    [(128, 8, 2), (128, 4, 1), (64, 4, 2), (64, 8, 2), (32, 4, 2), (16, 1, 2), (16, 4, 3)],
)
def test_tile_shape_leaves_the_bits_alone(batch, expected, block_m, warps, stages):
    use(kernel="forward", head_dim=256, block_m=block_m, warps=warps, stages=stages)
    out, lse = batch.packed()
    assert out.numel() > 1e6
    assert _ends(batch) == SEGMENTS
    assert equal(out, expected[0])
    assert equal(lse, expected[1])


def test_phase_paged_prefill_equals_packed(batch, expected):
    reset_launches()
    out, lse = batch.paged(slice(None), batch.cu.tolist(), list(batch.lengths), slice(None))
    kernels = {x["kernel"] for x in launches()}
    # one-row sequences go through segments, the others through the walk
    assert kernels == {"rl_attn.triton_hopper_decode", "rl_attn.triton_hopper"}
    assert _ends(batch) == SEGMENTS
    assert equal(out, expected[0])
    assert equal(lse, expected[1])


@pytest.mark.parametrize(
    ("block_m", "warps", "stages", "programs", "specialised"),
    [(16, 4, 3, 2, 0), (16, 1, 3, 4, 0), (64, 4, 3, 1, 0), (64, 4, 3, 2, 128), (64, 4, 4, 1, 168), (64, 4, 2, 2, 128)],
)
def test_phase_decode_equals_prefill(batch, expected, block_m, warps, stages, programs, specialised):
    shape = {"block_m": block_m, "warps": warps, "stages": stages, "programs": programs}
    use(kernel="segments", head_dim=256, specialised=specialised > 0, max_registers=specialised, **shape)
    last = batch.last_rows()
    count = len(last)
    reset_launches()
    out, lse = batch.paged(last, list(range(count + 1)), list(batch.lengths), slice(None))
    assert batch.ran == SEGMENTS
    assert any("most" in x["plan"] for x in launches())
    assert equal(out, expected[0][last])
    assert equal(lse, expected[1][last])


def test_decode_that_is_known_to_be_one_leaves_the_walk_out_and_writes_where_it_is_told_to(batch):
    last = batch.last_rows()
    q = batch.q[last]
    call = {
        "query_start_loc": torch.arange(len(last) + 1, device=DEVICE, dtype=torch.int32),
        "seq_lens": torch.tensor(batch.lengths, device=DEVICE, dtype=torch.int32),
        "block_table": batch.table, "scale": batch.scale,
    }  # fmt: skip
    # 19 rows are more than one program's, so that shapes alone cannot rule the walk out
    found = {}
    for most in (None, 1):
        reset_launches()
        room = torch.full((len(last), q.shape[1] * q.shape[2] + 24), torch.nan, device=DEVICE, dtype=q.dtype)
        out = room[:, 8:-16].unflatten(1, q.shape[1:])
        given = call | {"max_query_len": most, "out": out, "return_lse": True}
        attend = lambda: attention_paged(q, batch.cache, **given)  # noqa: B023, E731
        *_, ran = counted(attend, call["seq_lens"])
        assert ran == SEGMENTS
        room.fill_(torch.nan)
        attend()
        assert bool(room[:, :8].isnan().all())
        assert bool(room[:, -16:].isnan().all())
        found[most] = out.contiguous(), {x["kernel"] for x in launches()}
    assert found[None][1] == {"rl_attn.triton_hopper_decode", "rl_attn.triton_forward"}
    assert found[1][1] == {"rl_attn.triton_hopper_few"}
    assert equal(found[1][0], found[None][0])
    assert equal(found[1][0], batch.packed()[0][last].to(q.dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fold", [{"unroll": 4}, {"unroll": 32}, {"specialised": True}])
def test_phase_fold_leaves_the_bits_alone(head_dim, fold):
    """Few rows of few to many segments: whole batches of partial states, one less, one more, and a row of NaN."""
    lengths = (1, 63, 64, 65, 64 * 64, 64 * 64 + 1, 64 * 128 - 1, 64 * 129 + 7, 64 * 200)
    case = Batch(lengths, 8, 2, head_dim, seed=13)
    case.table[4, 7] = 2**30
    out, lse = case.packed(64, 64)
    use(kernel="fold", head_dim=256, warps=4, **fold)
    last, count = case.last_rows(), len(lengths)
    reset_launches()
    found, found_lse = case.paged(last, list(range(count + 1)), list(lengths), slice(None), 64, 64)
    assert f"+fold-w4s1{'u' + str(fold['unroll']) if 'unroll' in fold else ''}:" in launches()[0]["plan"]
    assert case.ran == [1, 1, 1, 2, 64, 65, 128, 130, 200]
    assert bool(found[4].isnan().all())
    assert bool(found_lse[4].isnan().all())
    kept = [n for n in range(count) if n != 4]
    assert equal(found[kept], out[[last[n] for n in kept]])
    assert equal(found_lse[kept], lse[[last[n] for n in kept]])


def test_phase_decode_in_one_walk_equals_segments(batch, expected, monkeypatch):
    monkeypatch.setattr(gpu, "MOST_SPLIT_SEQUENCES", 0)
    last = batch.last_rows()
    reset_launches()
    out, lse = batch.paged(last, list(range(len(last) + 1)), list(batch.lengths), slice(None))
    assert {x["kernel"] for x in launches()} == {"rl_attn.triton_forward"}
    assert batch.ran == SEGMENTS
    assert equal(out, expected[0][last])
    assert equal(lse, expected[1][last])


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 100, 512, 2049])
def test_phase_chunks_equal_prefill(batch, expected, chunk):
    n = 15
    first, length = int(batch.cu[n]), batch.lengths[n]
    starts = list(range(0, length, chunk))
    # all chunks of a short step would be thousands of launches: those around tile and segment borders show the same
    if len(starts) > 60:
        starts = [s for s in starts if s % 512 < 2 * chunk or s % 512 >= 512 - 2 * chunk][:60]
    for start in starts:
        end = min(length, start + chunk)
        rows = slice(first + start, first + end)
        out, lse = batch.paged(rows, [0, end - start], [end], slice(n, n + 1))
        assert batch.ran == [segments_of(seen) for seen in range(start + 1, end + 1)]
        assert equal(out, expected[0][rows]), start
        assert equal(lse, expected[1][rows]), start


def test_one_sequence_that_is_not_short_needs_no_segments(batch, expected):
    n = max(range(len(batch.lengths)), key=batch.lengths.__getitem__)
    first, length = int(batch.cu[n]), batch.lengths[n]
    for rows, kernel in ((length, "rl_attn.triton_hopper"), (1, "rl_attn.triton_hopper_decode")):
        at = slice(first + length - rows, first + length)
        reset_launches()
        out, lse = batch.paged(at, [0, rows], [length], slice(n, n + 1))
        assert {x["kernel"] for x in launches()} == {kernel}
        assert batch.ran[-1] == 9
        assert equal(out, expected[0][at])
        assert equal(lse, expected[1][at])


def test_bound_from_below_leaves_out_kernels_of_short_sequences_and_no_bit(batch, expected):
    longest = sorted(range(len(batch.lengths)), key=batch.lengths.__getitem__)[-2:]
    ends = [int(batch.cu[n]) + batch.lengths[n] for n in longest]
    rows = torch.cat([torch.arange(end - 40, end) for end in ends]).to(DEVICE)
    call = {
        "query_start_loc": torch.tensor([0, 40, 80], device=DEVICE, dtype=torch.int32),
        "seq_lens": torch.tensor([batch.lengths[n] for n in longest], device=DEVICE, dtype=torch.int32),
        "block_table": batch.table[longest], "scale": batch.scale, "return_lse": True,
    }  # fmt: skip
    # a bound that is too low costs launches alone, and one that is too high none of the rows
    for least in (0, 1, 40, 41):
        reset_launches()
        out, lse = attention_paged(batch.q[rows], batch.cache, min_query_len=least, **call)
        assert any(x["kernel"].endswith("decode") for x in launches()) == (least < 40)
        assert equal(out, expected[0][rows].to(out.dtype))
        assert equal(lse, expected[1][rows])


def test_batch_row_alone_equals_row_among_mates(batch, expected):
    for n in (10, 13, 16):
        row = int(batch.cu[n + 1]) - 1
        for mates in (1, 64):
            rows = [row] * mates
            out, _ = batch.paged(rows, list(range(mates + 1)), [batch.lengths[n]] * mates, [n] * mates)
            assert batch.ran == [SEGMENTS[n]] * mates
            assert all(equal(out[i], expected[0][row]) for i in range(mates))


@pytest.mark.parametrize("layout", ["vllm_split", "vllm_cpu"])
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_page_size_order_and_layout_leave_the_bits_alone(batch, expected, page, layout):
    other = Batch(LENGTHS, page=page, layout=layout)
    assert torch.equal(other.q, batch.q)
    reset_launches()
    out, lse = other.paged(slice(None), other.cu.tolist(), list(other.lengths), slice(None))
    assert {x["kernel"] for x in launches()} == {"rl_attn.triton_hopper_decode", "rl_attn.triton_hopper"}
    assert _ends(other) == SEGMENTS
    assert equal(out, expected[0])
    assert equal(lse, expected[1])


@pytest.mark.parametrize(("page", "width"), [(24, 128), (16, 132)])
def test_pages_that_the_copy_engine_cannot_fetch_take_the_portable_kernels(page, width):
    """Pages that are no power of two of rows, and rows that are not 16 bytes apart."""
    lengths = (1, 129, 1100)
    case = Batch(lengths, page=page, seed=2)
    out, lse = case.packed()
    k, v = (torch.empty(*x.shape[:3], width, device=DEVICE, dtype=x.dtype) for x in (case.cache.k, case.cache.v))
    k[..., :128], v[..., :128] = case.cache.k, case.cache.v
    reset_launches()
    rest = (case.cu, torch.tensor(lengths, device=DEVICE), case.table, case.scale, KEY_TILE, SEGMENT)
    call = lambda: gpu.paged(case.q, k[..., :128], v[..., :128], *rest, out_dtype=torch.float32)  # noqa: E731
    found, found_lse, ran = counted(call, case.positions + 1)
    assert [ran[n] for n in case.last_rows()] == [1, 1, 2]
    assert {x["kernel"] for x in launches()} == {"rl_attn.triton_decode", "rl_attn.triton_forward"}
    assert equal(found, out)
    assert equal(found_lse, lse)


def test_phase_prefix_hit_equals_prefill(batch, expected):
    """Requests that share the pages of a prefix, in one call: all rows, the last 300 rows, the last row."""
    n = 15
    first, length = int(batch.cu[n]), batch.lengths[n]
    counts = [length, 300, 1]
    rows = [first + length - count + i for count in counts for i in range(count)]
    starts = [0, length, length + 300, length + 301]
    out, lse = batch.paged(rows, starts, [length] * 3, [n] * 3)
    ends = (0, 1023, 1024, 2047, length - 1, length + 299, length + 300)
    assert [batch.ran[n] for n in ends] == [1, 1, 2, 2, 3, 3, 3]
    assert equal(out, expected[0][rows])
    assert equal(lse, expected[1][rows])


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(64, 4, 4), (96, 6, 2), (128, 16, 1), (256, 4, 2), (128, 5, 1)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_phase_equal_for_every_head_shape(head_dim, heads, kv_heads, dtype):
    case = Batch((1, 65, 513, 1100), heads, kv_heads, head_dim, dtype=dtype, seed=1)
    out, lse = case.packed()
    assert _ends(case) == [1, 1, 1, 2]
    reference, reference_lse = case.fp64(2)
    a, b = int(case.cu[2]), int(case.cu[3])
    assert float((out[a:b] - reference).norm() / reference.norm()) < 3e-3
    assert float((lse[a:b] - reference_lse).abs().max()) < 3e-3
    again, _ = case.paged(slice(None), case.cu.tolist(), list(case.lengths), slice(None))
    assert _ends(case) == [1, 1, 1, 2]
    last = case.last_rows()
    decoded, decoded_lse = case.paged(last, list(range(5)), list(case.lengths), slice(None))
    assert case.ran == [1, 1, 1, 2]
    assert equal(again, out)
    assert equal(decoded, out[last])
    assert equal(decoded_lse, lse[last])


@pytest.mark.parametrize(("key_tile", "segment"), [(32, 512), (64, 512), (64, 2112), (128, 512), (128, 2176)])
def test_profile_parameters_change_the_bits_alike_in_every_phase(batch, expected, key_tile, segment):
    out, _ = batch.packed(key_tile, segment)
    assert not equal(out, expected[0])
    due = [segments_of(n, segment) for n in batch.lengths]
    assert due != SEGMENTS
    assert _ends(batch) == due
    last = batch.last_rows()
    decoded, _ = batch.paged(last, list(range(len(last) + 1)), list(batch.lengths), slice(None), key_tile, segment)
    assert batch.ran == due
    assert equal(decoded, out[last])


def test_tiny_and_wide_values_are_phase_equal():
    for spread, v_scale in ((2.0**-10, 2.0**-110), (6.0, 2.0**40)):
        case = Batch((700,), seed=4, spread=spread)
        case.v = (case.v * v_scale).to(case.v.dtype)
        slots = (
            case.table[0, torch.arange(700, device=DEVICE) // 16].long() * 16 + torch.arange(700, device=DEVICE) % 16
        )
        write_paged(case.cache, case.k, case.v, slots)
        out, lse = case.packed()
        rows = list(range(0, 700, 7))
        for row in rows:
            one, one_lse = case.paged([row], [0, 1], [row + 1], slice(0, 1))
            assert case.ran == [1]
            assert equal(one[0], out[row])
            assert equal(one_lse[0], lse[row])


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (8, 64), (2, 128), (10, 64)])
def test_phase_few_queries_equal_prefill_zeros_included(heads, head_dim):
    """One to sixteen queries of sequences of one segment and of two, whose values are +0, -0 or neither."""
    lengths = (16, 17, 700, 1024, 1030)
    case = Batch(lengths, heads, 2, head_dim, seed=5)
    case.v[..., 1::4], case.v[..., 2::4] = 0.0, -0.0
    at = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    write_paged(case.cache, case.k, case.v, case.table[which, at // 16].long() * 16 + at % 16)
    out, lse = case.packed()
    assert int((out == 0).sum()) > out.numel() // 4
    for count in (1, 3, 16):
        rows = [int(end) - count + i for end in case.cu[1:] for i in range(count)]
        reset_launches()
        found, found_lse = case.paged(rows, [count * n for n in range(len(lengths) + 1)], list(lengths), slice(None))
        assert "rl_attn.triton_hopper_decode" in {x["kernel"] for x in launches()}
        # a row of 1030 keys less up to 6 sees one segment still
        assert case.ran == [segments_of(n - count + 1 + i) for n in lengths for i in range(count)]
        assert equal(found, out[rows])
        assert equal(found_lse, lse[rows])


def test_misordered_segments_are_noticed(batch, expected):
    """Folding from the last segment down, in fp32, differs in many outputs: the check sees an order."""
    n = 16
    a, length = int(batch.cu[n]), batch.lengths[n]
    row = a + length - 1
    parts = []
    for begin in range(0, length, 512):
        keys = slice(a + begin, a + min(length, begin + 512))
        cu_q, cu_k = torch.tensor([0, 1], device=DEVICE), torch.tensor([0, keys.stop - keys.start], device=DEVICE)
        at = torch.tensor([keys.stop - keys.start - 1], device=DEVICE)
        rows = (batch.q[row : row + 1], batch.k[keys], batch.v[keys], cu_q, cu_k, at, batch.scale)
        call = lambda: gpu.packed(*rows, KEY_TILE, SEGMENT, torch.float32)  # noqa: B023, E731
        *part, ran = counted(call, at + 1)
        assert ran == [1]
        parts.append(part)

    def folded(order):
        total, total_lse = order[0]
        for out, lse in order[1:]:
            joined = torch.logaddexp(total_lse, lse)
            total = total * (total_lse - joined).exp()[..., None] + out * (lse - joined).exp()[..., None]
            total_lse = joined
        return total

    assert not equal(folded(parts), folded(parts[::-1]))
    assert torch.allclose(folded(parts), expected[0][row : row + 1], rtol=1e-3, atol=1e-4)


def test_graph_replay_equals_eager(batch, expected):
    last = torch.tensor(batch.last_rows(), device=DEVICE)
    q = batch.q[last]
    starts = torch.arange(len(last) + 1, device=DEVICE, dtype=torch.int32)
    lens = torch.tensor(batch.lengths, device=DEVICE, dtype=torch.int32)

    def call():
        return attention_paged(
            q,
            batch.cache,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=batch.table,
            scale=batch.scale,
            return_lse=True,
        )

    def captured():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = call()
        return graph, *found

    eager, eager_lse, ran = counted(call, lens)
    assert ran == SEGMENTS
    plain = captured()
    with count_segments() as calls:
        counting = captured()
    for graph, out, lse in (plain, counting):
        # replay with other lengths than those captured, then with the first ones
        lens.fill_(1)
        calls[-1].fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        if graph is counting[0]:
            require_segments(calls[-1], lens)
        lens.copy_(torch.tensor(batch.lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(out, eager)
        assert equal(lse, eager_lse)
    require_segments(calls[-1], lens)
    assert calls[-1][1, :, 0].tolist() == SEGMENTS
    assert equal(eager_lse, expected[1][last])


def test_segments_of_another_length_are_noticed(batch, expected):
    """A launch that takes segments of 512 counts them as what they are, in the walk and in decode."""
    last = batch.last_rows()
    starts = list(range(len(last) + 1))
    with count_segments() as calls:
        gpu.packed(
            batch.q, batch.k, batch.v, batch.cu, batch.cu, batch.positions, batch.scale, KEY_TILE, 512, torch.float32
        )
        gpu.paged(
            batch.q[last], batch.cache.k, batch.cache.v, torch.tensor(starts, device=DEVICE),
            torch.tensor(batch.lengths, device=DEVICE), batch.table, batch.scale, KEY_TILE, 512,
        )  # fmt: skip
    for counts, seen in zip(calls, (batch.positions + 1, keys_seen(starts, list(batch.lengths))), strict=True):
        require_segments(counts, seen, 512)
        with pytest.raises(AssertionError, match="of 1024 keys were due"):
            require_segments(counts, seen)


def test_long_row_of_131072_keys():
    case = Batch((131072,), heads=4, kv_heads=1, seed=2)
    out, lse = case.packed()
    assert case.ran[-1] == 128
    rows = [131071]
    decoded, decoded_lse = case.paged(rows, [0, 1], [131072], slice(0, 1))
    assert case.ran == [128]
    assert equal(decoded, out[rows])
    assert equal(decoded_lse, lse[rows])
