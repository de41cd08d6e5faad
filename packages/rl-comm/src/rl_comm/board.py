"""What every rank is about to do, said on the host before the GPU moves anything.

A GPU collective of ranks that disagree would never end, and looking at a device value would stop the stream. So each
call is written to a board in shared memory, a rank goes ahead once it has read the same from all its peers, and no
device is touched: this costs microseconds of the host. A replayed graph makes no calls.
"""

import os
import struct
import time
import zlib
from dataclasses import replace
from functools import lru_cache

from rl_comm.header import HEADER_BYTES, Call, check_calls, out_of_step, packed_words
from rl_comm.mover import GlooMover, Refusals
from rl_comm.shared_memory import Shared, left, look, share

_TAIL = struct.Struct("qq")  # the call's number, and a check over both
_FILLED = HEADER_BYTES + _TAIL.size
_ROW_BYTES = 256
# A waiting rank first spins, then lets others have its core, then sleeps. A kernel lets no sleep end early, also one of
# zero seconds, so a rank that sleeps is late itself, and its peers sleep in their turn: a peer that is busy with its
# own launches is waited for awake.
_SPINS = 100
_AWAKE_SECONDS = 5e-3
_PAUSE_SECONDS = 2e-5
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))
# how often a waiting rank looks whether the peer it waits for still lives
_LOOK_SECONDS = 2
# the number of a rank that has left the calls for good
_LEFT = -1


# a call of several tensors is seldom made twice, and large
@lru_cache(maxsize=4096)
def _kept(call: Call) -> tuple[bytes, int]:
    words = packed_words(call)
    return words, zlib.crc32(words)


def _packed(call: Call) -> tuple[bytes, int]:
    return _kept.__wrapped__(call) if call.beside else _kept(call)


class Board(Refusals):
    """Two rows of calls a rank, used in turn: nobody writes call k + 2 before all have written, so read, k + 1."""

    def __init__(self, gloo: GlooMover, shared: Shared, timeout_s: float) -> None:
        super().__init__()
        self.rank, self.world_size = gloo.rank, gloo.world_size
        self._shared, self._timeout_s = shared, timeout_s
        self._memory = memoryview(shared.memory)
        self._number = 0

    def agree(self, call: Call) -> None:
        """Return once every rank is seen to make this call.

        Raises:
            ContractError: on every rank, when the calls differ. RuntimeError: a peer has ended or does not come.
        """
        if self._said:
            self._settle()
        mine = self._post(call)
        rows = [mine if peer == self.rank else self._wait(peer, mine) for peer in range(self.world_size)]
        if any(row != mine for row in rows):
            check_calls([list(struct.unpack_from(f"{HEADER_BYTES // 8}q", row)) for row in rows])

    def leave(self) -> None:
        """Tell peers, those that wait too, that this rank makes no call any more."""
        words = bytes(HEADER_BYTES)
        for _ in range(2):
            self._row(self.rank)[:] = words + _TAIL.pack(_LEFT, zlib.crc32(words) ^ _LEFT)
            self._number += 1

    def _post(self, call: Call) -> bytes:
        self._number += 1
        words, check = _packed(call)
        mine = words + _TAIL.pack(self._number, check ^ self._number)
        self._row(self.rank)[:] = mine
        return mine

    def _post_refusal(self, call: Call) -> None:
        self._post(call)

    def _collect_refusal(self) -> None:
        mine = bytes(self._row(self.rank))
        for peer in range(self.world_size):
            self._wait(peer, mine)

    def _row(self, rank: int) -> memoryview:
        begin = (self._number % 2 * self.world_size + rank) * _ROW_BYTES
        return self._memory[begin : begin + _FILLED]

    def _wait(self, peer: int, mine: bytes) -> bytes:
        row = self._row(peer)
        spins, started, looked = 0, 0.0, 0.0
        while True:
            found = bytes(row)
            if found == mine:
                return found
            number, check = _TAIL.unpack_from(found, HEADER_BYTES)
            # the check tells a row that is still being written
            if (number >= self._number or number == _LEFT) and check == zlib.crc32(found[:HEADER_BYTES]) ^ number:
                if number == self._number:
                    return found
                raise left(peer) if number == _LEFT else out_of_step(self.rank, self._number, peer, number)
            spins += 1
            if spins <= _SPINS:
                continue
            now = time.monotonic()
            started, looked = started or now, looked or now
            if now - started < _AWAKE_SECONDS:
                _yield()
                continue
            time.sleep(_PAUSE_SECONDS)
            if now - looked > _LOOK_SECONDS:
                looked = now
                look(peer, self._shared.pids, started + self._timeout_s, self._timeout_s)


class Signatures:
    """Where ranks share no memory: a kind of call is agreed on through the host group at its first use only.

    Ranks that disagree between kinds they have all used before are then found by the process group's own timeout.
    What was said of the operator makes no kind: it is compared when its kind is new, and not after. A rank that says
    nothing does not know of a peer's new text, which would wait for it.
    """

    def __init__(self, gloo: GlooMover) -> None:
        self._gloo = gloo
        self._seen: set[bytes] = set()

    def refuse(self, call: Call) -> None:
        """Nothing is said. This rank's next call is agreed on anew, whatever its kind, so that it meets no call of
        peers that wait for the one that was refused: they wait for the process group's timeout, unless they have
        refused alike."""
        self._seen.clear()
        self._gloo.refuse(call)

    def agree(self, call: Call) -> None:
        # what is kept of a call does not grow with the tensors it moves
        words, _ = _packed(replace(call, said="") if call.said else call)
        if words in self._seen:
            return
        try:
            self._gloo.agree(call)
        except Exception:
            # a rank that has refused agrees on its next call, whatever it is
            self._seen.clear()
            raise
        if not call.refused:
            self._seen.add(words)


def make(gloo: GlooMover, timeout_s: float) -> Board | Signatures:
    """A board where every rank can reach one; the same kind on every rank."""
    shared = share(gloo, 2 * gloo.world_size * _ROW_BYTES)
    return Signatures(gloo) if shared is None else Board(gloo, shared, timeout_s)
