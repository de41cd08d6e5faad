"""tree(G): the same bits at every TP size, forward and backward."""

import pytest
import torch

import rl_gemm
from rl_contract import SingleRank
from rl_gemm import ops, reference

TYPES = (torch.bfloat16, torch.float32)
WORLDS = (1, 2, 4, 8)


@pytest.mark.parametrize("dtype", TYPES)
def test_tree_equals_reference(dtype):
    x, weight = torch.randn(65, 512).to(dtype), torch.randn(130, 512).to(dtype)
    for leaves in (1, 2, 4, 8, 16, 64):
        assert torch.equal(ops.matmul_tree(x, weight, leaves), reference.tree(x, weight, leaves)), leaves


def test_a_left_fold_of_the_leaves_is_noticed():
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    folded = sum(reference.chain(a, b) for a, b in zip(x.split(64, 1), weight.split(64, 1)))
    swapped = reference.join([reference.chain(x[:, g::8], weight[:, g::8]) for g in range(8)])
    got = ops.matmul_tree(x, weight, 8)
    for wrong in (folded, swapped, reference.chain(x, weight)):
        assert (wrong != got).float().mean() > 0.3


@pytest.mark.field_report("R40")
def test_layout_tp_1_2_4_8_sub_trees_join_to_one_tree():
    x, weight = torch.randn(256, 512).to(torch.bfloat16), torch.randn(4096, 512).to(torch.bfloat16)
    whole = ops.matmul_tree(x, weight, 8)
    assert whole.numel() > 1_000_000
    for world in WORLDS:
        roots = [ops.matmul_tree(a, b, 8 // world) for a, b in zip(x.chunk(world, 1), weight.chunk(world, 1))]
        assert torch.equal(reference.join(roots), whole), world


@pytest.mark.field_report("R40")
def test_layout_bf16_partials_would_differ():
    """R40, C6: partial sums rounded to bf16 before the reduction agree with one rank in about half of the outputs."""
    x, weight = torch.randn(16, 4096).to(torch.bfloat16), torch.randn(512, 4096).to(torch.bfloat16)
    one = rl_gemm.linear(x, weight)
    for world, share in ((2, 0.63), (4, 0.51), (8, 0.44)):
        roots = [ops.matmul_tree(a, b, 1) for a, b in zip(x.chunk(world, 1), weight.chunk(world, 1))]
        rounded = roots[0].to(torch.bfloat16)
        for root in roots[1:]:
            rounded = rounded + root.to(torch.bfloat16)
        assert abs((rounded == one).float().mean() - share) < 0.06
        assert torch.equal(reference.join(roots).to(torch.bfloat16), rl_gemm.linear(x, weight, leaves=world))


@pytest.mark.field_report("R14", "R40")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_layout_row_parallel_equals_one_rank(dtype, world, on_ranks):
    x, weight = torch.randn(5, 7, 256).to(dtype), torch.randn(96, 256).to(dtype)
    bias, dy = torch.randn(96).to(dtype), torch.randn(5, 7, 96).to(dtype)

    def run(x, weight, comm):
        x, weight, b = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
        y = rl_gemm.row_parallel_linear(x, weight, b, comm=comm, leaves=8)
        y.backward(dy)
        return y.detach(), x.grad, weight.grad, b.grad

    y, dx, dw, db = run(x, weight, None)
    assert torch.equal(y.view(35, 96), reference.linear(x.view(35, 256), weight, bias, 8))
    ranks = on_ranks(
        world,
        lambda c: run(x.chunk(world, -1)[c.rank], weight.chunk(world, -1)[c.rank], c if world > 1 else SingleRank()),
    )
    for r in ranks:
        assert torch.equal(r[0], y)
        assert torch.equal(r[3], db)
    assert torch.equal(torch.cat([r[1] for r in ranks], -1), dx)
    assert torch.equal(torch.cat([r[2] for r in ranks], -1), dw)


def shard(weight, fused, world, rank):
    """Rank's rows: for [gate; up] its part of gate, then its part of up."""
    return torch.cat([half.chunk(world)[rank] for half in weight.chunk(fused)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fused", [1, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_layout_column_parallel_equals_one_rank(dtype, fused, world, on_ranks):
    x, weight, bias = torch.randn(33, 64).to(dtype), torch.randn(160, 64).to(dtype), torch.randn(160).to(dtype)
    dy = torch.randn(33, 160).to(dtype)

    def run(weight, bias, dy, comm):
        own, w, b = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
        y = rl_gemm.column_parallel_linear(own, w, b, comm=comm, leaves=8, fused=fused)
        y.backward(dy)
        return y.detach(), own.grad, w.grad, b.grad

    def rows(t, rank):
        return shard(t, fused, world, rank)

    y, dx, dw, db = run(weight, bias, dy, None)
    assert torch.equal(y, reference.linear(x, weight, bias))
    assert torch.equal(dx, reference.grad_input(dy, weight, 8, fused).to(dtype))
    ranks = on_ranks(
        world, lambda c: run(rows(weight, c.rank), rows(bias, c.rank), rows(dy.t(), c.rank).t().contiguous(), c)
    )
    for rank, r in enumerate(ranks):
        assert torch.equal(r[0], rows(y.t(), rank).t())
        assert torch.equal(r[1], dx)
        assert torch.equal(r[2], rows(dw, rank))
        assert torch.equal(r[3], rows(db, rank))


def test_fused_leaves_differ_from_plain_leaves():
    dy, weight = torch.randn(64, 256), torch.randn(256, 512)
    assert not torch.equal(ops.grad_input(dy, weight, 4, 2), ops.grad_input(dy, weight, 4, 1))
