"""Gradients on a GPU: against fp64, repeated, whatever the packing, the tiles and the context parallel layout."""

import pytest
import torch

from rl_attn import attention_packed, gpu, gpu_backward, plans, segments_of
from rl_attn.counting import count_segments
from rl_attn.testing import DEVICE, Batch, counted, equal, require_segments
from rl_contract.profile import KEY_TILE, SEGMENT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def _own_plans():
    yield
    plans.plan_files.own.clear()


def _gradients(case, positions=None):
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    g = torch.Generator(DEVICE).manual_seed(9)
    grad = torch.randn(case.q.shape, generator=g, device=DEVICE).to(case.q.dtype)
    call = {"cu_seqlens_q": case.cu, "cu_seqlens_k": case.cu, "scale": case.scale, "positions": positions}
    out = attention_packed(q, k, v, **call)
    with count_segments() as calls:
        again = attention_packed(q, k, v, **call)
    assert equal(again.detach(), out.detach())
    require_segments(calls[0], case.positions + 1)
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


@pytest.mark.parametrize(
    ("block_m", "block_n", "warps", "stages"),
    [(32, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 3), (64, 128, 8, 1), (64, 128, 8, 3), (16, 32, 2, 1)],
)
def test_gradients_do_not_depend_on_tiles(block_m, block_n, warps, stages):
    case = Batch((513, 64, 1030), seed=8)
    _, first = _gradients(case)
    own = gpu.arch(0)
    shape = {"head_dim": 256, "block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
    # three tiles of 128 keys and values are more than there is room for
    queries = shape | {"stages": min(stages, 2) if block_n > 64 else stages}
    rows = (plans.Row(kernel="grad_queries", **queries), plans.Row(kernel="grad_keys", **shape))
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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_layout_context_parallel_ranks_equal_one(world, layout):
    """Each rank's calls, one after the other on one GPU, against the whole batch on one rank."""
    from rl_attn import cp_merge, cp_positions, cp_split

    case = Batch((64 * world, 264 * world), seed=11)
    out, lse = case.packed()
    grad, (dq, dk, dv) = _gradients(case)
    whole = out.to(case.q.dtype)
    delta = gpu_backward.row_delta(grad, whole)
    cu, local_cu = case.cu, case.cu // world
    found, most = [[] for _ in range(5)], {}
    for rank in range(world):
        q, k, v, d, s, e = (
            cp_split(x, cu.cpu(), rank, world, layout) for x in (case.q, case.k, case.v, grad, lse, delta)
        )
        at = cp_positions(cu.cpu(), rank, world, layout).to(DEVICE)
        rest = (case.k, case.v, local_cu, cu, at, case.scale, KEY_TILE, SEGMENT, torch.float32)
        mine, mine_lse, ran = counted(lambda: gpu.packed(q, *rest), at + 1)  # noqa: B023
        most[rank] = max(ran)
        found[0].append(mine)
        found[1].append(mine_lse)
        found[2].append(gpu_backward.grad_queries(d, q, case.k, case.v, s, e, local_cu, cu, at, case.scale))
        own_dk, own_dv = gpu_backward.grad_keys(
            grad, case.q, k, v, lse, delta, cu, local_cu, case.positions, at, case.scale
        )
        found[3].append(own_dk)
        found[4].append(own_dv)
    # with four ranks the last rows of the longer sequence see a second segment
    assert max(most.values()) == segments_of(264 * world) == world // 2
    for parts, want in zip(found, (out, lse, dq, dk, dv)):
        assert equal(cp_merge(parts, cu.cpu(), layout), want)
