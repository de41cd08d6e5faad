"""Contract `collective` through peer memory: fp32 parts of all ranks, the balanced tree, one rounding at the root.

Every rank writes its part into a slot of its own in each peer's memory, says so by a flag, waits for the peers' flags
and adds what lies in its own memory by the tree of ``triton_tree``, in the order written below. A program's elements,
hence their order, don't depend on the launch.

Slots are used in turn, two for each rank. A rank writes over a slot of call k in call k + 2, before which it has seen
the peer's flag of call k + 1, which the peer set after its call k had ended. That needs one grid for all calls on the
same slots: each program counts its calls in device memory, so that replays of graphs count too.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

# of a rank that waits for a peer, between looks at the clock
_POLLS = tl.constexpr(4096)


@triton.jit
def _at(addresses, rank):
    # so aligned that a thread moves 16 bytes at a time
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _await(flag, number, LIMIT: tl.constexpr):
    """Once here, a peer is at this call, or at the next; after ``LIMIT`` ns the launch fails. 0: without end."""
    polls = 0
    since = tl.zeros((), tl.int64)
    # numbers begin again after 2**32 calls
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number < 0:
        if LIMIT > 0:
            polls += 1
            if polls % _POLLS == 0:
                now = cuda.globaltimer()
                since = tl.where(since == 0, now, since)
                tl.device_assert(now - since < LIMIT, "no peer came: one has ended, or makes another call")


@triton.jit
def _meet(
    addresses, mine, number, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Once here, what this program has written lies in the peers' memory, and what the peers' wrote in this one's."""
    program = tl.program_id(0)
    # all threads have written before one of them says so
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        theirs = _at(addresses, (RANK + step) % WORLD)
        flag = theirs + 2 * WORLD * SLOT + RANK * PROGRAMS + program
        tl.atomic_xchg(flag, number, sem="release", scope="sys")
    for step in tl.static_range(1, WORLD):
        flag = mine + 2 * WORLD * SLOT + (RANK + step) % WORLD * PROGRAMS + program
        _await(flag, number, LIMIT)
    tl.debug_barrier()


