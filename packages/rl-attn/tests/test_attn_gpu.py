"""Promises of the GPU kernels, O compared before its rounding: one row, one set of bits, whatever computes it."""

import math

import pytest
import torch

from rl_attn import (
    PagedKV,
    attention_packed,
    attention_paged,
    gpu,
    nosplit,
    plans,
    rope_table,
    rotary,
    segments_of,
    write_paged,
)
from rl_contract import ContractError, MissingSupport, launches, reset_launches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049, 8193)


def equal(a, b):
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class Batch:
    """Sequences on shuffled pages of a cache poisoned with NaN, the same rows packed, and their attention."""

    def __init__(self, lengths, heads=8, kv_heads=2, head_dim=128, page=16, dtype=torch.bfloat16, seed=0, spread=1.0):
        g = torch.Generator(DEVICE).manual_seed(seed)
        rows = sum(lengths)
        self.lengths, self.scale = lengths, head_dim**-0.5
        self.q, self.k, self.v = (
            (spread * torch.randn(rows, h, head_dim, generator=g, device=DEVICE)).to(dtype)
            for h in (heads, kv_heads, kv_heads)
        )
        self.cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        self.positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
        pages = [-(-n // page) for n in lengths]
        blocks = sum(pages) + 3
        cache = torch.full((2, blocks, page, kv_heads, head_dim), torch.nan, device=DEVICE, dtype=dtype)
        self.cache = PagedKV.from_vllm_split(cache, num_kv_heads=kv_heads, head_dim=head_dim)
        ids = torch.randperm(blocks, generator=g, device=DEVICE).int()
        self.table = torch.full((len(lengths), max(pages) + 2), 2**30, device=DEVICE, dtype=torch.int32)
        taken, slots = 0, []
        for n, count in enumerate(pages):
            self.table[n, :count] = ids[taken : taken + count]
            at = torch.arange(lengths[n], device=DEVICE)
            slots.append(self.table[n, at // page].long() * page + at % page)
            taken += count
        write_paged(self.cache, self.k, self.v, torch.cat(slots))

    def packed(self, key_tile=64, segment=512):
        return gpu.packed(
            self.q, self.k, self.v, self.cu, self.cu, self.positions, self.scale, key_tile, segment, torch.float32
        )

    def paged(self, rows, starts, seq_lens, which, key_tile=64, segment=512):
        """Query rows ``rows`` of sequences ``which``, each with ``seq_lens`` keys."""
        return gpu.paged(
            self.q[rows], self.cache.k, self.cache.v, torch.tensor(starts, device=DEVICE, dtype=torch.int32),
            torch.tensor(seq_lens, device=DEVICE, dtype=torch.int32), self.table[which], self.scale, key_tile, segment,
            out_dtype=torch.float32,
        )  # fmt: skip


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


def use(**row):
    """Force one launch shape, ahead of the shipped ones."""
    own = gpu.arch(0)
    plans.use(plans.Plans(arch=own, rows=(plans.Row(**row), *plans.shipped(own).rows)))


def _fp64(batch, n):
    """Attention of sequence n in fp64: O and LSE."""
    a, b = int(batch.cu[n]), int(batch.cu[n + 1])
    group = batch.q.shape[1] // batch.k.shape[1]
    q, k, v = (x[a:b].double() for x in (batch.q, batch.k, batch.v))
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * batch.scale
    s = s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v.repeat_interleave(group, 1)), s.logsumexp(-1).T


def test_accuracy_against_fp64(batch, expected):
    for n in (6, 13):
        a, b = int(batch.cu[n]), int(batch.cu[n + 1])
        out, lse = _fp64(batch, n)
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
    assert equal(out, expected[0])
    assert equal(lse, expected[1])


def test_phase_paged_prefill_equals_packed(batch, expected):
    reset_launches()
    out, lse = batch.paged(slice(None), batch.cu.tolist(), list(batch.lengths), slice(None))
    kernels = {x["kernel"] for x in launches()}
    # one-row sequences go through segments, the others through the walk
    assert kernels == {"rl_attn.triton_decode", "rl_attn.triton_forward"}
    assert equal(out, expected[0])
    assert equal(lse, expected[1])


@pytest.mark.parametrize(("block_m", "warps", "stages", "programs"), [(16, 4, 3, 2), (16, 1, 3, 4), (64, 4, 3, 1)])
def test_phase_decode_equals_prefill(batch, expected, block_m, warps, stages, programs):
    use(kernel="segments", head_dim=256, block_m=block_m, warps=warps, stages=stages, programs=programs)
    last = [int(x) - 1 for x in batch.cu[1:]]
    count = len(last)
    reset_launches()
    out, lse = batch.paged(last, list(range(count + 1)), list(batch.lengths), slice(None))
    assert segments_of(max(batch.lengths)) == 17
    assert any("most" in x["plan"] for x in launches())
    assert equal(out, expected[0][last])
    assert equal(lse, expected[1][last])


def test_phase_decode_in_one_walk_equals_segments(batch, expected, monkeypatch):
    monkeypatch.setattr(gpu, "MOST_SPLIT_SEQUENCES", 0)
    last = [int(x) - 1 for x in batch.cu[1:]]
    reset_launches()
    out, lse = batch.paged(last, list(range(len(last) + 1)), list(batch.lengths), slice(None))
    assert {x["kernel"] for x in launches()} == {"rl_attn.triton_forward"}
    assert equal(out, expected[0][last])
    assert equal(lse, expected[1][last])


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 100, 512])
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
        assert equal(out, expected[0][rows]), start
        assert equal(lse, expected[1][rows]), start


def test_batch_row_alone_equals_row_among_mates(batch, expected):
    for n in (10, 13, 16):
        row = int(batch.cu[n + 1]) - 1
        for mates in (1, 64):
            rows = [row] * mates
            out, _ = gpu.paged(
                batch.q[rows], batch.cache.k, batch.cache.v,
                torch.arange(mates + 1, device=DEVICE, dtype=torch.int32),
                torch.full((mates,), batch.lengths[n], device=DEVICE, dtype=torch.int32), batch.table[[n] * mates],
                batch.scale, 64, 512, out_dtype=torch.float32,
            )  # fmt: skip
            assert all(equal(out[i], expected[0][row]) for i in range(mates))


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_page_size_and_order_leave_the_bits_alone(batch, expected, page):
    other = Batch(LENGTHS, page=page)
    assert torch.equal(other.q, batch.q)
    out, lse = other.paged(slice(None), other.cu.tolist(), list(other.lengths), slice(None))
    assert equal(out, expected[0])
    assert equal(lse, expected[1])


def test_keys_beyond_a_sequence_are_never_read(batch, expected):
    # a packed row of NaN right behind a sequence shares its last key tile
    n = 12
    a, b = int(batch.cu[n]), int(batch.cu[n + 1])
    q, k, v = (torch.cat([x[a:b], torch.full_like(x[:5], torch.nan)]) for x in (batch.q, batch.k, batch.v))
    cu = torch.tensor([0, b - a, b - a + 5], device=DEVICE)
    positions = torch.cat([torch.arange(b - a, device=DEVICE), torch.arange(5, device=DEVICE)])
    out, lse = gpu.packed(q, k, v, cu, cu, positions, batch.scale, 64, 512, torch.float32)
    assert equal(out[: b - a], expected[0][a:b])
    assert equal(lse[: b - a], expected[1][a:b])


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(64, 4, 4), (96, 6, 2), (128, 16, 1), (256, 4, 2), (128, 5, 1)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_phase_equal_for_every_head_shape(head_dim, heads, kv_heads, dtype):
    case = Batch((1, 65, 513, 1100), heads, kv_heads, head_dim, dtype=dtype, seed=1)
    out, lse = case.packed()
    reference, reference_lse = _fp64(case, 2)
    a, b = int(case.cu[2]), int(case.cu[3])
    assert float((out[a:b] - reference).norm() / reference.norm()) < 3e-3
    assert float((lse[a:b] - reference_lse).abs().max()) < 3e-3
    again, _ = case.paged(slice(None), case.cu.tolist(), list(case.lengths), slice(None))
    last = [int(x) - 1 for x in case.cu[1:]]
    decoded, decoded_lse = case.paged(last, list(range(5)), list(case.lengths), slice(None))
    assert equal(again, out)
    assert equal(decoded, out[last])
    assert equal(decoded_lse, lse[last])


@pytest.mark.parametrize(("key_tile", "segment"), [(32, 512), (64, 1024), (128, 512)])
def test_profile_parameters_change_the_bits_alike_in_every_phase(batch, expected, key_tile, segment):
    out, _ = batch.packed(key_tile, segment)
    assert not equal(out, expected[0])
    last = [int(x) - 1 for x in batch.cu[1:]]
    decoded, _ = batch.paged(last, list(range(len(last) + 1)), list(batch.lengths), slice(None), key_tile, segment)
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
            assert equal(one[0], out[row])
            assert equal(one_lse[0], lse[row])


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
        parts.append(
            gpu.packed(
                batch.q[row : row + 1],
                batch.k[keys],
                batch.v[keys],
                cu_q,
                cu_k,
                at,
                batch.scale,
                64,
                512,
                torch.float32,
            )
        )

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
    last = torch.tensor([int(x) - 1 for x in batch.cu[1:]], device=DEVICE)
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

    eager, eager_lse = call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = call()
    # replay with other lengths than those captured, then with the first ones
    lens.fill_(1)
    graph.replay()
    lens.copy_(torch.tensor(batch.lengths, dtype=torch.int32))
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert equal(out, eager)
    assert equal(lse, eager_lse)
    assert equal(eager_lse, expected[1][last])


def test_long_row_of_131072_keys():
    case = Batch((131072,), heads=4, kv_heads=1, seed=2)
    out, lse = case.packed()
    rows = [131071]
    decoded, decoded_lse = case.paged(rows, [0, 1], [131072], slice(0, 1))
    assert segments_of(131072) == 256
    assert equal(decoded, out[rows])
    assert equal(decoded_lse, lse[rows])


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
    one, one_lse = gpu.paged(case.q[-1:], kv.k, kv.v, starts, lens, table, case.scale, 64, 512, out_dtype=torch.float32)
    assert equal(one, out[-1:])
    assert equal(one_lse, lse[-1:])


def test_page_outside_the_cache_is_never_followed_and_turns_its_rows_into_nan(batch, expected):
    table = batch.table.clone()
    table[13, 3], table[14, 5] = 2**30, -7
    last = [int(x) - 1 for x in batch.cu[1:]]
    lens = torch.tensor(batch.lengths, device=DEVICE, dtype=torch.int32)
    for q, starts, rows in (
        (batch.q[last], torch.arange(len(last) + 1, device=DEVICE), last),
        (batch.q, batch.cu, list(range(batch.q.shape[0]))),
    ):
        out, _ = gpu.paged(
            q, batch.cache.k, batch.cache.v, starts, lens, table, batch.scale, 64, 512, out_dtype=torch.float32
        )
        for n in range(len(last)):
            a, b = int(starts[n]), int(starts[n + 1])
            if n in (13, 14):
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


def _gradients(case, positions=None):
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    g = torch.Generator(DEVICE).manual_seed(9)
    grad = torch.randn(case.q.shape, generator=g, device=DEVICE).to(case.q.dtype)
    out = attention_packed(q, k, v, cu_seqlens_q=case.cu, cu_seqlens_k=case.cu, scale=case.scale, positions=positions)
    return grad, torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(128, 8, 2), (64, 4, 4), (96, 6, 2), (256, 4, 2), (128, 5, 1)]
)
def test_gradients_against_fp64(head_dim, heads, kv_heads):
    case = Batch((130, 700), heads, kv_heads, head_dim, seed=6)
    grad, found = _gradients(case)
    for n in range(2):
        a, b = int(case.cu[n]), int(case.cu[n + 1])
        q, k, v = (x[a:b].double().requires_grad_() for x in (case.q, case.k, case.v))
        group = heads // kv_heads
        s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * case.scale
        s = s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", s.softmax(-1), v.repeat_interleave(group, 1))
        for x, y in zip(found, torch.autograd.grad(out, (q, k, v), grad[a:b].double())):
            assert float((x[a:b].double() - y).norm() / y.norm()) < 6e-3


