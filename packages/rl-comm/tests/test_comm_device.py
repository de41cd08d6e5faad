"""The forms of a GPU's reductions among simulated ranks of one device: neither size nor form shows in the bits."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl_comm import TreeCommunicator, board, device, tree_sum
from rl_comm.header import Call
from rl_comm.mover import gathered_into
from rl_contract import launches, reset_launches
from rl_contract.testing import ThreadRank, on_ranks

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
gpu = pytest.param("cuda", marks=on_gpu)
SIZES = (1, 7, 4095, 4096, 4097, 1_000_003)


class ThreadMover:
    """What NCCL moves, moved by reference among threads."""

    name = "threads"

    def __init__(self, rank):
        self._rank = rank

    def gather(self, call, payload):
        return torch.stack(self._rank.everyone(payload))

    def gather_each(self, call, payloads):
        return [self.gather(call, payload) for payload in payloads]

    def gather_into(self, call, wholes):
        gathered_into(self, self._rank.rank, call, wholes)

    def scatter(self, call, payload):
        return torch.stack([rows[self._rank.rank] for rows in self._rank.everyone(payload)])

    def broadcast(self, call, payload, source):
        return self._rank.everyone(payload)[source].clone()


def needs_gpu(test):
    for mark in on_gpu:
        test = mark(test)
    return test


def communicator(rank: ThreadRank, two_shot_bytes: int) -> TreeCommunicator:
    mover = ThreadMover(rank)
    return TreeCommunicator.over({"cpu": mover, "cuda": mover}, rank.rank, rank.world_size, two_shot_bytes)


def reduced(x, limit, out_dtype):
    return on_ranks(len(x), lambda r: communicator(r, limit).all_reduce(x[r.rank], out_dtype=out_dtype))


def scattered(x, dim):
    return on_ranks(len(x), lambda r: communicator(r, 0).reduce_scatter(x[r.rank], dim=dim, out_dtype=torch.bfloat16))


def gathered(x, dim):
    return on_ranks(len(x), lambda r: communicator(r, 0).all_gather(x[r.rank], dim=dim))


def partials(world, shape, seed, device):
    """Half of the ranks hold nearly what the other half takes away, so that any other order shows."""
    g = torch.Generator().manual_seed(seed)
    half = [torch.randn(shape, generator=g) * 1e3 for _ in range(world // 2)]
    return torch.stack(half + [torch.randn(shape, generator=g) - x for x in half]).to(device)


def by_steps(parts):
    level = [p.cpu() for p in parts]
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2])]
    return level[0]


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_form_and_size_never_show(world, device):
    reset_launches()
    for n in SIZES:
        x = partials(world, (n,), n, device)
        want = by_steps(x)
        for out_dtype in (torch.float32, torch.bfloat16):
            for limit in (0, 1 << 40):
                got = reduced(x, limit, out_dtype)
                assert all(same_bits(y, want.to(out_dtype)) for y in got), (n, out_dtype, limit)
    plans = {row["plan"] for row in launches() if row["kernel"] == "rl_comm.threads.all_reduce"}
    assert plans == {"one-shot", "two-shot"}


def test_a_call_is_agreed_on_once_in_either_form(monkeypatch):
    """NCCL's part played by threads: what ranks say on the host before anything moves is one call, not its steps."""

    def gathered(out, payload, group):
        out.copy_(ThreadMover(group).gather(None, payload).view_as(out))

    def scattered(out, payload, group):
        out.copy_(ThreadMover(group).scatter(None, payload))

    monkeypatch.setattr(device.dist, "all_gather_into_tensor", gathered)
    monkeypatch.setattr(device.dist, "all_to_all_single", scattered)
    x = partials(2, (4097,), 1, "cpu")

    def said(rank, limit):
        calls = []
        mover = device.NcclMover(rank, rank.rank, 2, SimpleNamespace(agree=calls.append))
        comm = TreeCommunicator.over({"cpu": mover}, rank.rank, 2, limit)
        assert same_bits(comm.all_reduce(x[rank.rank], out_dtype=torch.bfloat16), by_steps(x).bfloat16())
        return [call.op for call in calls]

    for limit in (0, 1 << 40):
        assert on_ranks(2, lambda r, limit=limit: said(r, limit)) == [["all_reduce"]] * 2


