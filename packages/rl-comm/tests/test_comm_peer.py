"""Sums and gathers through peer memory without a GPU: interpreted kernels of several processes share a file's pages."""

import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl_comm import TreeCommunicator, peer_memory
from rl_comm.device import NcclMover
from rl_comm.header import Call
from rl_contract import ContractError

INTERPRETED = """
import ctypes, mmap, os, random, sys, time, warnings
import torch
from rl_comm import tree_sum, triton_peer

path, rank, world, slot, programs, order = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
# numbers of calls wrap around as they do on a GPU
warnings.simplefilter("ignore")
def size(slot, programs): return 2 * world * slot + (world + 1) * programs
one, two = size(slot, programs), size(5 * 32, 5)
words = one + two
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
    fixed = dict(SLOT=slot, PROGRAMS=programs, RANK=rank, WORLD=world, BLOCK=64, LIMIT=0)
    if call % 4 == 3:
        # two steps, of rows that each rank adds one of; the last ones are shorter, or nothing
        n = (16, 160, 16, 1008, 640, 320)[call // 4]
        total = max(1, world * n - (0, 0, 17, 33, 1, 0)[call // 4])
        whole = torch.randn(world, total, generator=g) * 1e3
        whole[-1] -= whole[:-1].sum(0)
        kind = (torch.float32, torch.float16)[call % 8 // 4]
        out = torch.full((total,), float("nan"), dtype=kind)
        fixed |= dict(SLOT=5 * 32, PROGRAMS=5, BLOCK=32)
        given = whole[rank].clone().view(torch.int32), out, addresses + 4 * one, n, total
        triton_peer.peer_reduce_kernel[(5,)](*given, **fixed)
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


def interpreted(tmp_path, world, order="tree", slot=600, programs=3, made=0):
    """How many sums of each rank differ from that order's; ``made`` calls were made before."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter needs a process without a GPU")
    path = tmp_path / "memory"
    # slots, then flags and numbers of calls, of one step and of two; each rank's begin on a page
    said = [struct.pack("<i", made) * (world + 1) * n for n in (programs, 5)]
    memory = bytes(8 * world * slot) + said[0] + bytes(8 * world * 5 * 32) + said[1]
    path.write_bytes((memory + bytes(-len(memory) % 4096)) * world)
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
    two_steps = name == "peer_reduce_kernel"
    area = peer_memory.areas_of(world)[two_steps]
    constants = {"SLOT": area.slot, "PROGRAMS": area.programs, "RANK": rank, "WORLD": world, "BLOCK": area.block}
    # the clock is NVIDIA's
    constants["LIMIT"] = 1_800_000_000_000 if arch == "sm90" else 0
    out = "*i32" if name == "peer_gather_kernel" else "*bf16"
    meetings = 2 if two_steps else 1
    sizes = dict.fromkeys(("n", "total") if two_steps else ("n",), "i32")
    types = {"words": "*i32", "out": out, "addresses": "*i64", **sizes, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(given),): value for given, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3 + len(sizes))},
    )
    options = {"num_warps": 8, "debug": True, "sanitize_overflow": False}
    text = triton.compile(source, target=GPUTarget(*TARGETS[arch]), options=options).asm
    if arch != "sm90":
        # flags are written behind what came before for every GPU to see, and read from where peers write
        assert text["amdgcn"].count("buffer_wbl2 sc0 sc1") >= meetings * (world - 1)
        return
    lines = [line.strip() for line in text["ptx"].splitlines()]
    assert sum("release" in line and "sys" in line for line in lines) == meetings * (world - 1)
    assert sum("acquire" in line and "sys" in line for line in lines) == meetings * (world - 1)
    # whoever waits looks at the clock, and fails by name; nothing else asserts
    assert sum("globaltimer" in line for line in lines) == meetings * (world - 1)
    assert sum("__assertfail" in line and "call" in line for line in lines) == meetings * (world - 1)
    # 16 bytes at a time, also to peers, and peers' parts never from a processor's own cache
    assert sum("st.global.v4" in line for line in lines) >= 2 * (world - 1)
    # words of 16 bytes of a thread: of fp32, and of the bf16 that come back
    each = area.block // (8 * 32 * 4)
    assert sum("ld.global.cg.v4" in line for line in lines) == (each + (each // 2) * two_steps) * (world - 1)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_that_come_when_they_like_get_the_trees_bits(tmp_path, world):
    assert interpreted(tmp_path, world) == [0] * world


@pytest.mark.parametrize("made", [2**31 - 7, -4])
def test_numbers_of_calls_may_begin_again(tmp_path, made):
    """An engine makes 2**31 calls in days; of two steps a number is used up for every slot's worth."""
    assert interpreted(tmp_path, 2, made=made) == [0, 0]


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

    def warmup(self, *arguments, grid, **options):
        if self._fails:
            raise RuntimeError("no compiler")
        self._done.append("compiled")

    def __call__(self, *moving):
        self._done.append("launched")


def noted(monkeypatch, fails=False, device="cpu", timeout_s=0.0):
    """Peer memory of two ranks that launches nothing, and what it does, in order."""
    done = []
    kernel = Prepared(done, fails)
    monkeypatch.setattr(
        peer_memory,
        "kernels",
        lambda: SimpleNamespace(peer_sum_kernel=kernel, peer_gather_kernel=kernel, peer_reduce_kernel=kernel),
    )
    peers = peer_memory.PeerMemory([0, 0], 0, torch.device("cpu"), timeout_s)
    peers.fixed, peers.options = [], []

    def prepared(function, grid, fixed, **options):
        peers.fixed.append(fixed)
        peers.options.append(options)
        return function

    monkeypatch.setattr(peer_memory, "Prepared", prepared)
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


def test_a_sum_in_two_steps_is_one_launch_whatever_its_size(monkeypatch):
    peers, done = noted(monkeypatch)
    _, area = peer_memory.areas_of(2)
    for size, row in ((1, 16), (32, 16), (33, 32), (5 * area.slot + 6, 16 * -(-(5 * area.slot + 6) // 32))):
        done.clear()
        payload = torch.zeros(4 * size, dtype=torch.uint8)
        assert peers.sum_in_steps(payload, torch.bfloat16, lambda: done.append("agreed")).shape == (size,)
        assert done == ["compiled", "agreed", "ordered", "launched"]
        assert peers.fixed[-1] == {
            "n": row, "total": size, "SLOT": area.slot, "PROGRAMS": 128, "RANK": 0, "WORLD": 2, "BLOCK": 8192,
            "LIMIT": 0,
        }  # fmt: skip


@pytest.mark.parametrize(("timeout_s", "limit"), [(0.5, 500_000_000), (1800, 1_800_000_000_000), (1e30, 1 << 62)])
def test_kernels_wait_no_longer_than_the_communicator_may(monkeypatch, timeout_s, limit):
    peers, _ = noted(monkeypatch, timeout_s=timeout_s)
    peers.gather(torch.zeros(16, dtype=torch.uint8), lambda: None)
    assert peers.fixed[-1]["LIMIT"] == limit
    # without debug Triton leaves asserts out, and with it numbers of calls must still begin again
    assert peers.options[-1] == {"num_warps": 8, "debug": True, "sanitize_overflow": False}


@pytest.mark.parametrize(
    ("world", "size", "two_shot_bytes", "form"),
    [
        (2, 8, None, "sum"), (2, 8, 0, "sum_in_steps"), (2, 0, 0, ""), (2, 0, None, ""),
        (2, (1 << 20) - 1, None, "sum"), (2, 1 << 20, None, "sum_in_steps"), (2, 2 << 20, 1 << 30, "sum"),
        # more than a slot
        (2, (2 << 20) + 1, 1 << 30, "sum_in_steps"), (2, (4 << 20) + 1, None, "sum_in_steps"),
        # in one step a rank sends all it has to each of the others
        (4, 349_525, None, "sum"), (4, 349_526, None, "sum_in_steps"), (8, 149_797, None, "sum_in_steps"),
    ],
)  # fmt: skip
def test_sums_go_through_peer_memory_in_one_step_or_two(world, size, two_shot_bytes, form):
    peers = peer_memory.PeerMemory([0] * world, 0, torch.device("cpu"))
    took = []
    for name in ("sum", "sum_in_steps"):
        setattr(peers, name, lambda payload, kind, agree, name=name: took.append(name) or torch.empty(size, dtype=kind))
    mover = NcclMover(None, 0, world, SimpleNamespace(agree=lambda call: None), peers)
    comm = TreeCommunicator.over({"cpu": mover}, 0, world, two_shot_bytes)
    partial = torch.empty(size)
    found = comm._by_peers(comm._call("all_reduce", partial), partial, torch.bfloat16)
    assert took == ([form] if form else [])
    assert (found is None) == (not form)
    # offsets are 32 bits
    assert [peers.steps(n) for n in ((1 << 32) - 4, 1 << 32)] == [2, 0]


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
    # of whichever communicator
    peers, others = (peer_memory.PeerMemory([0, 0], 0, torch.device("cpu")) for _ in range(2))
    monkeypatch.setattr(peer_memory, "_last", {})
    current, capturing = [first], [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    peers._order()
    others._order()
    assert (first.waited, second.waited) == ((), ())
    current[0] = second
    peers._order()
    assert second.waited == (first,)
    # a stream that is captured can't wait for one that is not, and is none that an eager call could wait for
    current[0], capturing[0] = first, True
    others._order()
    current[0], capturing[0] = second, False
    others._order()
    assert (first.waited, second.waited) == ((), (first,))


PRETENDED = """
from rl_contract.pretend import aligned, pretend_gpu
driver, launched = pretend_gpu("sm90")
import torch
from rl_comm import peer_memory

peers = peer_memory.PeerMemory([4096, 8192], 1, torch.device("cpu"), 1800.0)
peers._areas = {area: aligned(2, dtype=torch.int64) for area in peers._areas}
peers._order = lambda: None
seen = []
for n in (64, 64, 20, 4):
    x = aligned(n // 4, dtype=torch.float32).view(torch.uint8)
    for out in (torch.float32, torch.bfloat16):
        peers.sum(x, out, lambda: seen.append((driver._loaded, len(launched))))
    peers.gather(x, lambda: seen.append((driver._loaded, len(launched))))
for n in (64, 64, 96):
    x = aligned(n, dtype=torch.uint8)
    peers.sum_in_steps(x, torch.bfloat16, lambda: seen.append((driver._loaded, len(launched))))
# what is launched was compiled and loaded before its peers heard of it, and once
assert [count for _, count in seen] == list(range(15)), seen
assert [loaded for loaded, _ in seen] == [1, 2, 3, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11], seen
assert driver._loaded == 11
assert [x.grid for x in launched] == 12 * [(64, 1, 1)] + 3 * [(128, 1, 1)]
"""


def test_a_launch_is_compiled_and_loaded_before_peers_hear_of_it_and_once():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    done = subprocess.run([sys.executable, "-c", PRETENDED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
