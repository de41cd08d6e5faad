"""Moving bytes between ranks of one host through shared memory; as in ``mover``, nothing here adds.

Each rank owns a slot in each of two buffers, used in turn. In one round a rank writes its slot, posts a semaphore to
every peer, waits for one of every peer, and reads. A rank enters round k + 2, where it writes over what it wrote in
round k, only after every peer has posted round k + 1, hence finished reading round k. A waiting rank sleeps, so many
ranks can share a core.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from rl_comm.header import HEAD_BYTES, Call, check_heads, head_of
from rl_comm.mover import GlooMover, Refusals, gathered_as_one, gathered_into

SLOT_BYTES = 1 << 18
_SEMAPHORE_BYTES = 64
_PATH_BYTES = 256
# how often a waiting rank looks whether the peer it waits for still lives
_LOOK_SECONDS = 2


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc if hasattr(libc, "sem_timedwait") else None
    except OSError:
        return None


@dataclass(frozen=True)
class Shared:
    """One mapping that every rank of a group sees, whose name is gone; ``pids`` where they mean the same to all."""

    memory: mmap.mmap
    pids: list[int] | None


def share(gloo: GlooMover, size: int) -> Shared | None:
    """``size`` zero bytes that all ranks share, or None if one can't reach them; the same answer on every rank."""
    path, memory = "", None
    if gloo.rank == 0:
        path = _create(size)
    encoded = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    encoded[: len(path.encode())] = torch.frombuffer(bytearray(path.encode()), dtype=torch.uint8) if path else 0
    path = bytes(gloo.broadcast(_call("path"), encoded, 0).tolist()).rstrip(b"\0").decode()
    if path:
        memory = _open(path, size)
    # a world that spans hosts, or containers with their own shared memory, sees a rank without it
    mine = torch.tensor([os.getpid() if memory is not None else 0, _pid_namespace()])
    pids, namespaces = gloo.gather(_call("pid"), mine.view(torch.uint8)).contiguous().view(torch.int64).T.tolist()
    if gloo.rank == 0 and path:
        # whoever tidies up there may have been first
        with suppress(OSError):
            os.unlink(path)
    if memory is None or 0 in pids:
        return None
    return Shared(memory, pids if len(set(namespaces)) == 1 else None)


def connect(gloo: GlooMover, timeout_s: float) -> "SharedMemoryMover | None":
    """A mover over shared memory if every rank can reach it, else None; the same answer on every rank."""
    world = gloo.world_size
    libc = _libc()
    # a rank without semaphores must be known to all, so it asks for nothing that could be shared
    able = gloo.gather(_call("able"), torch.tensor([libc is not None]).view(torch.uint8))
    if libc is None or not bool(able.all()):
        return None
    shared = share(gloo, world * world * _SEMAPHORE_BYTES + 2 * world * SLOT_BYTES + world)
    if shared is None:
        return None
    try:
        mover = SharedMemoryMover(gloo, shared.memory, libc, shared.pids, timeout_s)
    except OSError:
        mover = None
    ready = gloo.gather(_call("ready"), torch.tensor([mover is not None]).view(torch.uint8))
    return mover if bool(ready.all()) else None


def look(peer: int, pids: list[int] | None, give_up: float, timeout_s: float) -> None:
    """Raise if ``peer`` has ended or the time to wait for it is over."""
    if pids is not None and _has_ended(pids[peer]):
        raise RuntimeError(f"rank {peer} (process {pids[peer]}) has ended; restart the group")
    if time.monotonic() > give_up:
        raise RuntimeError(
            f"rank {peer} did not make this call within {timeout_s:g} s; "
            "every rank must make every call; look at what it does instead"
        )


def left(peer: int) -> RuntimeError:
    return RuntimeError(
        f"rank {peer} makes no calls any more since one of its own has failed, whose error says why; "
        "make new communicators on all ranks, or restart the group"
    )


def _call(step: str) -> Call:
    return Call("barrier", torch.uint8, torch.uint8, ("path", "pid", "ready", "able").index(step), ())


def _pid_namespace() -> int:
    # process ids of another namespace say nothing here
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return -os.getpid()


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            # the state follows the name, which may hold anything but ends at the last parenthesis
            return f.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _create(size: int) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix="rl-comm-", dir="/dev/shm")
    except OSError:
        return ""
    try:
        # room is taken now: a full file system is an answer here and a crash at the first write
        os.posix_fallocate(handle, 0, size)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(handle)
    return path


def _open(path: str, size: int) -> mmap.mmap | None:
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(handle, size)
    except (OSError, ValueError):
        # no room to map it, or another's file
        return None
    finally:
        os.close(handle)


