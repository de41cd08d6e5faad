"""GPU memory that the ranks of one host write to directly, and calls through it; the kernels are ``triton_peer``'s.

Small messages cost NCCL more than they take: a call here is one launch, which moves the parts and adds them. Memory
comes from the driver itself, not from PyTorch's allocator, whose blocks may be mapped otherwise tomorrow (sleep modes,
expandable segments). It is kept until the process ends, since peers write to it.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

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
_PEER_ACCESS = 1
_MOST_KEPT = 4096


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def words_of(world_size: int) -> tuple[int, int]:
    """(int32 words of one rank's slot, int32 words of an allocation); see ``triton_peer``."""
    slot = SLOT_BYTES[world_size] // 4
    return slot, 2 * world_size * slot + (world_size + 1) * PROGRAMS


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
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
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
        self._call("cuDeviceGetByPCIBusId", ctypes.byref(other), peer.encode())
        for wanted in (_ACCESS, _ATOMICS):
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(found), wanted, device, other)
            if not found.value:
                return False
        return True


@cache
def _kernels() -> Any | None:
    try:
        from rl_comm import triton_peer
    except ImportError:
        return None
    return triton_peer


class PeerMemory:
    """Calls of one group through its ranks' memory, on the current stream; peers are seen to make the same call before.

    Args:
        addresses: of every rank's allocation as this process maps it, rank 0 first.
        device: of this rank.
    """

    name = "peer_memory"

    def __init__(self, addresses: list[int], rank: int, device: torch.device) -> None:
        self.rank, self.world_size = rank, len(addresses)
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(device)
        self._slot, _ = words_of(self.world_size)
        self._stream: Any = None
        self._launches: dict[tuple[str, int, torch.dtype], Prepared] = {}

    def fits(self, payload: torch.Tensor) -> bool:
        """Whether ``payload`` (uint8 [n]) can be moved in one call: whole words, no more than a slot."""
        size = payload.numel()
        return 0 < size <= 4 * self._slot and size % 4 == 0 and payload.data_ptr() % 4 == 0

    def sum(self, payload: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """The bytes of every rank's fp32 [n] -> [n]: the tree over ranks, rounded once to ``out_dtype``."""
        words = payload.view(torch.int32)
        out = torch.empty(words.numel(), dtype=out_dtype, device=payload.device)
        self._launch("peer_sum_kernel", words, out)
        return out

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n]."""
        out = payload.new_empty(self.world_size, payload.numel())
        self._launch("peer_gather_kernel", payload.view(torch.int32), out.view(torch.int32))
        return out

    def _launch(self, kernel: str, words: torch.Tensor, out: torch.Tensor) -> None:
        key = (kernel, words.numel(), out.dtype)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_KEPT:
                self._launches.clear()
            fixed = {
                "n": words.numel(), "SLOT": self._slot, "PROGRAMS": PROGRAMS, "RANK": self.rank,
                "WORLD": self.world_size, "BLOCK": _BLOCK,
            }  # fmt: skip
            launch = Prepared(getattr(_kernels(), kernel), (PROGRAMS,), fixed, num_warps=8)
            self._launches[key] = launch
        self._order()
        launch(words, out, self._addresses)

    def _order(self) -> None:
        """Calls run one after the other, whatever streams they are made on: they use the same slots in turn."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def _driver() -> Driver | None:
    if not torch.cuda.is_available() or torch.version.hip is not None or _kernels() is None:
        return None
    try:
        return Driver()
    except OSError:
        return None


def connect(gloo: GlooMover, driver: Callable[[], Driver | None] = _driver) -> PeerMemory | None:
    """Memory of each rank's current GPU that all ranks of ``gloo`` reach; None, on every rank, if one can't."""
    known, device, bus = driver() if gloo.world_size in SLOT_BYTES else None, 0, ""
    try:
        device, bus = known.current() if known is not None else (0, "")
    except OSError:
        known = None
    said = [row.decode() for row in _exchange(gloo, "able", f"{_host()} {bus}".encode() if known is not None else b"")]
    # ranks that share a GPU wait for one another where only one of them runs
    if known is None or not all(said) or len(set(said)) < len(said) or len({row.split()[0] for row in said}) > 1:
        return None
    mine, handle = 0, b""
    try:
        if all(known.reaches(device, row.split()[1]) for rank, row in enumerate(said) if rank != gloo.rank):
            mine = known.allocate(4 * words_of(gloo.world_size)[1])
            handle = known.handle(mine)
    except OSError:
        handle = b""
    handles = _exchange(gloo, "handle", handle)
    addresses: dict[int, int] = {}
    try:
        if all(handles):
            for rank, row in enumerate(handles):
                addresses[rank] = mine if rank == gloo.rank else known.open(row)
    except OSError:
        # the peers must know
        addresses = {rank: found for rank, found in addresses.items() if rank != gloo.rank}
    if all(_exchange(gloo, "opened", b"1" if len(addresses) == gloo.world_size else b"")):
        return PeerMemory([addresses[rank] for rank in range(gloo.world_size)], gloo.rank, known.device)
    for rank, address in addresses.items():
        if rank != gloo.rank:
            known.close(address)
    # nobody frees what a peer has open
    _exchange(gloo, "closed", b"")
    if mine:
        known.free(mine)
    return None


def _host() -> str:
    """Names the kernel that runs: memory of another host can't be mapped."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def _exchange(gloo: GlooMover, step: str, said: bytes) -> list[bytes]:
    """What every rank says, at most 255 bytes."""
    block = torch.zeros(256, dtype=torch.uint8)
    block[0] = len(said)
    if said:
        block[1 : 1 + len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    call = Call("barrier", torch.uint8, torch.uint8, ("able", "handle", "opened", "closed").index(step), (256,))
    return [bytes(row[1 : 1 + row[0]]) for row in gloo.gather(call, block).contiguous().tolist()]