def test_gradients_repeat_and_do_not_depend_on_packing():
    lengths = (513, 64, 1, 1030)
    case = Batch(lengths, seed=7)
    grad, first = _gradients(case)
    for _ in range(20):
        assert all(equal(x, y) for x, y in zip(first, _gradients(case)[1]))
    for n in (0, 3):
        a, b = int(case.cu[n]), int(case.cu[n + 1])
        q, k, v = (x[a:b].clone().requires_grad_() for x in (case.q, case.k, case.v))
        cu = torch.tensor([0, b - a], device=DEVICE)
        out = attention_packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=case.scale)
        alone = torch.autograd.grad(out, (q, k, v), grad[a:b])
        assert all(equal(x[a:b], y) for x, y in zip(first, alone))


@pytest.mark.parametrize(("block_m", "block_n", "warps"), [(32, 64, 4), (64, 64, 4), (64, 128, 8), (16, 32, 2)])
def test_gradients_do_not_depend_on_tiles(block_m, block_n, warps):
    case = Batch((513, 64, 1030), seed=8)
    _, first = _gradients(case)
    own = gpu.arch(0)
    shape = {"head_dim": 256, "block_m": block_m, "block_n": block_n, "warps": warps, "stages": 1}
    rows = tuple(plans.Row(kernel=kernel, **shape) for kernel in ("grad_queries", "grad_keys"))
    plans.use(plans.Plans(arch=own, rows=(*rows, *plans.shipped(own).rows)))
    assert all(equal(x, y) for x, y in zip(first, _gradients(case)[1]))


