"""How ranks come to map one another's memory, or learn that one of them can't: drivers that are none, among threads."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from rl_comm import peer_joining, peer_memory
from rl_contract.testing import ThreadRank, on_ranks


class Gloo:
    """As much of a GlooMover as ``connect`` uses, among threads."""

    def __init__(self, rank):
        self._rank, self.rank, self.world_size = rank, rank.rank, rank.world_size

    def gather(self, call, payload):
        return torch.stack(self._rank.everyone(payload))


class Memory:
    """The driver of a rank, whose memory is numbers; ``fails`` names the function that ends with ``error``."""

    device = torch.device("cpu")

    def __init__(self, rank, fails=None, bus=None, error=OSError):
        self.rank, self.fails, self.bus = rank, fails, f"0000:{rank:02}:00.0" if bus is None else bus
        self.open_now, self.allocated, self._error = set(), set(), error
        if fails == "device":
            self.device = torch.device("cuda:99")

    def _may(self, name):
        if self.fails == name:
            raise self._error(f"{name}\nis not to be had {'at all' * 90}")

    def made(self):
        self._may("driver")
        return self

    def current(self):
        self._may("current")
        return self.rank, self.bus

    def reaches(self, device, peer):
        assert device == self.rank
        assert peer != self.bus
        self._may("reaches")
        return self.fails != "far"

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
        self._may("close")
        self.open_now.remove(address - 1_000_000)

    def free(self, address):
        self._may("free")
        self.allocated.clear()


def connected(world, odd=None, **changes):
    """What each rank gets, and its driver; rank ``odd``'s differs."""

    def rank(mine: ThreadRank):
        memory = Memory(mine.rank, **(changes if mine.rank == odd else {}))
        return peer_joining.connect(Gloo(mine), 60.0, memory.made), memory

    return on_ranks(world, rank, timeout_s=20)


def test_every_rank_maps_every_other_one():
    for rank, (peers, memory) in enumerate(connected(4)):
        mapped = [4096 * (rank + 1) if other == rank else 1_000_001 + other for other in range(4)]
        one, two = peer_memory.areas_of(4)
        assert [x.tolist() for x in peers._areas.values()] == [mapped, [x + 4 * one.end for x in mapped]]
        assert memory.allocated == {4 * two.end}
        assert peers._limit == 60_000_000_000
        # slots, flags and numbers of calls, one behind the other
        for area, begin in ((one, 0), (two, one.end)):
            assert area.begin == begin
            assert 0 <= area.end - begin - (8 * area.slot + 5 * area.programs) < 16
            assert area.slot % (area.programs * area.block) == 0


@pytest.mark.parametrize("error", [OSError, RuntimeError, AttributeError, UnicodeDecodeError])
@pytest.mark.parametrize("fails", ["driver", "current", "reaches", "far", "allocate", "handle", "open", "device"])
def test_one_rank_that_cannot_leaves_all_without_and_nothing_behind(fails, error):
    def raised(text):
        return error("utf8", text.encode(), 0, 1, "odd") if error is UnicodeDecodeError else error(text)

    got = connected(4, odd=2, fails=fails, error=raised)
    assert len({said for said, _ in got}) == 1
    said = got[0][0]
    assert said.startswith("rank 2 has ")
    assert "\n" not in said
    assert (fails == "device") or (error.__name__ in said) or (fails == "far" and "reach the memory of rank 0" in said)
    for _, memory in got:
        assert not memory.open_now
        assert not memory.allocated


@pytest.mark.parametrize("fails", ["close", "free"])
def test_what_cannot_be_given_back_keeps_nobody_waiting(fails, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(peer_joining, "PeerMemory", full)
    got = connected(4, odd=2, fails=fails)
    assert {said for said, _ in got} == {"rank 0 has OutOfMemoryError: full"}
    # a peer may have it open still
    assert [bool(memory.allocated) for _, memory in got] == (
        [True] * 4 if fails == "close" else [False, False, True, False]
    )


def test_ranks_without_a_gpu_of_their_own_or_of_several_hosts_are_without(monkeypatch):
    assert {said for said, _ in connected(4, odd=1, bus="0000:03:00.0")} == {"ranks 1, 3 share a GPU"}
    hosts = itertools.count()
    monkeypatch.setattr(peer_joining, "_host", lambda: f"host{next(hosts)}")
    assert {said for said, _ in connected(2)} == {"the ranks are on several hosts"}


def test_a_process_without_a_gpu_says_so():
    if not torch.cuda.is_available():
        got = on_ranks(2, lambda mine: peer_joining.connect(Gloo(mine), 60.0))
        assert got == ["rank 0 has OSError: no NVIDIA GPU"] * 2


def test_worlds_without_slots_have_none():
    assert [peers for peers, _ in connected(1)] == ["a world of 1"]


def test_memory_is_zero_before_peers_know_of_it_and_is_given_back_where_it_cannot_be():
    done, fails = [], None

    def function(name):
        def call(*arguments):
            done.append(name)
            if name == "cuMemAlloc_v2":
                arguments[0]._obj.value = 4096
            return 700 if name == fails else 0

        return call

    driver = peer_joining.Driver.__new__(peer_joining.Driver)
    names = ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuCtxSynchronize"]
    driver._library = SimpleNamespace(**{name: function(name) for name in [*names, "cuMemFree_v2"]})
    assert driver.allocate(64) == 4096
    assert done == names
    for fails in names[1:]:
        done.clear()
        with pytest.raises(OSError, match=f"{fails} ended with CUDA error 700"):
            driver.allocate(64)
        assert done[-1] == "cuMemFree_v2"


class Management:
    """The library that knows every GPU of a host: ``links`` of pairs, and the functions as it names them."""

    def __init__(self, links, fails=""):
        self.links, self.fails, self.calls = links, fails, []

    def __getattr__(self, name):
        def function(*given):
            self.calls.append(name)
            if name == self.fails:
                return 999
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                given[1]._obj.value = int(given[0].decode().split(":")[1])
            if name == "nvmlDeviceGetP2PStatus":
                given[3]._obj.value = self.links.get((given[0].value, given[1].value, given[2]), 1)
            return 0

        return function


@pytest.mark.parametrize(
    ("links", "found"),
    [({}, False), ({(3, 7, 1): 0}, False), ({(3, 7, 3): 0}, False), ({(3, 7, 1): 0, (3, 7, 3): 0}, True)],
)
def test_gpus_that_a_process_was_not_shown_are_asked_about_by_their_place(links, found, monkeypatch):
    library = Management(links)
    monkeypatch.setattr(peer_joining.ctypes, "CDLL", lambda name: library)
    assert peer_joining.linked("0000:03:00.0", "0000:07:00.0") == found
    assert (library.calls[0], library.calls[-1]) == ("nvmlInit_v2", "nvmlShutdown")


def test_a_library_that_fails_is_named_and_closed(monkeypatch):
    library = Management({}, fails="nvmlDeviceGetP2PStatus")
    monkeypatch.setattr(peer_joining.ctypes, "CDLL", lambda name: library)
    with pytest.raises(OSError, match="nvmlDeviceGetP2PStatus ended with NVML error 999"):
        peer_joining.linked("0000:03:00.0", "0000:07:00.0")
    assert library.calls[-1] == "nvmlShutdown"
