"""Sums and gathers through peer memory without a GPU: interpreted kernels of several processes share a file's pages."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_comm import peer_memory
from rl_contract.testing import ThreadRank, on_ranks

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
    if call % 3 == 2:
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
@pytest.mark.parametrize("name", ["peer_sum_kernel", "peer_gather_kernel"])
def test_kernels_compile(arch, world, rank, name):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_comm import triton_peer

    kernel = getattr(triton_peer, name)
    constants = {"SLOT": peer_memory.words_of(world)[0], "PROGRAMS": peer_memory.PROGRAMS, "RANK": rank}
    constants |= {"WORLD": world, "BLOCK": 2048}
    out = "*bf16" if name == "peer_sum_kernel" else "*i32"
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
        assert text["amdgcn"].count("buffer_wbl2 sc0 sc1") >= world - 1
        return
    lines = [line.strip() for line in text["ptx"].splitlines()]
    assert sum("release" in line and "sys" in line for line in lines) == world - 1
    assert sum("acquire" in line and "sys" in line for line in lines) == world - 1
    # 16 bytes at a time, also to peers, and peers' parts never from a processor's own cache
    assert sum("st.global.v4" in line for line in lines) >= 2 * (world - 1)
    assert sum("ld.global.cg.v4" in line for line in lines) == 2 * (world - 1)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_come_when_they_like_get_the_trees_bits(tmp_path, world):
    assert interpreted(tmp_path, world) == [0] * world


def test_another_order_of_the_same_parts_shows(tmp_path):
    assert min(interpreted(tmp_path, 4, order="chain")) > 100


class Gloo:
    """As much of a GlooMover as ``connect`` uses, among threads."""

    def __init__(self, rank):
        self._rank, self.rank, self.world_size = rank, rank.rank, rank.world_size

    def gather(self, call, payload):
        return torch.stack(self._rank.everyone(payload))


class Memory:
    """The driver of a rank, whose memory is numbers; ``fails`` names the function that ends with an error."""

    device = torch.device("cpu")

    def __init__(self, rank, fails=None, bus=None):
        self.rank, self.fails, self.bus = rank, fails, f"0000:{rank:02}:00.0" if bus is None else bus
        self.open_now, self.allocated = set(), set()

    def _may(self, name):
        if self.fails == name:
            raise OSError(name)

    def current(self):
        self._may("current")
        return self.rank, self.bus

    def reaches(self, device, peer):
        assert device == self.rank
        assert peer != self.bus
        return self.fails != "reaches"

    def allocate(self, size):
        self._may("allocate")
        self.allocated.add(size)
        return 4096 * (self.rank + 1)

    def handle(self, address):
        self._may("handle")
        return bytes([address // 4096]) * 64

    def open(self, handle):
        self._may("open")
        self.open_now.add(handle[0])
        return 1_000_000 + handle[0]

    def close(self, address):
        self.open_now.remove(address - 1_000_000)

    def free(self, address):
        self.allocated.clear()


def connected(world, odd=None, **changes):
    """What each rank gets, and its driver; rank ``odd``'s differs."""

    def rank(mine: ThreadRank):
        memory = Memory(mine.rank, **(changes if mine.rank == odd else {}))
        return peer_memory.connect(Gloo(mine), lambda: None if memory.bus == "none" else memory), memory

    return on_ranks(world, rank)


def test_every_rank_maps_every_other_one():
    for rank, (peers, memory) in enumerate(connected(4)):
        mapped = [4096 * (rank + 1) if other == rank else 1_000_001 + other for other in range(4)]
        assert peers._addresses.tolist() == mapped
        slot, words = peer_memory.words_of(4)
        assert memory.allocated == {4 * words}
        assert words == 8 * slot + 5 * peer_memory.PROGRAMS


@pytest.mark.parametrize("fails", ["current", "reaches", "allocate", "handle", "open"])
def test_one_rank_that_cannot_leaves_all_without_and_nothing_behind(fails):
    for peers, memory in connected(4, odd=2, fails=fails):
        assert peers is None
        assert not memory.open_now
        assert not memory.allocated


@pytest.mark.parametrize("bus", ["none", "0000:00:00.0"])
def test_a_rank_without_a_gpu_of_its_own_leaves_all_without(bus):
    assert [peers for peers, _ in connected(2, odd=1, bus=bus)] == [None, None]


def test_worlds_without_slots_have_none():
    assert [peers for peers, _ in connected(1)] == [None]


def test_what_fits_is_whole_words_up_to_a_slot():
    peers = peer_memory.PeerMemory([0] * 8, 0, torch.device("cpu"))
    room = torch.empty((2 << 20) + 16, dtype=torch.uint8)
    first = -room.data_ptr() % 4
    for size, found in ((0, False), (4, True), (6, False), (2 << 20, True), ((2 << 20) + 4, False)):
        assert peers.fits(room[first : first + size]) == found
    assert not peers.fits(room[first + 2 : first + 6])