def test_several_tensors_are_agreed_on_and_launched_once(monkeypatch):
    launched = []

    @contextmanager
    def grouped(group):
        launched.append("group")
        yield

    def gathered(out, payload, group):
        out.copy_(ThreadMover(group).gather(None, payload).view_as(out))

    monkeypatch.setattr(device.dist, "all_gather_into_tensor", gathered)
    monkeypatch.setattr(device.dist, "_coalescing_manager", grouped)

    def said(rank):
        calls = []
        mover = device.NcclMover(rank, rank.rank, 2, SimpleNamespace(agree=calls.append))
        comm = TreeCommunicator.over({"cpu": mover}, rank.rank, 2, 0)
        x, y = torch.full((3,), rank.rank), torch.full((2, 5), 0.5 + rank.rank).bfloat16()
        a, b = comm.all_gather_each([x, y])
        assert a.tolist() == [0, 0, 0, 1, 1, 1]
        assert same_bits(b, torch.tensor([0.5, 0.5, 1.5, 1.5]).bfloat16()[:, None].repeat(1, 5))
        return [(call.op, len(call.beside)) for call in calls]

    assert on_ranks(2, said) == [[("all_gather", 1)]] * 2
    assert launched == ["group"] * 2

    @contextmanager
    def unknown(group):
        yield
        raise RuntimeError("Backend nccl does not support allgather_into_tensor_coalesced")

    def alone(rank):
        mover = device.NcclMover(rank, rank.rank, 2, SimpleNamespace(agree=lambda call: None))
        probe = torch.zeros(2, 16, dtype=torch.uint8)
        found = [mover._groups(probe)]
        monkeypatch.setattr(device.dist, "_coalescing_manager", unknown)
        rank.everyone(0)
        found.append(mover._groups(probe))
        mover._grouped = found[-1]
        whole = torch.full((2, 3), 9, dtype=torch.uint8)
        whole[rank.rank] = rank.rank
        mover.gather_into(Call("all_gather", torch.uint8, torch.uint8, 0, (2, 3)), [whole, whole.clone()])
        return [*found, whole.tolist()]

    assert on_ranks(2, alone) == [[True, False, [[0] * 3, [1] * 3]]] * 2


def test_a_rank_waits_awake_for_a_peer_that_is_busy_and_asleep_for_one_that_is_away(monkeypatch):
    call = Call("all_gather", torch.float32, torch.float32, 0, (3, 5), "cuda")
    memory = bytearray(4096)
    shared = SimpleNamespace(memory=memory, pids=None)
    ranks = [board.Board(SimpleNamespace(rank=r, world_size=2), shared, 60.0) for r in range(2)]
    clock, yields, naps = [0.0], [], []

    def busy():
        clock[0] += 1e-4
        yields.append(1)
        if len(yields) == 40:
            # what a peer's own agree writes first
            ranks[1]._wait = lambda peer, mine: mine
            ranks[1].agree(call)

    monkeypatch.setattr(board, "_yield", busy)
    monkeypatch.setattr(board.time, "monotonic", lambda: clock[0] or 1e-9)
    monkeypatch.setattr(board.time, "sleep", naps.append)
    ranks[0].agree(call)
    assert len(yields) == 40
    assert not naps

    def away(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            ranks[1].agree(call)

    monkeypatch.setattr(board.time, "sleep", away)
    ranks[0].agree(call)
    assert len(naps) == 3
    assert len(yields) < 100


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("world", [2, 8])
def test_scatter_and_gather_along_any_dimension(world, device):
    for dim, shape in ((0, (2 * world, 130)), (1, (5, 3 * world)), (-1, (3, 2, world)), (-3, (world, 2, 3))):
        x = partials(world, shape, 3, device)
        want = by_steps(x).bfloat16().chunk(world, dim)
        got = scattered(x, dim)
        assert all(same_bits(a, b.contiguous()) for a, b in zip(got, want))
        joined = gathered(x, dim)
        assert all(same_bits(y, torch.cat(list(x), dim).cpu()) for y in joined)


@needs_gpu
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_kernel_is_the_tree(world):
    from rl_comm.triton_tree import tree_sum as kernel

    for n in (*SIZES, 1664 * 5120):
        x = partials(max(2, world), (n,), n, "cuda")[:world].contiguous()
        tiny = x * 2.0**-140  # subnormal sums are kept
        for parts in (x, tiny):
            for out_dtype in (torch.float32, torch.bfloat16):
                got = kernel(parts, out_dtype)
                assert same_bits(got, by_steps(parts).to(out_dtype)), (n, out_dtype)
                assert same_bits(got, tree_sum(list(parts), out_dtype).cpu())


@needs_gpu
def test_a_misordered_sum_is_noticed():
    x = partials(8, (1_000_003,), 1, "cuda")
    chain = x[0]
    for part in x[1:]:
        chain = chain + part
    assert not torch.equal(chain, tree_sum(x))


@needs_gpu
def test_nothing_waits_for_the_device():
    x = partials(2, (4097, 33), 5, "cuda")
    tree_sum(x, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree_sum(x, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
