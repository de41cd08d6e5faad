"""TreeCommunicator over gloo: one spawn per world size runs every check.

The ranks are children of this file run as a script, forked before it has made a thread or a group: eight processes that
import torch on two cores take longer than all that is checked here.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_comm import (
    TreeCommunicator,
    board,
    copy_to_ranks,
    gather_from_ranks,
    mover,
    reduce_from_ranks,
    shared_memory,
    tree_sum,
)
from rl_comm.device import NcclMover
from rl_comm.mover import HEADER_BYTES, Call, GlooMover
from rl_contract import Communicator, ContractError, MissingSupport, launches, reset_launches

TRANSPORT = "shared_memory"
SIZES = (1, 7, 4095, 4096, 4097, 300_001)


def make(group=None, **kw):
    comm = TreeCommunicator(group, transport=TRANSPORT, **kw)
    assert comm.world_size == 1 or comm.transport == TRANSPORT
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


def check_refusals(rank, world):
    comm = make()
    last = world - 1
    cases = [
        (
            lambda: comm.all_reduce(torch.ones(4, dtype=torch.bfloat16)),
            r"partial of torch.bfloat16, supported: torch.float32",
        ),
        (lambda: comm.all_reduce(torch.ones(5 if rank == last else 4)), rf"rank {last} has all_reduce\(shape \(5,\)"),
        (lambda: comm.all_reduce(torch.ones(1 << 20 if rank == last else 4)), rf"rank {last} has .*1048576"),
        (lambda: comm.all_gather(torch.ones(4).to(torch.int64 if rank == last else torch.float32)), r"torch\.int64"),
        (lambda: comm.all_gather(torch.ones(4), dim=2 if rank == last else 0), "dim or source 2"),
        (lambda: comm.all_gather(torch.ones(4), dim=2), "dim=2 for a tensor of shape"),
        (lambda: comm.all_gather(torch.ones(4, dtype=torch.complex64)), "complex64"),
        (lambda: comm.all_gather(torch.ones([1] * 9)), "9 dimensions"),
        (lambda: comm.reduce_scatter(torch.ones(world + 1)), "multiple of the world size"),
        (lambda: comm.all_reduce(torch.ones(4), out_dtype=torch.int32), "out_dtype=torch.int32, supported"),
        (
            lambda: comm.all_reduce(torch.ones(4), out_dtype=torch.int32 if rank == last else None),
            "out torch|out_dtype",
        ),
        (lambda: comm.reduce_scatter(torch.ones(world), out_dtype=torch.bool), "out_dtype=torch.bool, supported"),
        (lambda: gather_from_ranks(torch.ones(4), comm, 2), "dim=2 for a tensor of shape"),
        (lambda: comm.broadcast(torch.ones(4), source=world), f"source={world}"),
        (lambda: comm.barrier() if rank == last else comm.all_reduce(torch.ones(4)), "rank 0 has all_reduce"),
        (lambda: comm.all_reduce(torch.ones(4), out_dtype=torch.bfloat16 if rank else None), r"out torch\.bfloat16"),
    ]
    for call, message in cases:
        with pytest.raises(ContractError, match=message):
            call()
    meta = torch.ones(world, device="meta")
    for call in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.broadcast):
        with pytest.raises(MissingSupport, match=r"on meta, supported: \('cpu', 'cuda'\)"):
            call(meta)
    # the group is still in step
    assert float(comm.all_reduce(torch.ones(1))) == world


def check_one_rank_refuses(rank, world):
    """Whatever one rank alone is given, all ranks are told which one it was, and the next call is in step."""
    comm = make()
    x = torch.ones(2 * world)
    ints, sparse = torch.ones(2 * world, dtype=torch.int32), torch.ones(2 * world).to_sparse()
    sums = (None, [1.0], "x", sparse, ints, x.double(), x.to("meta"), torch.ones([1] * 9))
    cases = [(lambda y, op=op: op(y), bad) for op in (comm.all_reduce, comm.reduce_scatter) for bad in sums]
    others = (None, [1.0], sparse, x.to("meta"), x.to(torch.complex64), torch.ones([1] * 9))
    cases += [(lambda y, op=op: op(y), bad) for op in (comm.all_gather, comm.broadcast) for bad in others]
    for dim in (None, "0", 0.0, True, 7, 10**30, -(10**30)):
        cases.append((lambda d: comm.reduce_scatter(x, dim=0 if d is x else d), dim))
        cases.append((lambda d: comm.all_gather(x, dim=0 if d is x else d), dim))
        cases.append((lambda d: gather_from_ranks(x, comm, 0 if d is x else d), dim))
        cases.append((lambda d: comm.broadcast(x, source=0 if d is x else d), dim if dim != 7 else world))
    for dtype in ("float32", 3, torch.int32, torch.complex64):
        cases.append((lambda t: comm.all_reduce(x, out_dtype=None if t is x else t), dtype))
        cases.append((lambda t: comm.reduce_scatter(x, out_dtype=None if t is x else t), dtype))
    cases += [(lambda y: reduce_from_ranks(y, comm), bad) for bad in (None, "x", ints, sparse)]
    cases += [(lambda y: gather_from_ranks(y, comm), bad) for bad in (None, "x", sparse)]
    for at, (call, bad) in enumerate(cases):
        odd = at % world
        with pytest.raises(ContractError, match=rf"ranks make different calls.*refused on rank {odd}, ") as refusal:
            call(bad if rank == odd else x)
        assert ("This rank: " in str(refusal.value)) == (rank == odd)
        # the very next call is this one on every rank, with the right value
        assert float(comm.all_reduce(torch.full((3,), float(at + rank)))[2]) == at * world + sum(range(world)), at
    # two that refuse differently are both named
    with pytest.raises(ContractError, match=rf"refused on rank 0, {world - 1},"):
        comm.all_reduce({0: None, world - 1: ints}.get(rank, x))
    # a compiler refuses nothing before the ranks have met
    compiled = torch.compile(lambda p, d: comm.reduce_scatter(p * 1.0, dim=d), backend="eager")
    if world == 2:
        with pytest.raises(Exception, match="refused on rank 1, "):
            compiled(x, 5 if rank == 1 else 0)
        assert torch.equal(compiled(x, 0), torch.full((2,), float(world)))
    comm.barrier()
    # negated lazily: bytes alone would lose the sign
    lazy = torch.complex(x, torch.arange(2.0 * world)).conj().imag
    assert lazy.is_neg()
    assert same_bits(comm.all_gather(lazy), (-torch.arange(2.0 * world)).repeat(world))
    assert same_bits(make(two_shot_bytes=0).all_reduce(lazy), -torch.arange(2.0 * world) * world)


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


def check_groups(rank, world):
    solo = [dist.new_group([r]) for r in range(world)][rank]
    alone = make(solo)
    assert alone.world_size == 1
    x = torch.randn(5)
    assert same_bits(alone.all_reduce(x, out_dtype=torch.bfloat16), x.bfloat16())
    with pytest.raises(ContractError, match=r"partial of torch\.float64"):
        alone.all_reduce(x.double())
    for call, message in (
        (lambda: alone.all_reduce(x, out_dtype=torch.int32), "out_dtype=torch.int32, supported"),
        (lambda: alone.reduce_scatter(x, out_dtype=torch.int64), "out_dtype=torch.int64, supported"),
        (lambda: alone.reduce_scatter(x, dim=1), "dim=1 for a tensor of shape"),
        (lambda: alone.all_gather(x, dim=-2), "dim=-2 for a tensor of shape"),
        (lambda: gather_from_ranks(x, alone, 1), "dim=1 for a tensor of shape"),
    ):
        with pytest.raises(ContractError, match=message):
            call()
    for call in (alone.all_reduce, alone.reduce_scatter, alone.all_gather, alone.broadcast):
        with pytest.raises(MissingSupport, match=r"on meta, supported: \('cpu', 'cuda'\)"):
            call(x.to("meta"))
    if world == 4:
        three = dist.new_group([0, 1, 2])
        if rank < 3:
            with pytest.raises(ContractError, match="world of 3, supported"):
                TreeCommunicator(three)
        else:
            with pytest.raises(ContractError, match="not in the group"):
                TreeCommunicator(three)


def check_compiled(rank, world):
    """A compiler sees one opaque op."""
    comm = make()
    x = partials(world, (3, 8))
    compiled = torch.compile(lambda p: comm.all_reduce(p * 1.0, out_dtype=torch.bfloat16) + 0, backend="eager")
    assert same_bits(compiled(x[rank]), tree_sum(x, torch.bfloat16))


def check_choice(rank, world):
    default = TreeCommunicator(identity="one profile")
    assert (default.transport, default.device_transport) == ("shared_memory", "staged-shared_memory")
    with pytest.raises(MissingSupport, match="transport='nccl' got a group with backend 'cpu:gloo,cuda:gloo'"):
        TreeCommunicator(transport="nccl")
    with pytest.raises(ContractError, match="transport='mpi'"):
        TreeCommunicator(transport="mpi")
    # a rank of another profile is named on every rank
    with pytest.raises(ContractError, match=f"rank 0 for 'profile a', rank {world - 1} for 'profile b'"):
        TreeCommunicator(identity="profile b" if rank == world - 1 else "profile a")
    long = "p" * 5000
    assert TreeCommunicator(identity=long).world_size == world
    with pytest.raises(ContractError, match="ranks were built for different things"):
        TreeCommunicator(identity=long + str(rank))
    # other arguments would have other transports, or other transfers for the same call
    last = rank == world - 1
    for given, usual in (({"transport": "gloo"}, {}), ({"two_shot_bytes": 0}, {"two_shot_bytes": 1 << 20})):
        with pytest.raises(ContractError, match=f"different arguments: rank 0 transport='auto'.*rank {world - 1} "):
            TreeCommunicator(**given if last else usual)
    assert TreeCommunicator(two_shot_bytes=np.int64(1 << 20) if last else 1 << 20).world_size == world
    bad = ({"transport": "mpi"}, {"transport": ["gloo"]}, {"transport": "nccl"}, {"identity": None},
           {"two_shot_bytes": "1"}, {"two_shot_bytes": -1}, {"timeout_s": float("nan")},
           {"two_shot_bytes": True}, {"timeout_s": True}, {"host_group": 3})  # fmt: skip
    for given in bad:
        message = re.escape(next(iter(given))) + "=" if last else f"refused on rank {world - 1}, whose error says why"
        with pytest.raises((ContractError, MissingSupport), match=message):
            TreeCommunicator(**given if last else {})
    assert not [f for f in os.listdir("/dev/shm") if f.startswith("rl-comm-")] or rank
    # a rank that cannot map the memory decides for all
    real = shared_memory._open
    shared_memory._open = (lambda path, size: None) if rank == world - 1 else real
    assert TreeCommunicator().transport == "gloo"
    with pytest.raises(MissingSupport, match="all ranks on one host"):
        TreeCommunicator(transport="shared_memory")
    shared_memory._open = real


def check_many_small_calls(rank, world):
    """Ranks that run ahead never overwrite what a slower rank still reads."""
    comm = make()
    for i in range(200):
        if i % world == rank:
            time.sleep(0.0005)
        assert float(comm.all_reduce(torch.full((3,), float(rank + i)))[1]) == sum(range(world)) + world * i


def check_board(rank, world):
    """What guards a GPU call: ranks that say the same go on, one that differs stops all, nobody is left behind."""
    gloo = GlooMover(dist.group.WORLD, rank, world)
    held = board.make(gloo, 60.0)
    assert isinstance(held, board.Board)
    for i in range(300):
        if i % world == rank and i % 50 == 0:
            time.sleep(0.002)
        held.agree(Call("all_reduce", torch.float32, torch.bfloat16, 0, (i, 5), "cuda"))
    for odd in (0, world - 1):
        shape = (4, 5) if rank == odd else (3, 5)
        with pytest.raises(ContractError, match=r"ranks make different calls: rank 0 .*5\), .*cuda"):
            held.agree(Call("all_gather", torch.float32, torch.float32, 0, shape, "cuda"))
    held.agree(Call("barrier", torch.uint8, torch.uint8, 0, ()))
    seen = board.Signatures(gloo)
    for _ in range(3):
        seen.agree(Call("all_gather", torch.float32, torch.float32, 0, (3, 5), "cuda"))
    with pytest.raises(ContractError, match="ranks make different calls"):
        seen.agree(Call("all_gather", torch.float32, torch.float32, 0, (rank, 9), "cuda"))
    # nothing that is kept of a call grows with its tensors
    kept = board._kept.cache_info().currsize
    for each in (held, seen, seen):
        one = Call("all_gather", torch.float32, torch.float32, 0, (3, 5), "cuda")
        each.agree(replace(one, beside=(one,) * 500))
        with pytest.raises(ContractError, match="ranks make different calls"):
            each.agree(replace(one, beside=(one,) * 500 + (replace(one, shape=(rank,)),)))
    assert board._kept.cache_info().currsize == kept
    assert all(type(words) is bytes and len(words) == HEADER_BYTES for words in seen._seen)


def check_ended_peer(rank, world):
    """The last check: rank 1 leaves, and its peers are told so instead of waiting."""
    comm = make(timeout_s=30)
    comm.barrier()
    if rank == 1:
        return
    with pytest.raises(RuntimeError, match=r"rank 1 .* has ended"):
        comm.all_reduce(torch.ones(3))


def check_absent_peer(rank, world):
    comm = make(timeout_s=1)
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 did not make this call within 1 s"):
            comm.all_reduce(torch.ones(3))
    dist.barrier()


CHECKS = [
    check_reductions,
    check_fp16_results,
    check_r38_size_never_decides,
    check_movement,
    check_several_at_once,
    check_refusals,
    check_one_rank_refuses,
    check_many_small_calls,
]
ONCE = [check_backward, check_groups, check_choice, check_board]


def run_rank(rank, world, folder):
    global TRANSPORT
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    reset_launches()
    for check in CHECKS + ONCE + ([check_compiled, check_absent_peer] if world == 2 else []):
        check(rank, world)
    if world < 8:
        TRANSPORT = "gloo"
        for check in CHECKS:
            check(rank, world)
        TRANSPORT = "shared_memory"
    if rank == 0:
        with open(os.path.join(folder, "launches.json"), "w") as f:
            json.dump(launches(), f)
    if world == 2:
        check_ended_peer(rank, world)
        return
    dist.destroy_process_group()


@pytest.mark.field_report("R35", "R38", "R41")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_layout_ranks_equal_the_tree(world, tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(world), str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "launches.json").read_text())
    kernels = {row["kernel"] for row in rows}
    for transport in ("shared_memory", "gloo") if world < 8 else ("shared_memory",):
        assert {f"rl_comm.{transport}.{op}" for op in ("all_reduce", "reduce_scatter", "all_gather")} <= kernels
    assert {row["layout"] for row in rows} == {f"world{world}"}


@pytest.mark.field_report("R39")
def test_a_group_of_another_backend_is_refused():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(MissingSupport, match="supported: gloo, nccl"):
            TreeCommunicator()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    # what a first op imports costs a second; forked ranks have it from here
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"
    mp.start_processes(run_rank, (int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]), start_method=method)
