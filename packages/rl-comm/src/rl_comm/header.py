"""What a rank says of a call, in words of fixed number, and what is wrong where ranks say different things."""

import itertools
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

import torch

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
DEVICES = ("cpu", "cuda")
_UNKNOWN = -1
_MOST_NAMED = 64
# which communicator it is stands above the call's number
KIND_SHIFT = 40
NUMBERS = (1 << KIND_SHIFT) - 1


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
        check = 0
        if self.said:
            # texts that UTF-8 has no bytes for are told apart, too
            text = self.said.encode(errors="surrogatepass")
            check = int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True)
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


def head_of(call: Call, kind: int = 0) -> torch.Tensor:
    """uint8 [HEAD_BYTES]"""
    return torch.tensor([*call.words(), kind << KIND_SHIFT | call.number], dtype=torch.int64).view(torch.uint8)


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
