"""Moving bytes between ranks. Nothing here adds: a mover returns what the peers hold, and the tree is summed locally.

Every call first exchanges one block of fixed size: a header that says what the rank is about to move, and as much of
the payload as fits. A rank whose call differs is thus found before any size-dependent transfer, on every rank alike;
a small payload costs one exchange.
"""

import itertools
import struct
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from rl_contract import ContractError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_gather_into", "broadcast", "barrier", "refusal")
MAX_DIMS = 8
_HEADER_WORDS = 17
# where the words have a check over what was said of the operator
_SAID = -3
_MASK = (1 << 64) - 1
HEADER_BYTES = _HEADER_WORDS * 8
# what a block starts with: the header, and the call's number
HEAD_BYTES = HEADER_BYTES + 8
BLOCK_BYTES = 16384
DEVICES = ("cpu", "cuda")
_UNKNOWN = -1
# bytes, of all ranks, that are gathered at once beside the memory they belong in
PIECE_BYTES = 1 << 28
_MOST_NAMED = 64
# which communicator it is stands above the call's number
_KIND_SHIFT = 40
_NUMBER = (1 << _KIND_SHIFT) - 1


@dataclass(frozen=True)
class Call:
    """What one rank says it is doing; all fields must agree over the ranks. ``dtype`` is None for what is no tensor."""

    op: str
    dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    arg: int
    shape: tuple[int, ...]
    device: str = "cpu"
    # this rank refuses the call; it says so, so that no peer goes on without it
    refused: bool = False
    # a further step of a call that all ranks have made alike, which leaves it no choice; no word of the header
    agreed: bool = False
    # what else the same call moves; in the header by number and digest
    beside: "tuple[Call, ...]" = ()
    # what the operator was given, of which all ranks must say the same; in the header by digest
    said: str = ""
    # how many calls this rank has made of the communicator; beside the header, so that equal calls are packed once
    number: int = field(default=0, compare=False)

    def words(self) -> list[int]:
        head = [
            OPS.index(self.op),
            _code(self.dtype),
            _code(self.out_dtype),
            self.arg,
            DEVICES.index(self.device) if self.device in DEVICES else _UNKNOWN,
            len(self.shape) if self.dtype is not None else _UNKNOWN,
        ]
        body = [*head, *self.shape[:MAX_DIMS]]
        check = int.from_bytes(blake2b(self.said.encode(), digest_size=8).digest(), signed=True) if self.said else 0
        return body + [0] * (_HEADER_WORDS - 3 - len(body)) + [check, self._digest(), int(self.refused)]

    def _digest(self) -> int:
        """0 where nothing is moved beside; else how much, and a check over what."""
        if not self.beside:
            return 0
        return len(self.beside) << 32 | zlib.crc32(b"".join(map(packed_words, self.beside)))

    def tensors(self) -> str:
        """What is moved, in words; equal neighbours are counted."""
        each = [f"{tuple(call.shape)} {call.dtype}" for call in (self, *self.beside)]
        runs = [(text, len(list(same))) for text, same in itertools.groupby(each)]
        more = f" and {len(runs) - _MOST_NAMED} more kinds" if len(runs) > _MOST_NAMED else ""
        return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in runs[:_MOST_NAMED]) + more

    @staticmethod
    def of(words: list[int]) -> str:
        op, dtype, out_dtype, arg, device, dims = words[:6]
        if OPS[op] == "refusal":
            return "refused an operator that would have called"
        if dims < 0:
            return f"{OPS[op]}(what is no tensor)"
        shape = tuple(words[6 : 6 + dims]) if dims <= MAX_DIMS else f"{dims} dimensions"
        place = "" if device == 0 else f", on {DEVICES[device] if device > 0 else 'an unsupported device'}"
        more = f" and {words[-2] >> 32} tensors beside it (check {words[-2] & 0xFFFFFFFF:08x})" if words[-2] else ""
        more += f" by an operator whose values have check {words[_SAID] & _MASK:016x}" if words[_SAID] else ""
        return f"{OPS[op]}(shape {shape}, {_name(dtype)}, out {_name(out_dtype)}, dim or source {arg}{place}){more}"


# what is said of an operator that a rank has refused
REFUSAL = Call("refusal", None, None, 0, (), refused=True)


# calls that move several tensors are made of few kinds, and are of many themselves
@lru_cache(maxsize=4096)
def packed_words(call: Call) -> bytes:
    return struct.pack(f"{_HEADER_WORDS}q", *call.words())


def _code(dtype: torch.dtype | None) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else _UNKNOWN


def _name(code: int) -> str:
    return str(DTYPES[code]) if code >= 0 else "an unsupported dtype"


E = TypeVar("E", bound=Exception)


def alike(error: E) -> E:
    """``error``, marked: every rank raises one at this call, so that all are in step after it."""
    error._rl_comm_alike = True  # type: ignore[attr-defined]
    return error


