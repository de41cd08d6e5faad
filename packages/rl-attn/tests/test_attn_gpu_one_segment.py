"""Tables of one segment on a GPU: few rows go through the kernel for decode, without a fold; the bits are the same."""

import pytest
import torch

from rl_attn import gpu, segments_of
from rl_attn.testing import DEVICE, Batch, counted, equal, keys_seen
from rl_contract import launches, reset_launches
from rl_contract.profile import KEY_TILE, SEGMENT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 143, 255, 256, 257, 511, 513, 767, 1000, 1023, 1024)
DECODE, FEW, WALK = "rl_attn.triton_hopper_decode", "rl_attn.triton_hopper_few", "rl_attn.triton_forward"


def attend(case, counts, lengths=LENGTHS, most_rows=None):
    """The last ``counts[n]`` rows of each sequence on a table of 1024 keys: O, LSE, segments, rows, kernels."""
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    rows = [int(end) - count + i for end, count in zip(case.cu[1:], counts) for i in range(count)]
    given = (
        case.q[rows], case.cache.k, case.cache.v, torch.tensor(starts, device=DEVICE, dtype=torch.int32),
        torch.tensor(lengths, device=DEVICE, dtype=torch.int32), case.table[:, : 1024 // case.cache.block_size],
        case.scale, KEY_TILE, SEGMENT,
    )  # fmt: skip
    call = lambda: gpu.paged(*given, out_dtype=torch.float32, most_rows=most_rows)  # noqa: E731
    reset_launches()
    out, lse, ran = counted(call, keys_seen(starts, list(lengths)))
    return out, lse, ran, rows, {x["kernel"] for x in launches()}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page"), [(8, 2, 128, 16), (8, 2, 64, 32), (8, 8, 128, 64), (16, 1, 64, 16)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_phase_rows_of_one_segment_equal_prefill_and_walk(monkeypatch, heads, kv_heads, head_dim, page, dtype):
    case = Batch(LENGTHS, heads, kv_heads, head_dim, page, dtype, seed=21, spread=2.0)
    out, lse = case.packed()
    room = 64 // max(1, heads // kv_heads)
    for count in sorted({1, 3, min(16, room)}):
        monkeypatch.setattr(gpu, "MOST_SHORT_SEQUENCES", 1024)
        found, found_lse, ran, rows, kernels = attend(case, [count] * len(LENGTHS), most_rows=count)
        assert kernels == {FEW if count * (heads // kv_heads) <= 16 else DECODE}
        assert ran == [1] * len(rows)
        assert equal(found, out[rows])
        assert equal(found_lse, lse[rows])
        monkeypatch.setattr(gpu, "MOST_SHORT_SEQUENCES", 0)
        walked, walked_lse, ran, _, kernels = attend(case, [count] * len(LENGTHS), most_rows=count)
        assert not kernels & {DECODE, FEW}
        assert ran == [1] * len(rows)
        assert equal(walked, found)
        assert equal(walked_lse, found_lse)


def test_one_segment_alone_and_among_mates():
    case = Batch((1024, 700, 129), seed=22)
    out, lse = case.packed()
    for n in range(3):
        for mates in (1, 5, 64, 300):
            row = int(case.cu[n + 1]) - 1
            reset_launches()
            call = (
                case.q[[row] * mates], case.cache.k, case.cache.v,
                torch.arange(mates + 1, device=DEVICE, dtype=torch.int32),
                torch.full((mates,), case.lengths[n], device=DEVICE, dtype=torch.int32),
                case.table[[n] * mates, :64], case.scale, KEY_TILE, SEGMENT,
            )  # fmt: skip
            attended = lambda: gpu.paged(*call, out_dtype=torch.float32, most_rows=1)  # noqa: B023, E731
            found, found_lse, ran = counted(attended, torch.full((mates,), case.lengths[n]))
            assert {x["kernel"] for x in launches()} == {FEW}
            assert ran == [1] * mates
            assert all(equal(found[i], out[row]) and equal(found_lse[i], lse[row]) for i in range(mates))


def test_requests_of_many_rows_none_or_bad_pages_beside_short_ones():
    lengths = (40, 300, 1024, 900, 17, 65, 800, 33)
    case = Batch(lengths, seed=23)
    out, lse = case.packed()
    case.table[2, 5] = 2**30
    counts = [40, 1, 1, 0, 1, 16, 17, 1]
    found, found_lse, ran, rows, kernels = attend(case, counts, lengths)
    assert kernels == {DECODE, WALK}
    assert ran == [1] * len(rows)
    # the third request's row, whose page is none, lies behind 41 others
    assert bool(found[41].isnan().all())
    kept = [i for i in range(len(rows)) if i != 41]
    assert equal(found[kept], out[[rows[i] for i in kept]])
    assert equal(found_lse[kept], lse[[rows[i] for i in kept]])


@pytest.mark.parametrize("segment", [64, 1024])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (8, 2, 64), (5, 5, 128), (16, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_phase_few_rows_of_many_segments_equal_prefill(heads, kv_heads, head_dim, dtype, segment):
    """On the narrow side of the matrix unit, with partial states, for queries that fill 8 rows, 16, or fewer."""
    lengths = (16, 63, 64, 65, 128, 129, 1000, 1024, 1025, 2047, 2049, 3000)
    case = Batch(lengths, heads, kv_heads, head_dim, dtype=dtype, seed=24, spread=2.0)
    key_tile = min(KEY_TILE, segment)
    out, lse = case.packed(key_tile, segment)
    group = heads // kv_heads
    for count in sorted({1, max(1, 8 // group), max(1, 16 // group)}):
        starts = [count * n for n in range(len(lengths) + 1)]
        rows = [int(end) - count + i for end in case.cu[1:] for i in range(count)]
        given = (
            case.q[rows], case.cache.k, case.cache.v, torch.tensor(starts, device=DEVICE, dtype=torch.int32),
            torch.tensor(lengths, device=DEVICE, dtype=torch.int32), case.table, case.scale, key_tile, segment,
        )  # fmt: skip
        call = lambda: gpu.paged(*given, out_dtype=torch.float32, most_rows=count)  # noqa: B023, E731
        reset_launches()
        found, found_lse, ran = counted(call, keys_seen(starts, list(lengths)), segment)
        assert {x["kernel"] for x in launches()} == {FEW}
        assert max(ran) == segments_of(3000, segment)
        assert equal(found, out[rows])
        assert equal(found_lse, lse[rows])
