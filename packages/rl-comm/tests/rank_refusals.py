"""Calls that every rank is told are wrong, and peers that do not call: on all ranks at once, by ``rank_main.py``."""

import itertools
import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_values import make, same_bits
from torch._subclasses import FakeTensorMode

from rl_comm import TreeCommunicator, copy_to_ranks, gather_from_ranks, reduce_from_ranks, shared_memory
from rl_comm.agreement import check_alike
from rl_comm.mover import GlooMover
from rl_contract import ContractError, MissingSupport
from rl_contract.communicator import refuse


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
    # what an operator was given is compared in the header of its gather; a rank that says nothing fits any
    x, whole = torch.full((2,), float(rank)), torch.arange(float(world)).repeat_interleave(2)
    for said in ("op(k=1)", "" if rank == last else "op(k=1)"):
        assert same_bits(comm.all_gather_said(x, said), whole)
        assert same_bits(comm.all_gather_said(x[None], said, dim=1), whole[None])
    two = "op(k=2)" if rank == last else "op(k=1)"
    # those that differ are found beside one that says nothing, too
    for said in (two, two if world == 2 or rank else ""):
        own = f".*This rank: {re.escape(said)}" if said else ""
        with pytest.raises(ContractError, match=rf"ranks make different calls: .*values have check \w{{16}}{own}"):
            comm.all_gather_said(x, said)
        assert same_bits(comm.all_gather_said(x, "op(k=1)"), whole)
    # texts that UTF-8 has no bytes for are compared as others
    odd = chr(0xD800 + (rank == last))
    with pytest.raises(ContractError, match=rf"values have check \w{{16}}.*This rank: {odd}"):
        comm.all_gather_said(x, odd)
    assert same_bits(comm.all_gather_said(x, "\ud800"), whole)
    # what is no text is one rank's refusal, or that of all, and the group stays usable
    for bad in (5, 0, None, b"op", ["op"], 10**5000):
        for alone in (True, False):
            refuses = not alone or rank == last
            told = rf"all_gather_said got said=.* \(a {type(bad).__name__}\), supported: a text"
            with pytest.raises(ContractError, match=told if refuses else f"refused on rank {last}, "):
                comm.all_gather_said(x, bad if refuses else "op(k=1)")
        assert same_bits(comm.all_gather_said(x, "op(k=1)"), whole)
    for bad, message in ((None, "None"), (x.to_sparse(), "layout"), (x.clone().requires_grad_(), "requires grad")):
        with pytest.raises(ContractError, match=f"refused on rank {last}, .*This rank: .*{message}" if rank == last else
                           f"refused on rank {last}, "):  # fmt: skip
            comm.all_gather_said(bad if rank == last else x, "op(k=1)")
        assert same_bits(comm.all_gather_said(x, "op(k=1)"), whole)


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
    # what has no elements of its own, and what an op without a gradient would have to differentiate
    nested = [torch.nested.nested_tensor([x, x[:1]], layout=layout) for layout in (torch.strided, torch.jagged)]
    with FakeTensorMode():
        fake = torch.ones(2 * world)
    ops = (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.broadcast, lambda y: reduce_from_ranks(y, comm))
    cases += [(op, bad) for op in ops for bad in (*nested, fake)]
    # what has no elements yet, and what has none any more
    lazy, freed = (torch.nn.UninitializedParameter(), torch.nn.UninitializedBuffer()), torch.ones(2 * world)
    freed.untyped_storage().resize_(0)
    odd_ones = (*nested, fake, None, *lazy, freed)
    for op, bad in itertools.product((comm.all_gather_each, comm.all_gather_into), odd_ones):
        with pytest.raises(
            ContractError, match="supported: (a|one) " if rank == 0 else r"refused on rank 0, .*This rank: 2 x"
        ):
            op([x.clone(), bad if rank == 0 else x.clone()])
    cases += [(op, x.clone().requires_grad_()) for op in ops[:3]]
    cases += [(op, bad) for op in ops[:4] for bad in (*lazy, freed)]
    for at, (call, bad) in enumerate(cases):
        odd = at % world
        with pytest.raises(ContractError, match=rf"ranks make different calls.*refused on rank {odd}, ") as refusal:
            call(bad if rank == odd else x)
        assert ("This rank: " in str(refusal.value)) == (rank == odd)
        # the very next call is this one on every rank, with the right value
        assert float(comm.all_reduce(torch.full((3,), float(at + rank)))[2]) == at * world + sum(range(world)), at
    for transform in (torch.func.grad, torch.func.vmap, lambda op: lambda y: torch.func.jvp(op, (y,), (y,))):
        for op in (comm.all_reduce, comm.broadcast, lambda y: comm.all_gather_each([y])[0]):
            if transform is torch.func.vmap and op == comm.all_reduce:
                # an op is called for one row after another
                rows = torch.func.vmap(op)(torch.stack([x, x + rank]))
                assert torch.equal(rows, torch.stack([x * world, x * world + sum(range(world))]))
                continue
            with pytest.raises(ContractError, match="This rank: " if rank == 0 else "refused on rank 0,"):
                transform(lambda y, op=op: op(y).sum())(x[None]) if rank == 0 else op(x[None])
            assert float(comm.all_reduce(torch.ones(1))) == world
    # what ends before it is a call
    for bad, wrap in ((x, torch.func.grad), (None, None), (nested[0], None), ("x", None)):
        for op in (reduce_from_ranks, copy_to_ranks):
            if rank == 0:
                with pytest.raises(Exception, match=r"setup_context|copy_to_ranks got|This rank: "):
                    wrap(lambda y, op=op: op(y, comm).sum())(bad) if wrap else op(bad, comm)
            else:
                # the other one's backward would have made the call that meets it
                with pytest.raises(ContractError, match="refused on rank 0, "):
                    reduce_from_ranks(x, comm)
            assert float(comm.all_reduce(torch.ones(1))) == world
    unreadable = type("Odd", (list,), {"__iter__": lambda self: iter([1 / 0])})([x])
    with pytest.raises(ContractError, match="refused on rank 0, "):
        comm.all_gather_each(unreadable if rank == 0 else [x])
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
    negated = torch.complex(x, torch.arange(2.0 * world)).conj().imag
    assert negated.is_neg()
    assert same_bits(comm.all_gather(negated), (-torch.arange(2.0 * world)).repeat(world))
    assert same_bits(make(two_shot_bytes=0).all_reduce(negated), -torch.arange(2.0 * world) * world)


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


