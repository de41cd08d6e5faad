"""Sums and gathers through peer memory without a GPU: interpreted kernels of several processes share a file's pages."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl_comm import TreeCommunicator, device, peer_memory
from rl_comm.device import NcclMover
from rl_comm.mover import Call
from rl_contract import ContractError
from rl_contract.testing import on_ranks

INTERPRETED = """
import ctypes, mmap, os, random, sys, time
import torch
from rl_comm import tree_sum, triton_peer

path, rank, world, slot, programs, order = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
words = 2 * world * slot + (world + 1) * programs
with open(path, "r+b") as f:
    memory = mmap.mmap(f.fileno(), 0)
begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
addresses = torch.tensor([begin + r * -(-4 * words // 4096) * 4096 for r in range(world)])
delay = random.Random(rank)
sums = 0
for call in range(24):
    n = (1, 7, 64, 257, slot)[call % 5]
    g = torch.Generator().manual_seed(call)
    parts = torch.randn(world, n, generator=g) * 1e3
    # what the last rank holds nearly takes the others' away
    parts[-1] -= parts[:-1].sum(0)
    mine = parts[rank].clone()
    if delay.random() < 0.4:
        time.sleep(delay.random() * 0.03)
    fixed = dict(SLOT=slot, PROGRAMS=programs, RANK=rank, WORLD=world, BLOCK=64)
    if call % 4 == 3:
        # two steps, of rows that each rank adds one of
        whole = torch.randn(world, world * n, generator=g) * 1e3
        kind = (torch.float32, torch.float16)[call % 8 // 4]
        out = torch.full((world * n,), float("nan"), dtype=kind)
        triton_peer.peer_reduce_kernel[(programs,)](whole[rank].clone().view(torch.int32), out, addresses, n, **fixed)
        assert torch.equal(out, tree_sum(list(whole)).to(kind)), (call, n)
        continue
    if call % 4 == 2:
        out = torch.full((world, n), -1, dtype=torch.int32)
        triton_peer.peer_gather_kernel[(programs,)](mine.view(torch.int32), out, addresses, n, **fixed)
        assert torch.equal(out, parts.view(torch.int32)), (call, n)
        continue
    out = torch.full((n,), float("nan"))
    triton_peer.peer_sum_kernel[(programs,)](mine.view(torch.int32), out, addresses, n, **fixed)
    want = tree_sum(list(parts))
    if order == "chain":
        want = parts[0].clone()
        for part in parts[1:]:
            want += part
    sums += int((out.view(torch.int32) != want.view(torch.int32)).sum())
print(sums)
"""


def interpreted(tmp_path, world, order="tree", slot=600, programs=3):
    """How many sums of each rank differ from that order's."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter needs a process without a GPU")
    path = tmp_path / "memory"
    words = 2 * world * slot + (world + 1) * programs
    path.write_bytes(bytes(world * -(-4 * words // 4096) * 4096))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def rank(number):
        command = [sys.executable, "-W", "ignore", "-c", INTERPRETED, str(path), str(number), str(world)]
        command += [str(slot), str(programs), order]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(world) as pool:
        done = list(pool.map(rank, range(world)))
    assert all(x.returncode == 0 for x in done), [x.stderr[-1500:] for x in done]
    return [int(x.stdout) for x in done]


TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (8, 5)])
@pytest.mark.parametrize("name", ["peer_sum_kernel", "peer_gather_kernel", "peer_reduce_kernel"])
def test_kernels_compile(arch, world, rank, name):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_comm import triton_peer

    kernel = getattr(triton_peer, name)
    constants = {"SLOT": peer_memory.words_of(world)[0], "PROGRAMS": peer_memory.PROGRAMS, "RANK": rank}
    constants |= {"WORLD": world, "BLOCK": 2048}
    out = "*i32" if name == "peer_gather_kernel" else "*bf16"
    meetings = 2 if name == "peer_reduce_kernel" else 1
    types = {"words": "*i32", "out": out, "addresses": "*i64", "n": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(given),): value for given, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(4)},
    )
    text = triton.compile(source, target=GPUTarget(*TARGETS[arch]), options={"num_warps": 8}).asm
    if arch != "sm90":
        # flags are written behind what came before for every GPU to see, and read from where peers write
        assert text["amdgcn"].count("buffer_wbl2 sc0 sc1") >= meetings * (world - 1)
        return
    lines = [line.strip() for line in text["ptx"].splitlines()]
    assert sum("release" in line and "sys" in line for line in lines) == meetings * (world - 1)
    assert sum("acquire" in line and "sys" in line for line in lines) == meetings * (world - 1)
    # 16 bytes at a time, also to peers, and peers' parts never from a processor's own cache
    assert sum("st.global.v4" in line for line in lines) >= 2 * (world - 1)
    assert sum("ld.global.cg.v4" in line for line in lines) == (1 + meetings) * (world - 1)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_that_come_when_they_like_get_the_trees_bits(tmp_path, world):
    assert interpreted(tmp_path, world) == [0] * world


def test_another_order_of_the_same_parts_shows(tmp_path):
    assert min(interpreted(tmp_path, 4, order="chain")) > 100


def test_what_fits_is_whole_words_up_to_a_slot():
    peers = peer_memory.PeerMemory([0] * 8, 0, torch.device("cpu"))
    for size, found in ((0, False), (4, True), (6, False), (2 << 20, True), ((2 << 20) + 4, False)):
        assert peers.fits(size) == found


class Prepared:
    """A kernel of ``triton_peer``, of which launches and compilations are noted, and its ``Prepared`` at once."""

    def __init__(self, done, fails=False):
        self._done, self._fails = done, fails

    def warmup(self, *arguments, grid, num_warps):
        if self._fails:
            raise RuntimeError("no compiler")
        self._done.append("compiled")

    def __call__(self, *moving):
        self._done.append("launched")


def noted(monkeypatch, fails=False, device="cpu"):
    """Peer memory of two ranks that launches nothing, and what it does, in order."""
    done = []
    kernel = Prepared(done, fails)
    monkeypatch.setattr(
        peer_memory,
        "_kernels",
        lambda: SimpleNamespace(peer_sum_kernel=kernel, peer_gather_kernel=kernel, peer_reduce_kernel=kernel),
    )
    monkeypatch.setattr(peer_memory, "Prepared", lambda function, grid, fixed, num_warps: function)
    peers = peer_memory.PeerMemory([0, 0], 0, torch.device("cpu"))
    peers.device = torch.device(device)
    monkeypatch.setattr(peers, "_order", lambda: done.append("ordered"))
    return peers, done


def test_whatever_may_fail_on_one_rank_comes_before_its_peers_wait(monkeypatch):
    words = torch.zeros(16, dtype=torch.uint8)
    for move in (lambda p, agree: p.sum(words, torch.bfloat16, agree), lambda p, agree: p.gather(words, agree)):
        peers, done = noted(monkeypatch)
        move(peers, lambda done=done: done.append("agreed"))
        assert done == ["compiled", "agreed", "ordered", "launched"]
        move(peers, lambda done=done: done.append("agreed"))
        assert done[4:] == ["agreed", "ordered", "launched"]
        peers, done = noted(monkeypatch, fails=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no compiler"):
                move(peers, lambda done=done: done.append("agreed"))
        assert done == []
        peers, done = noted(monkeypatch)

        def odd():
            raise ContractError("ranks make different calls")

        with pytest.raises(ContractError):
            move(peers, odd)
        assert done == ["compiled"]


def test_a_second_step_through_peer_memory_waits_for_no_rank_that_failed_after_the_first(monkeypatch):
    def scattered(out, payload, group):
        out.copy_(torch.stack([rows[group.rank] for rows in group.everyone(payload)]))

    monkeypatch.setattr(device.dist, "all_to_all_single", scattered)

    def said(rank):
        calls = []

        def gather(payload, agree):
            agree()
            return torch.stack(rank.everyone(payload))

        peers = SimpleNamespace(name="peer_memory", device=torch.device("cpu"), fits=lambda n: True, gather=gather)
        peers.fits_in_steps = lambda n: False
        mover = NcclMover(rank, rank.rank, 2, SimpleNamespace(agree=calls.append), peers)
        comm = TreeCommunicator.over({"cpu": mover}, rank.rank, 2, 0)
        assert comm.all_reduce(torch.full((5,), 1.0 + rank.rank)).tolist() == [3.0] * 5
        return [(call.op, call.shape) for call in calls]

    assert on_ranks(2, said) == [[("all_reduce", (5,)), ("all_gather", (3,))]] * 2


def test_sums_of_several_slots_are_one_call_of_several_launches(monkeypatch):
    peers, done = noted(monkeypatch)
    slot, _ = peer_memory.words_of(2)
    assert not peers.fits_in_steps(4 * slot)
    peers.two_steps = True
    assert [peers.fits_in_steps(size) for size in (0, 4, 8, 12, 40 * slot)] == [False, False, True, False, True]
    out = peers.sum_in_steps(
        torch.zeros(4 * (4 * slot + 6), dtype=torch.uint8), torch.bfloat16, lambda: done.append("agreed")
    )
    assert out.shape == (4 * slot + 6,)
    assert done == ["compiled"] * 2 + ["agreed", "ordered"] + ["launched"] * 3
    assert sorted(n for _, n, _ in peers._launches) == [3, slot]


@pytest.mark.parametrize(
    ("size", "two_shot_bytes", "two_steps", "form"),
    [
        (8, None, True, "sum"), (8, 0, True, "sum_in_steps"), (8, 0, False, ""), (4 << 20, None, True, "sum_in_steps"),
        (4 << 20, None, False, ""), (2 << 20, 1 << 30, True, "sum"), (4 << 20, 1 << 30, True, "sum_in_steps"),
        ((4 << 20) + 1, None, True, ""),
    ],
)  # fmt: skip
def test_sums_go_through_peer_memory_in_one_step_or_two(size, two_shot_bytes, two_steps, form):
    peers = peer_memory.PeerMemory([0, 0], 0, torch.device("cpu"), two_steps)
    took = []
    for name in ("sum", "sum_in_steps"):
        setattr(peers, name, lambda payload, kind, agree, name=name: took.append(name) or torch.empty(size, dtype=kind))
    mover = NcclMover(None, 0, 2, SimpleNamespace(agree=lambda call: None), peers)
    comm = TreeCommunicator.over({"cpu": mover}, 0, 2, two_shot_bytes)
    partial = torch.empty(size)
    limit = 8 << 20 if two_shot_bytes is None else two_shot_bytes
    found = comm._by_peers(comm._call("all_reduce", partial), partial, torch.bfloat16, 4 * size < limit)
    assert took == ([form] if form else [])
    assert (found is None) == (not form)


def test_launches_go_to_the_gpu_whose_peers_are_mapped(monkeypatch):
    peers, done = noted(monkeypatch, device="cuda:1")
    current = [0]

    @contextmanager
    def changed(of):
        before, current[0] = current[0], of.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", changed)
    monkeypatch.setattr(peers, "_order", lambda: done.append(current[0]))
    peers.gather(torch.zeros(16, dtype=torch.uint8), lambda: None)
    assert done == ["compiled", 1, "launched"]
    assert current == [0]
    mover = SimpleNamespace(peers=peers)
    call = Call("all_reduce", torch.float32, torch.float32, 0, (4,), "cuda")
    for where, wrong in (("cuda:1", False), ("cuda:0", True)):
        found = NcclMover.misplaced(mover, call, SimpleNamespace(device=torch.device(where)))
        assert (found is not None) == wrong
    assert "all_reduce got a tensor on cuda:0, supported: on cuda:1" in str(found)


def test_calls_on_several_streams_run_one_after_the_other(monkeypatch):
    class Stream:
        waited = ()

        def wait_stream(self, other):
            self.waited += (other,)

    first, second = Stream(), Stream()
    peers = peer_memory.PeerMemory([0, 0], 0, torch.device("cpu"))
    current, capturing = [first], [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    peers._order()
    peers._order()
    assert (first.waited, second.waited) == ((), ())
    current[0] = second
    peers._order()
    assert second.waited == (first,)
    # a stream that is captured can't wait for one that is not, and is none that an eager call could wait for
    current[0], capturing[0] = first, True
    peers._order()
    current[0], capturing[0] = second, False
    peers._order()
    assert (first.waited, second.waited) == ((), (first,))


PRETENDED = """
from rl_contract.pretend import aligned, pretend_gpu
driver, launched = pretend_gpu("sm90")
import torch
from rl_comm import peer_memory

peers = peer_memory.PeerMemory([4096, 8192], 1, torch.device("cpu"))
peers._addresses = aligned(2, dtype=torch.int64)
peers._order = lambda: None
seen = []
for n in (64, 64, 20, 4):
    x = aligned(n // 4, dtype=torch.float32).view(torch.uint8)
    for out in (torch.float32, torch.bfloat16):
        peers.sum(x, out, lambda: seen.append((driver._loaded, len(launched))))
    peers.gather(x, lambda: seen.append((driver._loaded, len(launched))))
# what is launched was compiled and loaded before its peers heard of it, and once
assert [count for _, count in seen] == list(range(12)), seen
assert [loaded for loaded, _ in seen] == [1, 2, 3, 3, 3, 3, 4, 5, 6, 7, 8, 9], seen
assert driver._loaded == 9
assert {x.grid for x in launched} == {(64, 1, 1)}
"""


def test_a_launch_is_compiled_and_loaded_before_peers_hear_of_it_and_once():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    done = subprocess.run([sys.executable, "-c", PRETENDED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