class SharedMemoryMover(Refusals):
    """The interface of ``GlooMover`` over one shared mapping, whose name is gone: nothing outlives the ranks."""

    name = "shared_memory"

    def __init__(
        self, gloo: GlooMover, memory: mmap.mmap, libc: ctypes.CDLL, pids: list[int] | None, timeout_s: float
    ) -> None:
        super().__init__()
        self.rank, self.world_size = gloo.rank, gloo.world_size
        self._memory, self._libc, self._pids, self._timeout_s = memory, libc, pids, timeout_s
        world = self.world_size
        # calls write to it, in whatever mode they are made
        with torch.inference_mode(False):
            raw = torch.frombuffer(memory, dtype=torch.uint8)
            self._buffers = raw[world * world * _SEMAPHORE_BYTES : -world].view(2, world, SLOT_BYTES)
        self._base = raw.data_ptr()
        # a byte a rank, not 0 once it has left the calls for good
        self._left = memoryview(memory)[-world:]
        self._round = 0
        self._lock = threading.Lock()
        self._peers = [(self.rank + i) % world for i in range(1, world)]
        for peer in self._peers:
            # the receiver makes the semaphore; nobody posts before every rank is here
            if libc.sem_init(self._semaphore(peer, self.rank), 1, 0):
                raise OSError(ctypes.get_errno(), "no shared semaphore")

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n], once all are seen to make the same call."""
        with self._lock:
            room = SLOT_BYTES - HEAD_BYTES
            n = payload.numel()
            slots = self._exchange(payload[:room], call)
            if n <= room:
                return slots[:, HEAD_BYTES : HEAD_BYTES + n].clone()
            out = payload.new_empty(self.world_size, n)
            out[:, :room] = slots[:, HEAD_BYTES:]
            for begin in range(room, n, SLOT_BYTES):
                part = payload[begin : begin + SLOT_BYTES]
                out[:, begin : begin + len(part)] = self._exchange(part)[:, : len(part)]
            return out

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        """``gather`` of each payload, in one call."""
        return gathered_as_one(self, call, payloads)

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None:
        """Peers' rows of each uint8 [world_size, n], of which this rank's own is filled."""
        gathered_into(self, self.rank, call, wholes)

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Row ``rank`` of every rank's ``payload`` (uint8 [world_size, n]), as uint8 [world_size, n] by source rank."""
        with self._lock:
            world, n = payload.shape
            self._exchange(payload[0, :0], call)
            out = torch.empty_like(payload)
            width = SLOT_BYTES // world
            for begin in range(0, n, width):
                part = payload[:, begin : begin + width]
                slots = self._exchange(part.reshape(-1))
                columns = part.shape[1]
                out[:, begin : begin + columns] = slots[:, self.rank * columns : (self.rank + 1) * columns]
            return out

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's ``payload``."""
        with self._lock:
            self._exchange(payload[:0], call)
            out = torch.empty_like(payload)
            for begin in range(0, payload.numel(), SLOT_BYTES):
                part = payload[begin : begin + SLOT_BYTES]
                slots = self._exchange(part if self.rank == source else part[:0])
                out[begin : begin + len(part)] = slots[source, : len(part)]
            return out

    def refuse(self, call: Call) -> None:
        with self._lock:
            super().refuse(call)

    def leave(self) -> None:
        """Tell peers, those that wait too, that this rank makes no call any more."""
        self._left[self.rank] = 1
        for peer in self._peers:
            self._libc.sem_post(self._semaphore(self.rank, peer))

    def _exchange(self, part: torch.Tensor, call: Call | None = None) -> torch.Tensor:
        """One round: all slots [world_size, SLOT_BYTES], to be read before the next round."""
        if self._said:
            self._settle()
        slots = self._post(part, call)
        self._collect()
        if call is not None:
            check_heads(slots[:, :HEAD_BYTES])
        return slots

    def _post(self, part: torch.Tensor, call: Call | None) -> torch.Tensor:
        slots = self._buffers[self._round % 2]
        self._round += 1
        mine, begin = slots[self.rank], 0
        if call is not None:
            mine[:HEAD_BYTES] = head_of(call)
            begin = HEAD_BYTES
        mine[begin : begin + part.numel()] = part
        for peer in self._peers:
            self._libc.sem_post(self._semaphore(self.rank, peer))
        return slots

    def _collect(self) -> None:
        for peer in self._peers:
            self._wait(peer)
        self._refuse_left()

    def _refuse_left(self) -> None:
        # what a rank that gave up has posted must not be met later
        for peer in self._peers:
            if self._left[peer]:
                raise left(peer)

    def _post_refusal(self, call: Call) -> None:
        self._post(torch.empty(0, dtype=torch.uint8), call)

    def _collect_refusal(self) -> None:
        self._collect()

    def _semaphore(self, sender: int, receiver: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + (sender * self.world_size + receiver) * _SEMAPHORE_BYTES)

    def _wait(self, peer: int) -> None:
        semaphore = self._semaphore(peer, self.rank)
        if self._libc.sem_trywait(semaphore) == 0:
            return
        give_up = time.monotonic() + self._timeout_s
        while True:
            until = time.time() + _LOOK_SECONDS
            spec = _TimeSpec(int(until), int(until % 1 * 1e9))
            if self._libc.sem_timedwait(semaphore, ctypes.byref(spec)) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.ETIMEDOUT, errno.EINTR):
                raise RuntimeError(f"waiting for rank {peer}: {os.strerror(code)}")
            if code == errno.ETIMEDOUT:
                self._refuse_left()
                look(peer, self._pids, give_up, self._timeout_s)
