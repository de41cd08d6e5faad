"""GPU memory that the ranks of one host write to directly, and calls through it; the kernels are ``triton_peer``'s.

Small messages cost NCCL more than they take: a call here is one launch, which moves the parts and adds them. Memory
comes from the driver itself, not from PyTorch's allocator, whose blocks may be mapped otherwise tomorrow (sleep modes,
expandable segments). It is kept until the process ends, since peers write to it.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from rl_comm.mover import Call, GlooMover
from rl_contract.triton_launch import Prepared

# of one rank's part in a call, by world size: an allocation is 32 MiB
SLOT_BYTES = {2: 8 << 20, 4: 4 << 20, 8: 2 << 20}
PROGRAMS = 64
_BLOCK = 2048
_HANDLE_BYTES = 64
_NAME_BYTES = 64
# of the driver's CUdevice_P2PAttribute
_ACCESS, _ATOMICS = 2, 3
# of the management library's nvmlGpuP2PCapsIndex_t, whose status 0 is OK
_NVML_WRITE, _NVML_ATOMICS = 1, 3
_PEER_ACCESS = 1
_MOST_KEPT = 4096
# of what a rank says of itself
_SAID_BYTES = 255
_STEPS = ("able", "handle", "opened", "closed", "freed")
# of what a prepared launch is given
_ALIGNMENT = 16


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def words_of(world_size: int) -> tuple[int, int]:
    """(int32 words of one rank's slot, int32 words of an allocation); see ``triton_peer``."""
    slot = SLOT_BYTES[world_size] // 4
    return slot, 2 * world_size * slot + (world_size + 1) * PROGRAMS


class Driver:
    """The few functions of the CUDA driver that are needed, on the current context.

    Args:
        hidden: also reach GPUs that this process was not shown (``CUDA_VISIBLE_DEVICES``).
    """

    def __init__(self, hidden: bool = False) -> None:
        self._library, self._hidden = ctypes.CDLL("libcuda.so.1"), hidden
        self.device = torch.device("cuda", torch.cuda.current_device())
        # the context must be there
        torch.zeros(1, device=self.device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} ended with CUDA error {status}")

    def allocate(self, size: int) -> int:
        """Address of ``size`` zero bytes."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        try:
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            # zeros that came late, behind what the GPU is busy with, would take peers' flags away
            self._call("cuCtxSynchronize")
        except OSError:
            self.free(address.value)
            raise
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        found = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(address))
        return ctypes.string_at(ctypes.byref(found), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        given, address = _Handle.from_buffer_copy(handle), ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def current(self) -> tuple[int, str]:
        """The current device, and its address on the bus, by which peers know it."""
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetPCIBusId", name, _NAME_BYTES, device)
        return device.value, name.value.decode()

    def reaches(self, device: int, peer: str) -> bool:
        """Whether ``device`` writes to ``peer``'s memory and changes it atomically, as over NVLink."""
        other, found = ctypes.c_int(), ctypes.c_int()
        try:
            self._call("cuDeviceGetByPCIBusId", ctypes.byref(other), peer.encode())
        except OSError:
            if not self._hidden:
                raise
            return linked(self.current()[1], peer)
        for wanted in (_ACCESS, _ATOMICS):
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(found), wanted, device, other)
            if not found.value:
                return False
        return True


def linked(mine: str, peer: str) -> bool:
    """Whether one GPU writes to the other's memory and changes it atomically, by the management library.

    It knows GPUs that a process was not shown.
    """
    library = ctypes.CDLL("libnvidia-ml.so.1")

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(library, name)(*arguments):
            raise OSError(f"{name} ended with NVML error {status}")

    call("nvmlInit_v2")
    try:
        handles = [ctypes.c_void_p() for _ in range(2)]
        for bus, handle in zip((mine, peer), handles):
            call("nvmlDeviceGetHandleByPciBusId_v2", bus.encode(), ctypes.byref(handle))
        found = ctypes.c_int()
        for wanted in (_NVML_WRITE, _NVML_ATOMICS):
            call("nvmlDeviceGetP2PStatus", *handles, wanted, ctypes.byref(found))
            if found.value:
                return False
    finally:
        library.nvmlShutdown()
    return True


@cache
def _kernels() -> Any | None:
    try:
        from rl_comm import triton_peer
    except ImportError:
        return None
    return triton_peer


