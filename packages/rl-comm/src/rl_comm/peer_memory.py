"""GPU memory that the ranks of one host write to directly, and calls through it; the kernels are ``triton_peer``'s.

Small messages cost NCCL more than they take: a call here is one launch, which moves the parts and adds them.
``peer_joining`` makes the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rl_contract.triton_launch import Prepared

# of one rank's part in a call of one step, by world size: 32 MiB of an allocation
SLOT_BYTES = {2: 8 << 20, 4: 4 << 20, 8: 2 << 20}
PROGRAMS = 64
# two steps fill their slots many times in a call; of so many programs some send while others add
STEP_PROGRAMS = 128
STEP_BLOCKS = {2: 8192, 4: 4096, 8: 2048}
# what a rank sends in one step from which on it takes two, in which it sends less
TWO_STEP_BYTES = 4 << 20
_BLOCK = 2048
_WARPS = 8
# offsets into a tensor are int32
_MOST_BYTES = 1 << 32
# so many elements are whole blocks of 16 bytes of any type
_ROW = 16
_MOST_KEPT = 4096
_MOST_NS = 1 << 62
# of what a prepared launch is given
_ALIGNMENT = 16


@dataclass(frozen=True)
class Area:
    """What calls of one grid have of every rank's allocation; see ``triton_peer``. Sizes are in int32 words."""

    world_size: int
    slot: int
    programs: int
    block: int
    begin: int = 0

    @property
    def end(self) -> int:
        size = 2 * self.world_size * self.slot + (self.world_size + 1) * self.programs
        return self.begin + -(-size // _ROW) * _ROW


def areas_of(world_size: int) -> tuple[Area, Area]:
    """For calls of one step and of two; the second ends where the allocation does."""
    one, block = Area(world_size, SLOT_BYTES[world_size] // 4, PROGRAMS, _BLOCK), STEP_BLOCKS[world_size]
    return one, Area(world_size, STEP_PROGRAMS * block, STEP_PROGRAMS, block, one.end)


@cache
def kernels() -> Any | None:
    try:
        from rl_comm import triton_peer
    except ImportError:
        return None
    return triton_peer


class PeerMemory:
    """Calls of one group through its ranks' memory, on the current stream.

    Each is given ``agree``, which returns once the peers are seen to make the same call. A kernel waits for its peers',
    so whatever may fail on one rank alone is done before. Calls of one communicator that are captured in
    graphs run one after the other if they are captured on one stream, and replays and eager calls if the caller's
    streams wait for one another.

    Args:
        addresses: of every rank's allocation as this process maps it, rank 0 first.
        device: of this rank.
        timeout_s: after which a kernel whose peers have not come ends with a device-side assert, which this process
            meets at its next synchronisation as a CUDA error; 0 for never.
    """

    name = "peer_memory"

    def __init__(self, addresses: list[int], rank: int, device: torch.device, timeout_s: float = 0.0) -> None:
        self.rank, self.world_size, self.device = rank, len(addresses), device
        self._limit = int(min(timeout_s * 1e9, _MOST_NS))
        self._areas = {
            area: torch.tensor([address + 4 * area.begin for address in addresses], dtype=torch.int64).to(device)
            for area in areas_of(self.world_size)
        }
        self._one, self._two = self._areas
        self._launches: dict[tuple[str, int, torch.dtype], Prepared] = {}

    def fits(self, size: int) -> bool:
        """Whether ``size`` bytes of each rank go in one step: whole words, no more than a slot.

        Ranks that decided otherwise would wait for one another, so only what they agree on is asked.
        """
        return 0 < size <= 4 * self._one.slot and size % 4 == 0

    def steps(self, size: int, two_shot_bytes: int | None = None) -> int:
        """In how many steps an fp32 sum of ``size`` bytes of each rank is made; 0 where it can't be.

        Args:
            two_shot_bytes: from which size on it is two; None takes what is faster.
        """
        if not 0 < size < _MOST_BYTES:
            return 0
        few = size * (self.world_size - 1) < TWO_STEP_BYTES if two_shot_bytes is None else size < two_shot_bytes
        return 1 if few and self.fits(size) else 2

    def sum(self, payload: torch.Tensor, out_dtype: torch.dtype, agree: Callable[[], None]) -> torch.Tensor:
        """The bytes of every rank's fp32 [n] -> [n]: the tree over ranks, rounded once to ``out_dtype``."""
        words = _words(payload)
        out = torch.empty(words.numel(), dtype=out_dtype, device=payload.device)
        self._launch("peer_sum_kernel", self._one, words, out, {"n": words.numel()}, agree)
        return out

    def sum_in_steps(self, payload: torch.Tensor, out_dtype: torch.dtype, agree: Callable[[], None]) -> torch.Tensor:
        """As ``sum``, of any size; each rank adds its part of the elements and sends it round."""
        words = _words(payload)
        total = words.numel()
        out = torch.empty(total, dtype=out_dtype, device=payload.device)
        row = -(-total // (self.world_size * _ROW)) * _ROW
        self._launch("peer_reduce_kernel", self._two, words, out, {"n": row, "total": total}, agree)
        return out

    def gather(self, payload: torch.Tensor, agree: Callable[[], None]) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n]."""
        words = _words(payload)
        out = payload.new_empty(self.world_size, payload.numel())
        self._launch("peer_gather_kernel", self._one, words, out.view(torch.int32), {"n": words.numel()}, agree)
        return out

    def _launch(
        self, kernel: str, area: Area, words: torch.Tensor, out: torch.Tensor, sizes: dict[str, int],
        agree: Callable[[], None],
    ) -> None:  # fmt: skip
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            # peers' memory is mapped for this device alone, and Triton launches on the current one
            with torch.cuda.device(self.device):
                return self._launch(kernel, area, words, out, sizes, agree)
        go = self._prepared(kernel, area, words, out, sizes)
        agree()
        self._order()
        go(words, out, self._areas[area])

    def _prepared(
        self, kernel: str, area: Area, words: torch.Tensor, out: torch.Tensor, sizes: dict[str, int]
    ) -> Prepared:
        key = (kernel, words.numel(), out.dtype)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_KEPT:
                self._launches.clear()
            fixed = {
                **sizes, "SLOT": area.slot, "PROGRAMS": area.programs, "RANK": self.rank, "WORLD": self.world_size,
                "BLOCK": area.block, "LIMIT": self._limit,
            }  # fmt: skip
            function, grid = getattr(kernels(), kernel), (area.programs,)
            options: dict[str, Any] = {"num_warps": _WARPS}
            if self._limit:
                # asserts on the device; numbers of calls may overflow
                options |= {"debug": True, "sanitize_overflow": False}
            compiled = function.warmup(words, out, self._areas[area], *fixed.values(), grid=grid, **options)
            # this loads it, too
            getattr(compiled, "run", None)
            launch = Prepared(function, grid, fixed, **options)
            self._launches[key] = launch
        return launch

    def _order(self) -> None:
        """Calls run one after the other, whatever streams they are made on.

        Those of one communicator use the same slots in turn. Those of several could each hold a part of the GPU and
        wait for a peer's, which on that peer waits for the rest.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        stream, last = torch.cuda.current_stream(), _last.get(self.device)
        if last is not None and stream != last:
            stream.wait_stream(last)
        _last[self.device] = stream


# the stream of each GPU's last call, of whichever communicator
_last: dict[torch.device, Any] = {}


def _words(payload: torch.Tensor) -> torch.Tensor:
    """The bytes (uint8 [4 n]) as int32 [n], where a launch finds them aligned as at first; a copy if need be."""
    if payload.data_ptr() % _ALIGNMENT or payload.storage_offset() % 4:
        payload = payload.clone()
    return payload.view(torch.int32)