def check_choice(rank, world):
    default = TreeCommunicator(identity="one profile")
    assert (default.transport, default.device_transport) == ("shared_memory", "staged-shared_memory")
    for transport in ("nccl", "peer_memory"):
        with pytest.raises(
            MissingSupport, match=f"transport='{transport}' got a group with backend 'cpu:gloo,cuda:gloo'"
        ):
            TreeCommunicator(transport=transport, two_shot_bytes=0)
    for group in (3, "tp", [rank]):
        with pytest.raises(ContractError, match=r"group=.*supported: None, or a process group"):
            TreeCommunicator(group)
    with pytest.raises(ContractError, match="transport='mpi'"):
        TreeCommunicator(transport="mpi")
    # a rank of another profile is named on every rank
    with pytest.raises(ContractError, match=f"rank 0 for 'profile a', rank {world - 1} for 'profile b'"):
        TreeCommunicator(identity="profile b" if rank == world - 1 else "profile a")
    long = "p" * 5000
    assert TreeCommunicator(identity=long).world_size == world
    with pytest.raises(ContractError, match="ranks were built for different things"):
        TreeCommunicator(identity=long + str(rank))
    # one rank's argument is longer than a header, or can't be shown
    unshown = type("Unshown", (), {"__repr__": lambda self: 1 / 0})()
    for given in ({"transport": "x" * 2000}, {"two_shot_bytes": "x" * 2000}, {"identity": ["x" * 2000]},
                  {"transport": np.array(["auto"] * 500)}, {"transport": unshown}, {"two_shot_bytes": unshown},
                  {"identity": unshown}, {"transport": "x" * 2000, "identity": long}):  # fmt: skip
        message = "supported: |can't be read" if rank == 0 else "refused on rank 0, whose error says why"
        with pytest.raises(ContractError, match=message) as told:
            TreeCommunicator(**given if rank == 0 else {})
        assert len(str(told.value)) < 400
    with pytest.raises(ContractError, match=r"different arguments: rank 0 transport='auto'.*\(sha256 "):
        check_alike(GlooMover(dist.group.WORLD, rank, world), "", "transport='auto'" + "x" * (2000 + rank), None)
    # other arguments would have other transports, or other transfers for the same call
    last = rank == world - 1
    for given, usual in (({"transport": "gloo"}, {}), ({"two_shot_bytes": 0}, {"two_shot_bytes": 1 << 20})):
        with pytest.raises(ContractError, match=f"different arguments: rank 0 transport='auto'.*rank {world - 1} "):
            TreeCommunicator(**given if last else usual)
    assert TreeCommunicator(two_shot_bytes=np.int64(1 << 20) if last else 1 << 20).world_size == world
    bad = ({"transport": "mpi"}, {"transport": ["gloo"]}, {"transport": "nccl"}, {"identity": None},
           {"two_shot_bytes": "1"}, {"two_shot_bytes": -1}, {"timeout_s": float("nan")},
           {"two_shot_bytes": True}, {"timeout_s": True}, {"host_group": 3})  # fmt: skip
    pair = dist.new_group([0, world - 1])
    if world > 2:
        for given in ({"host_group": pair}, {"group": dist.new_group([0, 1]), "host_group": pair}):
            if rank < 2 or "group" not in given:
                with pytest.raises(
                    ContractError, match=r"host_group=.*supported: None, or a gloo group of group's ranks"
                ):
                    TreeCommunicator(**given)
    else:
        assert TreeCommunicator(host_group=pair).world_size == world
    for given in bad:
        message = re.escape(next(iter(given))) + "=" if last else f"refused on rank {world - 1}, whose error says why"
        with pytest.raises((ContractError, MissingSupport), match=message):
            TreeCommunicator(**given if last else {})
    # its name is gone once it is made
    with pytest.MonkeyPatch.context() as patched:
        named, real_create = [], shared_memory._create
        patched.setattr(shared_memory, "_create", lambda size: named.append(real_create(size)) or named[-1])
        assert TreeCommunicator().transport == "shared_memory"
        assert bool(named) == (rank == 0)
        assert not any(map(os.path.exists, named))

    # a rank that cannot map the memory decides for all, and so does one without semaphores
    def unmapped(handle, size):
        raise ValueError("mmap length is greater than file size")

    def without(*_):
        raise OSError("no shared semaphore")

    odd = {} if rank != last else {"mmap": SimpleNamespace(mmap=unmapped)}
    for changes in (odd, {} if rank != last else {"SharedMemoryMover": without}):
        with pytest.MonkeyPatch.context() as patched:
            for name, value in changes.items():
                patched.setattr(shared_memory, name, value)
            assert TreeCommunicator().transport == "gloo"
            with pytest.raises(MissingSupport, match="all ranks on one host"):
                TreeCommunicator(transport="shared_memory")
    # its name may be gone already
    with pytest.MonkeyPatch.context() as patched:
        real = os.unlink
        patched.setattr(shared_memory.os, "unlink", lambda path: [real(path), real(path)])
        assert TreeCommunicator().transport == "shared_memory"