def is_alike(error: BaseException) -> bool:
    return getattr(error, "_rl_comm_alike", False)


@contextmanager
def named(call: Call) -> Iterator[None]:
    """Ranks that disagree about what is in the header by digest know no more of their peers': each tells its own."""
    try:
        yield
    except ContractError as different:
        if not is_alike(different):
            raise
        raise alike(ContractError(f"{different}. This rank: {call.said or call.tensors()}")) from different


class Refusals:
    """Calls that a rank refuses before it would have made them: said at once, met by its peers' next calls.

    The refusing rank waits for nobody until its own next call, which first takes its peers' answers, so that all are in
    step again. A mover gives the two halves of its exchange.
    """

    def __init__(self) -> None:
        self._said: list[Call] = []

    def refuse(self, call: Call) -> None:
        """Say ``call``, which is refused; behind an earlier one it is said once peers have come to that."""
        if not self._said:
            self._post_refusal(call)
        self._said.append(call)

    def _settle(self) -> None:
        said, self._said = self._said, []
        for at, call in enumerate(said):
            if at:
                self._post_refusal(call)
            self._collect_refusal()

    def _post_refusal(self, call: Call) -> None:
        raise NotImplementedError

    def _collect_refusal(self) -> None:
        raise NotImplementedError


class Mover(Protocol):
    """What moves bytes between ranks; payloads and results lie on the mover's own kind of device."""

    name: str

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor: ...

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]: ...

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None: ...

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor: ...

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor: ...


