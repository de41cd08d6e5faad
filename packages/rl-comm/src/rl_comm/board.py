"""What every rank is about to do, said on the host before the GPU moves anything.

A GPU collective of ranks that disagree would never end, and looking at a device value would stop the stream. So each
call is written to a board in shared memory, a rank goes ahead once it has read the same from all its peers, and no
device is touched: this costs microseconds of the host. A replayed graph makes no calls.
"""

import time

import numpy as np

from rl_comm.mover import HEADER_BYTES, Call, GlooMover, check_calls
from rl_comm.shared_memory import Shared, look, share

_WORDS = HEADER_BYTES // 8
_ROW = 32  # words a rank has for one call: the call, its number, a check over both
_SPINS = 200
_PAUSE_SECONDS = 2e-5
# how often a waiting rank looks whether the peer it waits for still lives
_LOOK_SECONDS = 2


class Board:
    """Two rows of calls a rank, used in turn: nobody writes call k + 2 before all have written, so read, k + 1."""

    def __init__(self, gloo: GlooMover, shared: Shared, timeout_s: float) -> None:
        self.rank, self.world_size = gloo.rank, gloo.world_size
        self._shared, self._timeout_s = shared, timeout_s
        count = 2 * gloo.world_size * _ROW
        self._rows = np.frombuffer(shared.memory, np.int64, count).reshape(2, gloo.world_size, _ROW)
        self._number = 0
        self._mine = np.zeros(_WORDS + 2, np.int64)

    def agree(self, call: Call) -> None:
        """Return once every rank is seen to make this call.

        Raises:
            ContractError: on every rank, when the calls differ. RuntimeError: a peer has ended or does not come.
        """
        self._number += 1
        words = call.words()
        mine = [*words, self._number, _check(words, self._number)]
        self._mine[:] = mine
        rows = self._rows[self._number % 2]
        rows[self.rank, : _WORDS + 2] = self._mine
        calls = [words if peer == self.rank else self._wait(rows, peer) for peer in range(self.world_size)]
        check_calls(calls)

    def _wait(self, rows: np.ndarray, peer: int) -> list[int]:
        spins, started, looked = 0, 0.0, 0.0
        while True:
            found = rows[peer, : _WORDS + 2].tolist()
            words = found[:_WORDS]
            # the check tells a row that is still being written
            if found[_WORDS] == self._number and found[_WORDS + 1] == _check(words, self._number):
                return words
            spins += 1
            if spins < _SPINS:
                continue
            time.sleep(_PAUSE_SECONDS)
            now = time.monotonic()
            started, looked = started or now, looked or now
            if now - looked > _LOOK_SECONDS:
                looked = now
                look(peer, self._shared.pids, started + self._timeout_s, self._timeout_s)


def _check(words: list[int], number: int) -> int:
    return (sum((i + 1) * w for i, w in enumerate(words)) + 40503 * number) & (2**62 - 1)


class Signatures:
    """Where ranks share no memory: a kind of call is agreed on through the host group at its first use only.

    Ranks that disagree between kinds they have all used before are then found by the process group's own timeout.
    """

    def __init__(self, gloo: GlooMover) -> None:
        self._gloo = gloo
        self._seen: set[Call] = set()

    def agree(self, call: Call) -> None:
        if call not in self._seen:
            self._gloo.agree(call)
            self._seen.add(call)


def make(gloo: GlooMover, timeout_s: float) -> Board | Signatures:
    """A board where every rank can reach one; the same kind on every rank."""
    shared = share(gloo, 2 * gloo.world_size * _ROW * 8)
    return Signatures(gloo) if shared is None else Board(gloo, shared, timeout_s)