def check_ended_peer(rank, world):
    """The last check: rank 1 leaves, and its peers are told so instead of waiting."""
    comm = make(timeout_s=30)
    comm.barrier()
    if rank == 1:
        return
    with pytest.raises(RuntimeError, match=r"rank 1 .* has ended"):
        comm.all_reduce(torch.ones(3))


def check_absent_peer(rank, world):
    """After a call that one rank gave up, nobody is given what was meant for it, and nobody waits."""
    comm = make(timeout_s=1)
    assert float(comm.all_reduce(torch.ones(1))) == 2
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 did not make this call within 1 s"):
            comm.all_reduce(torch.full((3,), 100.0))
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 0 makes no calls any more since one of its own has failed"):
            comm.all_reduce(torch.ones(3))
    why = ("all_reduce ended with RuntimeError: rank 1 did not", "all_reduce ended with RuntimeError: rank 0 makes no")
    calls = (
        lambda: comm.all_reduce(torch.ones(3)),
        lambda: comm.all_reduce("x"),
        lambda: comm.reduce_scatter(torch.ones(2)),
        lambda: comm.all_gather(torch.ones(3)),
        lambda: comm.all_gather_each([torch.ones(3)]),
        lambda: comm.all_gather_into([torch.ones(2)]),
        lambda: comm.broadcast(torch.ones(3)),
        comm.barrier,
    )
    for call in calls:
        with pytest.raises(
            ContractError, match=f"out of step since an earlier call on rank {rank} failed: {why[rank]}"
        ):
            call()
    assert time.monotonic() - began < 1
    assert float(make().all_reduce(torch.ones(1))) == 2


