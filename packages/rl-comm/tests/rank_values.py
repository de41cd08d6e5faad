"""What every rank gets of collectives: called on all ranks of a group at once, by ``rank_main.py``."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rl_comm import TreeCommunicator, copy_to_ranks, gather_from_ranks, mover, reduce_from_ranks, tree_sum
from rl_comm.device import NcclMover
from rl_contract import Communicator, ContractError, launches

# of every group that ``make`` makes; ``rank_main.py`` goes through the transports
transport = "shared_memory"
SIZES = (1, 7, 4095, 4096, 4097, 300_001)


def make(group=None, **kw):
    comm = TreeCommunicator(group, transport=transport, **kw)
    assert comm.world_size == 1 or comm.transport == transport
    return comm


def partials(world, shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    half = [torch.randn(shape, generator=g) * 1e3 for _ in range(world // 2)]
    return torch.stack(half + [torch.randn(shape, generator=g) - x for x in half])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_reductions(rank, world):
    one, two = make(two_shot_bytes=1 << 40), make(two_shot_bytes=0)
    assert isinstance(one, Communicator)
    for n in SIZES:
        x = partials(world, (n,), seed=n)
        for out_dtype in (None, torch.bfloat16):
            want = tree_sum(x, out_dtype)
            for comm in (one, two):
                got = comm.all_reduce(x[rank], out_dtype=out_dtype)
                assert same_bits(got, want), (n, out_dtype)
                everyone = comm.all_gather(got.reshape(1, -1))
                assert all(same_bits(row, want) for row in everyone)
    # R35: a hidden size that is no multiple of 8, tokens on either side of the two-shot size
    edge = make(two_shot_bytes=4 * 100 * 101)
    for tokens in (99, 100, 101):
        x = partials(world, (tokens, 101))
        assert same_bits(edge.all_reduce(x[rank]), tree_sum(x))
    for dim, shape in ((0, (2 * world, 13)), (1, (5, 3 * world)), (-1, (3, 2, world))):
        x = partials(world, shape)
        want = tree_sum(x, torch.bfloat16).chunk(world, dim)[rank]
        assert same_bits(one.reduce_scatter(x[rank], dim=dim, out_dtype=torch.bfloat16), want)
    assert same_bits(one.all_reduce(x[rank].transpose(0, 1)), tree_sum(x).transpose(0, 1))
    assert one.all_reduce(torch.empty(0, 5)).shape == (0, 5)


def check_r38_size_never_decides(rank, world):
    """The rows two calls of different size share have the same bits."""
    comm = make(two_shot_bytes=4 * 1800 * 320)
    x = partials(world, (2048, 320))
    small, large = comm.all_reduce(x[rank, :1664]), comm.all_reduce(x[rank])
    forms = {row["plan"] for row in launches() if row["kernel"].endswith("all_reduce")}
    assert {"one-shot", "two-shot"} <= forms
    assert same_bits(small, large[:1664])


def check_fp16_results(rank, world):
    """fp16 is a type of models: one rounding of the fp32 sum to nearest even, infinite beyond its range."""
    x = partials(world, (4097,), seed=3)
    x[:, 0], x[:, 1], x[:, 2] = 65519.0 / world, 65520.0 / world, 2.0**-24 / world
    want = tree_sum(x).to(torch.float16)
    assert (float(want[0]), float(want[1]), float(want[2])) == (65504.0, float("inf"), 2.0**-24)
    for limit in (0, 1 << 40):
        assert same_bits(make(two_shot_bytes=limit).all_reduce(x[rank], out_dtype=torch.float16), want)
    shard = make().reduce_scatter(x[rank, : 8 * world], out_dtype=torch.float16)
    assert same_bits(shard, want[8 * rank : 8 * rank + 8])


def check_movement(rank, world):
    comm = make()
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.float32):
        x = torch.arange(rank * 30, rank * 30 + 30).reshape(5, 6).to(dtype)
        for dim in (0, 1, -1):
            want = torch.cat([torch.arange(r * 30, r * 30 + 30).reshape(5, 6).to(dtype) for r in range(world)], dim)
            assert same_bits(comm.all_gather(x, dim=dim), want)
        for n in (30, 100_000):
            y = torch.full((n,), rank).to(dtype)
            assert same_bits(comm.broadcast(y, source=world - 1), torch.full((n,), world - 1).to(dtype))
            assert same_bits(y, torch.full((n,), rank).to(dtype))
    # a NaN's payload and the sign of zero survive
    odd = [torch.tensor([0x7FC12345 + r, -(2**31)], dtype=torch.int32).view(torch.float32) for r in range(world)]
    assert same_bits(comm.all_gather(odd[rank]), torch.cat(odd))
    # one element is contiguous, whatever its stride says
    column = torch.arange(3.0 * world).view(3, world)[:1, rank]
    assert column.stride() != (1,)
    assert same_bits(comm.all_gather(column), torch.arange(float(world)))
    comm.barrier()


def check_several_at_once(rank, world):
    """Each as by a gather of its own, over every mover; a payload may be longer than a slot, or nothing."""

    def rows(r):
        g = torch.Generator().manual_seed(r)
        return [
            torch.randn(3, 40_000, generator=g),
            torch.randn(2, 5, generator=g).bfloat16().t(),
            torch.arange(7) + r,
            torch.empty(0, 3),
            torch.tensor([r % 2 == 0]),
        ]

    want = [torch.cat(parts) for parts in zip(*(rows(r) for r in range(world)))]
    grouped = NcclMover(dist.group.WORLD, rank, world, SimpleNamespace(agree=lambda call: None))
    for comm in (make(), TreeCommunicator.over({"cpu": grouped}, rank, world)):
        got = comm.all_gather_each(rows(rank))
        assert len(got) == len(want)
        assert all(same_bits(a, b) for a, b in zip(got, want)), comm.transport
        assert same_bits(comm.all_gather_each(rows(rank)[2:3])[0], want[2])
    comm = make()
    first = torch.ones(2, 3)
    if world > 1:
        odd = torch.ones(4 + (rank == 1))
        mine = rf"This rank: \(2, 3\) torch.float32, \({4 + (rank == 1)},\) torch.float32, 2 x \(2, 3\) torch.float32$"
        with pytest.raises(
            ContractError, match=r"rank 1 has all_gather\(shape \(2, 3\).*and 3 tensors beside.*" + mine
        ):
            comm.all_gather_each([first, odd, first, first])
        with pytest.raises(ContractError, match=r"rank 1 has .*and 2 tensors beside it"):
            comm.all_gather_each([first] * (2 + (rank == 1)))
        with pytest.raises(ContractError, match="rank 1 has"):
            comm.all_gather_each([first, first.half() if rank == 1 else first])
        with pytest.raises(ContractError, match="supported: a dense" if rank == 1 else "refused on rank 1"):
            comm.all_gather_each([first, "x" if rank == 1 else first])
        # what is sent differs, though the tensors are alike
        whole = torch.full((world, 3), torch.nan)
        with pytest.raises(ContractError, match="all_gather_into"):
            comm.all_gather_into([whole]) if rank == 1 else comm.all_gather_each([whole])
        for several in (comm.all_gather_each, comm.all_gather_into):
            with pytest.raises(ContractError, match="got Tensor.*a list" if rank == 1 else "refused on rank 1"):
                several(whole if rank == 1 else [whole])
            with pytest.raises(ContractError, match="got int.*a list" if rank == 1 else "refused on rank 1"):
                several(3 if rank == 1 else [whole])
        assert whole.isnan().all()
    for wrong, words in (([], "at least one"), ([torch.ones(2), torch.tensor(1.0)], "dim=0")):
        with pytest.raises(ContractError, match=words):
            comm.all_gather_each(wrong)
    for each in (make(), comm, TreeCommunicator.over({"cpu": grouped}, rank, world)):
        wholes = [torch.full((3 * world, 5_000), torch.nan), torch.zeros(world, 7, dtype=torch.int64), torch.ones(0, 2)]
        wholes[0][3 * rank : 3 * rank + 3] = rank + 0.5
        wholes[1][rank] = rank
        mover.PIECE_BYTES = 1 << (28 if each is comm else 12)
        each.all_gather_into(wholes)
        each.all_gather_into([torch.empty(0, 3), torch.empty(world, 0)])
        assert torch.equal(wholes[0], (torch.arange(world) + 0.5).repeat_interleave(3)[:, None].expand(-1, 5_000))
        assert torch.equal(wholes[1], torch.arange(world)[:, None].expand(-1, 7))
    for wrong, words in ((torch.ones(3, world).t(), "strides"), (torch.ones(world + 1, 2), "divide")):
        if world > 1:
            with pytest.raises(ContractError, match=words):
                comm.all_gather_into([torch.ones(world), wrong])
    run = torch.zeros(3 * world, 2)
    lazy = torch._neg_view(torch.zeros(world))
    for wrong, words in (([run[:-world], run[world:]], r"tensors \[0, 1\] of the list in the same memory"),
                         ([torch.zeros(world), run, run], r"tensors \[1, 2\]"), ([run, lazy], "lazily")):  # fmt: skip
        with pytest.raises(ContractError, match=words):
            comm.all_gather_into(wrong)
    # what lies side by side, or is empty, is written to once
    run.fill_(float(rank))
    comm.all_gather_into([run[world:], run[:0], run[:world], run[: 2 * world][:0]])
    assert torch.equal(run[:world], torch.arange(world)[:, None].expand(-1, 2).float())
    assert torch.equal(run[world:], torch.arange(world).repeat_interleave(2)[:, None].expand(-1, 2).float())
    with torch.inference_mode():
        kept = torch.full((world,), float(rank))
    with pytest.raises(ContractError, match="made under torch"):
        comm.all_gather_into([kept])
    with torch.inference_mode():
        comm.all_gather_into([kept])
    assert torch.equal(kept, torch.arange(world).float())
    # the group stays usable
    assert same_bits(comm.all_gather_each([torch.ones(2), torch.zeros(1)])[1], torch.zeros(world))


def check_backward(rank, world):
    """R41: each wrapper's gradient is that of the function of all ranks' inputs, nothing summed twice."""
    comm = make()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(6, 4 * world, generator=g)
    w = torch.randn(4 * world, 5, generator=g)
    dy = torch.randn(6, 5, generator=g)

    full = x.double().requires_grad_()
    (full @ w.double()).backward(dy.double())

    # column parallel, then gathered
    leaf = x.clone().requires_grad_()
    v = torch.randn(4 * world, 8 * world, generator=g)
    dz = torch.randn(6, 8 * world, generator=g)
    z = gather_from_ranks(copy_to_ranks(leaf, comm) @ v.chunk(world, 1)[rank], comm, -1)
    assert z.shape == dz.shape
    z.backward(dz)
    torch.testing.assert_close(leaf.grad, dz @ v.T, rtol=1e-4, atol=1e-4)
    everyone = comm.all_gather(leaf.grad[None])
    assert all(same_bits(row, leaf.grad) for row in everyone)

    # row parallel, then reduced
    mine = x.chunk(world, 1)[rank].clone().requires_grad_()
    reduce_from_ranks(mine @ w.chunk(world, 0)[rank], comm).backward(dy)
    torch.testing.assert_close(mine.grad.double(), full.grad.chunk(world, 1)[rank], rtol=1e-5, atol=1e-5)

    half = torch.randn(9, dtype=torch.bfloat16, generator=g).requires_grad_()
    parts = torch.randn(world, 9, generator=g).bfloat16()
    copy_to_ranks(half, comm).backward(parts[rank])
    assert same_bits(half.grad, tree_sum(parts.float(), torch.bfloat16))


def check_many_small_calls(rank, world):
    """Ranks that run ahead never overwrite what a slower rank still reads."""
    comm = make()
    for i in range(200):
        if i % world == rank:
            time.sleep(0.0005)
        assert float(comm.all_reduce(torch.full((3,), float(rank + i)))[1]) == sum(range(world)) + world * i


def check_compiled(rank, world):
    """A compiler sees one opaque op of a sum; what is none breaks its graph, and refusals are met in step."""
    comm = make()
    x = partials(world, (3, 8))
    compiled = torch.compile(lambda p: comm.all_reduce(p * 1.0, out_dtype=torch.bfloat16) + 0, backend="eager")
    assert same_bits(compiled(x[rank]), tree_sum(x, torch.bfloat16))

    def moves(p):
        comm.barrier()
        (each,) = comm.all_gather_each([p])
        return comm.broadcast(p * 2.0, source=1) + 0, each + 0

    broadcast, each = torch.compile(moves, backend="eager")(x[rank])
    assert same_bits(broadcast, x[1] * 2.0)
    assert same_bits(each, torch.cat(list(x)))
    for bad in (None, x[0].to_sparse(), x[0].to("meta"), "x", x[0].clone().requires_grad_()):
        for op in (comm.all_reduce, comm.all_gather):
            call = torch.compile(lambda p, op=op: op(p) + 0, backend="eager")
            with pytest.raises(ContractError, match="refused on rank 0, "):
                call(bad if rank == 0 else x[0])
            assert float(call(torch.ones(1))[0]) == (world if op == comm.all_reduce else 1)