class PeerMemory:
    """Calls of one group through its ranks' memory, on the current stream.

    Each is given ``agree``, which returns once the peers are seen to make the same call. A kernel waits for its peers'
    without end, so whatever may fail on one rank alone is done before. Calls of one communicator that are captured in
    graphs run one after the other if they are captured on one stream, and replays and eager calls if the caller's
    streams wait for one another.

    Args:
        addresses: of every rank's allocation as this process maps it, rank 0 first.
        device: of this rank.
        two_steps: whether sums of more than a slot come here, too.
    """

    name = "peer_memory"

    def __init__(self, addresses: list[int], rank: int, device: torch.device, two_steps: bool = False) -> None:
        self.rank, self.world_size, self.device, self.two_steps = rank, len(addresses), device, two_steps
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(device)
        self._slot, _ = words_of(self.world_size)
        self._stream: Any = None
        self._launches: dict[tuple[str, int, torch.dtype], Prepared] = {}

    def fits(self, size: int) -> bool:
        """Whether ``size`` bytes of each rank go in one call: whole words, no more than a slot.

        Ranks that decided otherwise would wait for one another, so only what they agree on is asked.
        """
        return 0 < size <= 4 * self._slot and size % 4 == 0

    def sum(self, payload: torch.Tensor, out_dtype: torch.dtype, agree: Callable[[], None]) -> torch.Tensor:
        """The bytes of every rank's fp32 [n] -> [n]: the tree over ranks, rounded once to ``out_dtype``."""
        words = _words(payload)
        out = torch.empty(words.numel(), dtype=out_dtype, device=payload.device)
        self._launch("peer_sum_kernel", words, out, agree)
        return out

    def fits_in_steps(self, size: int) -> bool:
        """Whether the sum of ``size`` bytes of each rank, of any number of slots, can be made in two steps."""
        return self.two_steps and size > 0 and size % (4 * self.world_size) == 0

    def sum_in_steps(self, payload: torch.Tensor, out_dtype: torch.dtype, agree: Callable[[], None]) -> torch.Tensor:
        """As ``sum``; each rank adds its part of the elements and sends it round, a slot's worth by a launch."""
        words = _words(payload)
        out = torch.empty(words.numel(), dtype=out_dtype, device=payload.device)
        most = self._slot * self.world_size
        parts = [(words[i : i + most], out[i : i + most]) for i in range(0, words.numel(), most)]
        # what may fail comes before the first kernel that waits
        self._launch_all(
            [("peer_reduce_kernel", part, into, part.numel() // self.world_size) for part, into in parts], agree
        )
        return out

    def gather(self, payload: torch.Tensor, agree: Callable[[], None]) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n]."""
        words = _words(payload)
        out = payload.new_empty(self.world_size, payload.numel())
        self._launch("peer_gather_kernel", words, out.view(torch.int32), agree)
        return out

    def _launch(self, kernel: str, words: torch.Tensor, out: torch.Tensor, agree: Callable[[], None]) -> None:
        self._launch_all([(kernel, words, out, words.numel())], agree)

    def _launch_all(
        self, launches: list[tuple[str, torch.Tensor, torch.Tensor, int]], agree: Callable[[], None]
    ) -> None:
        """Each (kernel, words, out, n), one after the other, of one call."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            # peers' memory is mapped for this device alone, and Triton launches on the current one
            with torch.cuda.device(self.device):
                return self._launch_all(launches, agree)
        prepared = [(self._prepared(*launch), launch) for launch in launches]
        agree()
        self._order()
        for go, (_, words, out, _) in prepared:
            go(words, out, self._addresses)

    def _prepared(self, kernel: str, words: torch.Tensor, out: torch.Tensor, n: int) -> Prepared:
        key = (kernel, n, out.dtype)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_KEPT:
                self._launches.clear()
            fixed = {
                "n": n, "SLOT": self._slot, "PROGRAMS": PROGRAMS, "RANK": self.rank, "WORLD": self.world_size,
                "BLOCK": _BLOCK,
            }  # fmt: skip
            function = getattr(_kernels(), kernel)
            compiled = function.warmup(words, out, self._addresses, *fixed.values(), grid=(PROGRAMS,), num_warps=8)
            # this loads it, too
            getattr(compiled, "run", None)
            launch = Prepared(function, (PROGRAMS,), fixed, num_warps=8)
            self._launches[key] = launch
        return launch

    def _order(self) -> None:
        """Calls run one after the other, whatever streams they are made on: they use the same slots in turn."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def _words(payload: torch.Tensor) -> torch.Tensor:
    """The bytes (uint8 [4 n]) as int32 [n], where a launch finds them aligned as at first; a copy if need be."""
    if payload.data_ptr() % _ALIGNMENT or payload.storage_offset() % 4:
        payload = payload.clone()
    return payload.view(torch.int32)


def _driver(more: bool) -> Driver:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise OSError("no NVIDIA GPU")
    if _kernels() is None:
        raise OSError("no Triton")
    return Driver(more)


class _Unreachable(Exception):
    """Some rank's memory is none to share; raised on every rank alike."""


class _Joining:
    """The steps by which the ranks of a group come to map one another's memory; each tells its peers what it has."""

    def __init__(self, gloo: GlooMover, driver: Callable[[], Driver], two_steps: bool) -> None:
        self._gloo, self._make, self._driver, self._two_steps = gloo, driver, cast(Driver, None), two_steps
        self._device, self._mine = 0, 0
        self._opened: dict[int, int] = {}

    def join(self) -> PeerMemory:
        names = self._together("able", self._name)
        if len({host for host, _ in map(bytes.split, names)}) > 1:
            raise _Unreachable("the ranks are on several hosts")
        shared = [str(rank) for rank, name in enumerate(names) if names.count(name) > 1]
        if shared:
            # where only one of them runs, it would wait for the others without end
            raise _Unreachable(f"ranks {', '.join(shared)} share a GPU")
        try:
            handles = self._together("handle", lambda: self._allocate(names))
            made: list[PeerMemory] = []
            self._together("opened", lambda: made.append(self._open(handles)))
            return made[0]
        except _Unreachable:
            self._leave()
            raise

    def _name(self) -> bytes:
        self._driver = self._make()
        self._device, bus = self._driver.current()
        return f"{_host()} {bus}".encode()

    def _allocate(self, names: list[bytes]) -> bytes:
        for rank, name in enumerate(names):
            if rank != self._gloo.rank and not self._driver.reaches(self._device, name.split()[1].decode()):
                raise OSError(f"its GPU does not reach the memory of rank {rank}")
        self._mine = self._driver.allocate(4 * words_of(self._gloo.world_size)[1])
        return self._driver.handle(self._mine)

    def _open(self, handles: list[bytes]) -> PeerMemory:
        for rank, handle in enumerate(handles):
            if rank != self._gloo.rank:
                self._opened[rank] = self._driver.open(handle)
        addresses = [self._opened.get(rank, self._mine) for rank in range(len(handles))]
        return PeerMemory(addresses, self._gloo.rank, self._driver.device, self._two_steps)

    def _leave(self) -> None:
        def close() -> None:
            for address in self._opened.values():
                self._driver.close(address)

        def free() -> None:
            if self._mine:
                self._driver.free(self._mine)

        try:
            self._together("closed", close)
            # nobody frees what a peer has open
            self._together("freed", free)
        except _Unreachable:
            # it is kept, then
            return

    def _together(self, step: str, act: Callable[[], bytes | None]) -> list[bytes]:
        """What ``act`` gives, rank 0 first; whatever it raises on one rank, all ranks learn of, none is waited for."""
        try:
            said = b"+" + (act() or b"")
        except Exception as error:
            said = b"-" + " ".join(f"{type(error).__name__}: {error}".split()).encode()
        rows = _exchange(self._gloo, step, said[:_SAID_BYTES])
        for rank, row in enumerate(rows):
            if row[:1] != b"+":
                raise _Unreachable(f"rank {rank} has {row[1:].decode(errors='replace')}")
        return [row[1:] for row in rows]


def connect(gloo: GlooMover, driver: Callable[[], Driver] | None = None, *, more: bool = False) -> PeerMemory | str:
    """Memory of each rank's current GPU that all ranks of ``gloo`` reach; on every rank why not, if one can't.

    Args:
        driver: makes each rank's; another one in tests.
        more: also reach GPUs that a rank was not shown, and add what is larger than a slot.
    """
    if gloo.world_size not in SLOT_BYTES:
        return f"a world of {gloo.world_size}"
    try:
        return _Joining(gloo, driver or (lambda: _driver(more)), more).join()
    except _Unreachable as problem:
        return str(problem)


def _host() -> str:
    """Names the kernel that runs: memory of another host can't be mapped."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def _exchange(gloo: GlooMover, step: str, said: bytes) -> list[bytes]:
    """What every rank says, at most ``_SAID_BYTES``."""
    block = torch.zeros(_SAID_BYTES + 1, dtype=torch.uint8)
    block[0] = len(said)
    if said:
        block[1 : 1 + len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    call = Call("barrier", torch.uint8, torch.uint8, _STEPS.index(step), tuple(block.shape))
    return [bytes(row[1 : 1 + row[0]]) for row in gloo.gather(call, block).contiguous().tolist()]