def check_interrupted(rank, world):
    """An error of one rank inside a call of several exchanges, which its peers have not met, ends their wait."""
    comm, x = make(timeout_s=60), torch.ones(1 << 20)
    if rank == 0:
        comm._movers["cpu"]._collect = lambda: (_ for _ in ()).throw(KeyboardInterrupt())
    kind, match = (RuntimeError, "rank 0 makes no calls any more") if rank else (KeyboardInterrupt, "")
    with pytest.raises(kind, match=match):
        comm.all_reduce(x)
    with pytest.raises(ContractError, match="out of step since an earlier call"):
        comm.barrier()


def check_numbers(rank, world):
    """A rank that has made a call more than its peers is named by all, though the calls are alike."""
    comm = make()
    comm.barrier()
    comm._number += rank == world - 1
    if comm.transport == "gloo":
        comm._movers["cpu"]._traffic.calls += rank == world - 1
        # it waits until they have come to its call
        if rank < world - 1:
            with pytest.raises(ContractError, match=f"refused on rank {world - 1}, whose error says why"):
                comm.all_reduce(torch.ones(3))
        assert comm.all_reduce(torch.ones(3)).tolist() == [world] * 3
        return
    for number in (2, 3):
        match = f"this is call {number} of rank 0 and call {number + 1} of rank {world - 1}"
        with pytest.raises(ContractError, match=match):
            comm.all_reduce(torch.ones(3))


def check_told(rank, world):
    """A rank that refuses an operator waits for nobody; its peers' next call names it, and the one after is in step."""
    comm = make()
    last = world - 1
    for times in (1, 2):
        if rank == last:
            for _ in range(times):
                refuse(ContractError("x is torch.float16"), None, comm, given=(None, torch.ones(1)))
        else:
            for _ in range(times):
                match = f"rank {last} has refused an operator that would have called; refused on rank {last}, whose"
                with pytest.raises(ContractError, match=match):
                    comm.all_reduce(torch.ones(100_000))
        assert float(comm.all_reduce(torch.full((3,), float(rank)))[2]) == sum(range(world))
    # all alike
    for _ in range(3):
        refuse(MissingSupport("no kernels"), comm)
    assert float(comm.all_reduce(torch.ones(1))) == world
    # what the communicator has raised itself is told already, and a compiler's look says nothing
    with pytest.raises(ContractError, match="make different calls") as raised:
        comm.all_gather(torch.ones(3 + (rank == 0)))
    refuse(raised.value, comm)
    with FakeTensorMode():
        refuse(ContractError("fake"), comm)
    assert float(comm.all_reduce(torch.ones(1))) == world


def check_swapped(rank, world):
    """Ranks that call two communicators of one gloo group in another order are told; memory is each one's own."""
    first, second = make(), make()
    for comm in (first, second) if rank else (second, first):
        with pytest.raises(ContractError, match="ranks call different communicators of one group"):
            comm.all_reduce(torch.full((2,), 10.0**rank))
    assert float(make().all_reduce(torch.ones(1))) == world


def check_modes(rank, world):
    """A communicator made under inference mode, on one rank too, serves outside of it."""
    with torch.inference_mode(rank == 0):
        comm = make()
    assert float(comm.all_reduce(torch.ones(1))) == world


def check_two_over_one_group(rank, world):
    """A refusal on one of two communicators is met once by each peer, whatever they call in which order."""
    first, second = make(), make()
    for odd in range(world):
        if rank == odd:
            first.refuse(ContractError("no"))
        else:
            with pytest.raises(ContractError, match=f"refused on rank {odd}, whose error says why"):
                first.all_reduce(torch.ones(1))
        for comm in (second, first, second):
            assert comm.all_reduce(torch.full((2,), float(rank))).tolist() == [sum(range(world))] * 2
