"""How the ranks of one host come to map one another's GPU memory, or all learn that one of them can't.

Memory comes from the driver itself, not from PyTorch's allocator, whose blocks may be mapped otherwise tomorrow (sleep
modes, expandable segments). It is kept until the process ends, since peers write to it.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any, cast

import torch

from rl_comm.header import Call
from rl_comm.mover import GlooMover
from rl_comm.peer_memory import SLOT_BYTES, PeerMemory, areas_of, kernels

_HANDLE_BYTES = 64
_NAME_BYTES = 64
# of the driver's CUdevice_P2PAttribute
_ACCESS, _ATOMICS = 2, 3
# of the management library's nvmlGpuP2PCapsIndex_t, whose status 0 is OK
_NVML_WRITE, _NVML_ATOMICS = 1, 3
_PEER_ACCESS = 1
# of what a rank says of itself
_SAID_BYTES = 255
_STEPS = ("able", "handle", "opened", "closed", "freed")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class Driver:
    """The few functions of the CUDA driver that are needed, on the current context."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
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
            # a GPU that this process was not shown (CUDA_VISIBLE_DEVICES)
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


def _driver() -> Driver:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise OSError("no NVIDIA GPU")
    if kernels() is None:
        raise OSError("no Triton")
    return Driver()


class _Unreachable(Exception):
    """Some rank's memory is none to share; raised on every rank alike."""


class _Joining:
    """The steps by which the ranks of a group come to map one another's memory; each tells its peers what it has."""

    def __init__(self, gloo: GlooMover, driver: Callable[[], Driver], timeout_s: float) -> None:
        self._gloo, self._make, self._driver, self._timeout_s = gloo, driver, cast(Driver, None), timeout_s
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
        self._mine = self._driver.allocate(4 * areas_of(self._gloo.world_size)[-1].end)
        return self._driver.handle(self._mine)

    def _open(self, handles: list[bytes]) -> PeerMemory:
        for rank, handle in enumerate(handles):
            if rank != self._gloo.rank:
                self._opened[rank] = self._driver.open(handle)
        addresses = [self._opened.get(rank, self._mine) for rank in range(len(handles))]
        return PeerMemory(addresses, self._gloo.rank, self._driver.device, self._timeout_s)

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


def connect(gloo: GlooMover, timeout_s: float, driver: Callable[[], Driver] = _driver) -> PeerMemory | str:
    """Memory of each rank's current GPU that all ranks of ``gloo`` reach; on every rank why not, if one can't.

    Args:
        timeout_s: see ``PeerMemory``.
        driver: makes each rank's; another one in tests.
    """
    if gloo.world_size not in SLOT_BYTES:
        return f"a world of {gloo.world_size}"
    try:
        return _Joining(gloo, driver, timeout_s).join()
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