def test_gradient_memory_is_linear():
    case = Batch((8192,), seed=8)
    _gradients(case)
    torch.cuda.synchronize()
    inputs = sum(x.numel() * 2 for x in (case.q, case.k, case.v))
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    out = attention_packed(q, k, v, cu_seqlens_q=case.cu, cu_seqlens_k=case.cu, scale=case.scale)
    grad = torch.randn_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    extra = torch.cuda.max_memory_allocated() - before
    # the gradients themselves are q + k + v
    assert extra <= 2 * inputs, (extra, inputs)
    assert len(gradients) == 3


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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_layout_context_parallel_ranks_equal_one(world, layout):
    """Each rank's calls, one after the other on one GPU, against the whole batch on one rank."""
    from rl_attn import cp_merge, cp_positions, cp_split

    case = Batch((64 * world, 264 * world), seed=11)
    out, lse = case.packed()
    grad, (dq, dk, dv) = _gradients(case)
    whole = out.to(case.q.dtype)
    delta = gpu.row_delta(grad, whole)
    cu, local_cu = case.cu, case.cu // world
    found = [[] for _ in range(5)]
    for rank in range(world):
        q, k, v, d, s, e = (
            cp_split(x, cu.cpu(), rank, world, layout) for x in (case.q, case.k, case.v, grad, lse, delta)
        )
        at = cp_positions(cu.cpu(), rank, world, layout).to(DEVICE)
        mine, mine_lse = gpu.packed(q, case.k, case.v, local_cu, cu, at, case.scale, 64, 512, torch.float32)
        found[0].append(mine)
        found[1].append(mine_lse)
        found[2].append(gpu.grad_queries(d, q, case.k, case.v, s, e, local_cu, cu, at, case.scale))
        own_dk, own_dv = gpu.grad_keys(grad, case.q, k, v, lse, delta, cu, local_cu, case.positions, at, case.scale)
        found[3].append(own_dk)
        found[4].append(own_dv)
    for parts, want in zip(found, (out, lse, dq, dk, dv)):
        assert equal(cp_merge(parts, cu.cpu(), layout), want)


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