def gathered_as_one(mover: Mover, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
    """``gather`` of each payload by one gather of all; for memory in which copies cost less than calls."""
    rows = mover.gather(call, torch.cat(payloads))
    return list(rows.split([payload.numel() for payload in payloads], dim=1))


def gathered_into(mover: Mover, rank: int, call: Call, wholes: list[torch.Tensor]) -> None:
    """Row ``rank`` of each uint8 [world_size, n] goes to the peers, theirs into the other rows, by ``gather_each``.

    In pieces, each of which is agreed on: what is gathered is held once more, and on a GPU that ranks share twice.
    """
    for pieces in _pieces(wholes):
        for whole, rows in zip(pieces, mover.gather_each(call, [whole[rank] for whole in pieces])):
            for peer, theirs in enumerate(rows):
                if peer != rank:
                    whole[peer].copy_(theirs)


def _pieces(wholes: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Columns of ``wholes``, in order, at most ``PIECE_BYTES`` at a time; at least one piece, which may be empty."""
    pieces: list[torch.Tensor] = []
    held = 0
    for whole in wholes:
        for part in whole.split(max(1, PIECE_BYTES // len(whole)), dim=1):
            if pieces and held + part.numel() > PIECE_BYTES:
                yield pieces
                pieces, held = [], 0
            pieces.append(part)
            held += part.numel()
    yield pieces


@dataclass
class _Traffic:
    """Of one gloo group, on this rank: communicators made over it, and calls of any of them."""

    made: int = 0
    calls: int = 0


_traffic: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Traffic]" = weakref.WeakKeyDictionary()


class GlooMover:
    """Direct exchange between all pairs of a gloo group: one step of latency, where a ring takes world_size - 1."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self._traffic = _traffic.setdefault(group, _Traffic())
        # which communicator's calls these are; 0 for what is exchanged before that is known
        self._kind = 0

    def become(self) -> None:
        """From here on, calls are those of one more communicator over this group, and no other's; on all ranks."""
        mine = torch.tensor([self._traffic.made + 1])
        call = Call("barrier", torch.int64, torch.int64, 1, ())
        found = self.gather(call, mine.view(torch.uint8)).contiguous().view(torch.int64)
        # one that could not be made on some ranks was counted on the others
        self._kind = self._traffic.made = int(found.max())

    def refuse(self, call: Call) -> None:
        """Nothing is said now: what nobody answers would hold this rank until the group's timeout. The number of this
        rank's next call over the group tells its peers, who come to it by raising once for each that was refused."""
        self._traffic.calls += 1

    def gather(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's ``payload`` (uint8 [n]) as uint8 [world_size, n], once all are seen to make the same call."""
        head = min(payload.numel(), BLOCK_BYTES - HEAD_BYTES)
        blocks = self._agree(call, payload[:head])
        if payload.numel() == head:
            return blocks[:, HEAD_BYTES : HEAD_BYTES + head]
        rest = payload[head:]
        received = payload.new_empty(self.world_size, rest.numel())
        dist.all_to_all_single(received, rest.repeat(self.world_size), group=self.group)
        return torch.cat((blocks[:, HEAD_BYTES : HEAD_BYTES + head], received), dim=1)

    def gather_each(self, call: Call, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        """``gather`` of each payload, in one call."""
        return gathered_as_one(self, call, payloads)

    def gather_into(self, call: Call, wholes: list[torch.Tensor]) -> None:
        """Peers' rows of each uint8 [world_size, n], of which this rank's own is filled."""
        gathered_into(self, self.rank, call, wholes)

    def scatter(self, call: Call, payload: torch.Tensor) -> torch.Tensor:
        """Row ``rank`` of every rank's ``payload`` (uint8 [world_size, n]), as uint8 [world_size, n] by source rank."""
        self.agree(call)
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=self.group)
        return received

    def broadcast(self, call: Call, payload: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's ``payload``."""
        head = min(payload.numel(), BLOCK_BYTES - HEAD_BYTES)
        blocks = self._agree(call, payload[:head])
        if payload.numel() == head:
            return blocks[source, HEAD_BYTES : HEAD_BYTES + head].clone()
        out = payload.clone()
        dist.broadcast(out, group=self.group, group_src=source)
        return out

    def agree(self, call: Call) -> None:
        """Return once every rank is seen to make this call.

        Raises:
            ContractError: on every rank, when the calls differ.
        """
        self._agree(call, torch.empty(0, dtype=torch.uint8))

    def _agree(self, call: Call, head: torch.Tensor) -> torch.Tensor:
        block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        self._traffic.calls += 1
        block[:HEAD_BYTES] = head_of(replace(call, number=self._traffic.calls), self._kind)
        block[HEAD_BYTES : HEAD_BYTES + head.numel()] = head
        while True:
            blocks = torch.empty(self.world_size, BLOCK_BYTES, dtype=torch.uint8)
            dist.all_to_all_single(blocks, block.repeat(self.world_size), group=self.group)
            if self._met(blocks[:, :HEAD_BYTES]):
                return blocks

    def _met(self, heads: torch.Tensor) -> bool:
        """Whether all ranks make this call; not while peers have yet to come to what this rank has refused before.

        Raises:
            ContractError: on every rank where the calls differ; where a rank has refused this one, on those that make
                it.
        """
        words = heads.contiguous().view(torch.int64)
        if bool((words == words[0]).all()):
            return True
        rows = words.tolist()
        numbers = [row[-1] & _NUMBER for row in rows]
        least = min(numbers)
        if numbers[self.rank] > least:
            return False
        here = [number == least for number in numbers]
        check_kinds({rank: row[-1] >> _KIND_SHIFT for rank, row in enumerate(rows) if here[rank]})
        check_calls([row[:-1] if met else REFUSAL.words() for row, met in zip(rows, here)])
        return True


def head_of(call: Call, kind: int = 0) -> torch.Tensor:
    """uint8 [HEAD_BYTES]"""
    return torch.tensor([*call.words(), kind << _KIND_SHIFT | call.number], dtype=torch.int64).view(torch.uint8)


def check_kinds(kinds: dict[int, int]) -> None:
    """Refuse ranks that call several communicators of one group, each another one; ``kinds`` by rank."""
    rank, kind = next(iter(kinds.items()))
    other = next((r for r, theirs in kinds.items() if theirs != kind), None)
    if other is not None:
        raise alike(
            ContractError(
                f"ranks call different communicators of one group: rank {rank} the {kind}. that was made over it, rank "
                f"{other} the {kinds[other]}.; every rank must call them in the same order, from one thread"
            )
        )


def check_heads(heads: torch.Tensor) -> None:
    """heads uint8 [world_size, HEAD_BYTES]: refuse, naming the first rank whose call differs from rank 0's."""
    words = heads.contiguous().view(torch.int64)
    if not bool((words == words[0]).all()):
        rows = words.tolist()
        check_calls([row[:-1] for row in rows])
        check_numbers([row[-1] for row in rows])


def check_calls(calls: list[list[int]]) -> None:
    """As ``check_heads``, from the words of each rank's call; one that says nothing of its operator fits any."""
    said = next((call[_SAID] for call in calls if call[_SAID]), 0)
    calls = [[*call[:_SAID], call[_SAID] or said, *call[_SAID + 1 :]] for call in calls]
    other = next((r for r, call in enumerate(calls) if call != calls[0]), None)
    if other is None:
        return
    refusing = [str(r) for r, call in enumerate(calls) if call[-1]]
    raise alike(
        ContractError(
            f"ranks make different calls: rank 0 has {Call.of(calls[0])}, rank {other} has {Call.of(calls[other])}; "
            + (f"refused on rank {', '.join(refusing)}, whose error says why; " if refusing else "")
            + "every rank of a group must make the same call with one shape and dtype, and give its operator the same"
        )
    )


def check_numbers(numbers: list[int]) -> None:
    """Refuse ranks that have made more calls of a communicator than others, though this one is alike on all."""
    other = next((r for r, number in enumerate(numbers) if number != numbers[0]), None)
    if other is not None:
        raise alike(out_of_step(0, numbers[0], other, numbers[other]))


def out_of_step(rank: int, number: int, other: int, theirs: int) -> ContractError:
    return ContractError(
        f"ranks are out of step: this is call {number} of rank {rank} and call {theirs} of rank {other}; "
        "every rank must make every call; make new communicators on all ranks"
    )