@triton.jit
def _exchange(
    words, addresses, n, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Where in this rank's memory the peers' slots of this call begin, once they are filled.

    An allocation: slots int32 [2, WORLD, SLOT], flags int32 [WORLD, PROGRAMS], calls int32 [PROGRAMS].
    """
    program = tl.program_id(0)
    mine = _at(addresses, RANK)
    counter = mine + 2 * WORLD * SLOT + WORLD * PROGRAMS + program
    number = tl.load(counter) + 1
    slots = (number & 1) * (WORLD * SLOT)
    for begin in range(program * BLOCK, n, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        held = at < n
        part = tl.load(words + at, held)
        for step in tl.static_range(1, WORLD):
            theirs = _at(addresses, (RANK + step) % WORLD)
            tl.store(theirs + slots + RANK * SLOT + at, part, held)
    _meet(addresses, mine, number, SLOT, PROGRAMS, RANK, WORLD, LIMIT)
    tl.store(counter, number)
    return mine + slots


@triton.jit
def _part(words, slots, at, held, PEER: tl.constexpr, RANK: tl.constexpr, SLOT: tl.constexpr):
    if PEER == RANK:
        part = tl.load(words + at, held)
    else:
        # written by another GPU: never from this processor's own cache
        part = tl.load(slots + PEER * SLOT + at, held, cache_modifier=".cg")
    return part


@triton.jit
def _pair(words, slots, at, held, FIRST: tl.constexpr, RANK: tl.constexpr, SLOT: tl.constexpr):
    left = _part(words, slots, at, held, FIRST, RANK, SLOT).to(tl.float32, bitcast=True)
    return left + _part(words, slots, at, held, FIRST + 1, RANK, SLOT).to(tl.float32, bitcast=True)


@triton.jit
def _total(words, slots, at, held, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr):
    """The tree over ranks: ``words`` are this rank's part, the others lie in ``slots``."""
    total = _pair(words, slots, at, held, 0, RANK, SLOT)
    if WORLD >= 4:
        total += _pair(words, slots, at, held, 2, RANK, SLOT)
    if WORLD >= 8:
        upper = _pair(words, slots, at, held, 4, RANK, SLOT)
        total += upper + _pair(words, slots, at, held, 6, RANK, SLOT)
    return total


@triton.jit
def peer_sum_kernel(
    words, out, addresses, n, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """words: the bits of this rank's fp32 [n] -> out [n]; grid (PROGRAMS,). addresses int64 [WORLD] of allocations."""
    slots = _exchange(words, addresses, n, SLOT, PROGRAMS, RANK, WORLD, BLOCK, LIMIT)
    for begin in range(tl.program_id(0) * BLOCK, n, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        held = at < n
        total = _total(words, slots, at, held, RANK, WORLD, SLOT)
        tl.store(out + at, total.to(out.dtype.element_ty), held)


@triton.jit
def peer_reduce_kernel(
    words, out, addresses, n, total, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """words: the bits of this rank's fp32 [total] -> out [total]; grid (PROGRAMS,). SLOT is one block of each program.

    Row r of WORLD is [r n, (r + 1) n) of what there is; rank r adds everyone's row r, and sends it round once it is
    rounded. That is two calls for each slot's worth of the rows. A program goes through all of it alone, since it
    writes and reads the same block of every slot: it may be ahead of the others, also of peers' others.
    """
    program = tl.program_id(0)
    mine = _at(addresses, RANK)
    counter = mine + 2 * WORLD * SLOT + WORLD * PROGRAMS + program
    number = tl.load(counter)
    result = tl.pointer_type(out.dtype.element_ty)
    block = program * BLOCK + tl.arange(0, BLOCK)
    for first in range(0, n - program * BLOCK, SLOT):
        at = first + block
        number += 1
        slots = (number & 1) * (WORLD * SLOT)
        for step in tl.static_range(1, WORLD):
            peer = (RANK + step) % WORLD
            part = tl.load(words + peer * n + at, (at < n) & (peer * n + at < total))
            tl.store(_at(addresses, peer) + slots + RANK * SLOT + block, part)
        _meet(addresses, mine, number, SLOT, PROGRAMS, RANK, WORLD, LIMIT)
        held = (at < n) & (RANK * n + at < total)
        # of this rank the part lies in its tensor, first words from where others' lie in the slots
        added = _total(words + RANK * n + first, mine + slots, block, held, RANK, WORLD, SLOT)
        rounded = added.to(out.dtype.element_ty)
        tl.store(out + RANK * n + at, rounded, held)
        number += 1
        slots = (number & 1) * (WORLD * SLOT) + program * BLOCK
        for step in tl.static_range(1, WORLD):
            into = _at(addresses, (RANK + step) % WORLD) + slots + RANK * SLOT
            tl.store(into.to(result) + tl.arange(0, BLOCK), rounded)
        _meet(addresses, mine, number, SLOT, PROGRAMS, RANK, WORLD, LIMIT)
        for step in tl.static_range(1, WORLD):
            peer = (RANK + step) % WORLD
            row = (mine + slots + peer * SLOT).to(result) + tl.arange(0, BLOCK)
            tl.store(out + peer * n + at, tl.load(row, cache_modifier=".cg"), (at < n) & (peer * n + at < total))
    tl.store(counter, number)


@triton.jit
def peer_gather_kernel(
    words, out, addresses, n, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """words int32 [n] -> out int32 [WORLD, n]; grid (PROGRAMS,)."""
    slots = _exchange(words, addresses, n, SLOT, PROGRAMS, RANK, WORLD, BLOCK, LIMIT)
    for begin in range(tl.program_id(0) * BLOCK, n, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        held = at < n
        for peer in tl.static_range(WORLD):
            tl.store(out + peer * n + at, _part(words, slots, at, held, peer, RANK, SLOT), held)