@pytest.fixture(scope="module")
def library():
    """FlashAttention 3 from an installed wheel, or skip: its certificate names one build."""
    try:
        return nosplit._load("sm90")
    except (MissingSupport, ContractError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(128, 8, 2), (256, 4, 2), (128, 16, 1)])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nosplit_library_is_one_function_for_every_phase(library, head_dim, heads, kv_heads, page, dtype):
    lengths = (1, 15, 64, 65, 513, 1037, 2049)
    case = Batch(lengths, heads, kv_heads, head_dim, page=page, dtype=dtype, seed=12)
    cu = case.cu
    out, lse = attention_packed(
        case.q, case.k, case.v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=case.scale, family="nosplit", return_lse=True
    )
    table = case.table.clamp(max=case.cache.num_blocks - 1)
    lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)

    def paged(rows, starts, keys, which):
        return attention_paged(
            case.q[rows], case.cache, query_start_loc=torch.tensor(starts, device=DEVICE, dtype=torch.int32),
            seq_lens=keys, block_table=table[which].contiguous(), scale=case.scale, family="nosplit", return_lse=True,
        )  # fmt: skip

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
    out = attention_packed(q, k, v, cu_seqlens_q=case.cu, cu_seqlens_k=case.cu, scale=case.scale, family="nosplit")
    grad, ours = _gradients(case)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for x, y in zip(found, ours):
        assert float((x.double() - y.double()).norm() / y.double().norm()) < 6e-3
