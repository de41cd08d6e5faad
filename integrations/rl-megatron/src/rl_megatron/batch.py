"""Samples packed one after another, the rows to score, and the split over context parallel ranks."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

import rl_attn
from rl_contract import Communicator, ContractError, TokenShards
from rl_contract.checks import whole_number
from rl_contract.devices import host_array, to_device
from rl_contract.shares import LaterShares
from rl_megatron.checks import tensor_problem

T = TypeVar("T")
# int64 numbers in what an allocation's address is a multiple of
_ALIGNED = 64
# integers that need no look at each; a bool's type is another
_PLAIN = {int, np.int32, np.int64}


@dataclass(frozen=True)
class Sample:
    """One prompt with its response.

    Attributes:
        prompt: token ids, at least one.
        response: token ids, may be empty.
        mask: which response tokens count in the loss, bools or 0 and 1; all where None.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[bool] | None = None

    @classmethod
    def of(cls, value: "Sample | Mapping[str, Any] | Sequence[Any]") -> "Sample":
        """A sample from a sample, a mapping with these keys, or a ``(prompt, response[, mask])`` sequence.

        Raises:
            ContractError: anything else.
        """
        if isinstance(value, Sample):
            return value
        if isinstance(value, Mapping) and {"prompt", "response"} <= set(value):
            return cls(value["prompt"], value["response"], value.get("mask"))
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) in (2, 3):
            return cls(*value)
        raise ContractError(
            f"a sample is {str(value)[:80]!r}, supported: Sample, a mapping with prompt, response and mask, or "
            "(prompt, response[, mask])"
        )


@dataclass
class StrictPackedSeqParams(PackedSeqParams):
    """What Megatron hands to the core attention, with the tokens' absolute positions and the batch they come from."""

    positions: Any = None
    batch: Any = None


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """What one context parallel rank computes.

    Attributes:
        token_ids, positions: int64 [T/cp], this rank's tokens.
        rows: int64 [n], which of its tokens are scored, ascending.
        targets: int64 [n], the token each scored row predicts.
        slots: int64 [n], where each value belongs among the batch's response tokens.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> "RankBatch":
        """The same on ``device``; from the host without waiting, in one copy."""
        parts = [getattr(self, f.name) for f in fields(self)]
        # each part begins where memory of its own would, which kernels are compiled for
        rooms = [-(-part.numel() // _ALIGNED) * _ALIGNED for part in parts]
        together = torch.cat([torch.nn.functional.pad(p, (0, room - p.numel())) for p, room in zip(parts, rooms)])
        there = to_device(together, device).split(rooms)
        return RankBatch(**{f.name: whole[: len(part)] for f, part, whole in zip(fields(self), parts, there)})


@dataclass(frozen=True)
class PackedBatch:
    """Samples packed in order; with CP each sequence is padded to a multiple of ``2 * cp``.

    A response token at index ``i`` of its sequence is scored by the row of token ``i - 1``. Slots number all response
    tokens of the batch in packed order. Padding sits at the end of a sequence, where causality keeps it out of every
    row.
    """

    samples: tuple[Sample, ...]
    vocab_size: int
    max_positions: int
    cp: int = 1

    @classmethod
    def pack(cls, samples: Iterable[Any], *, vocab_size: int, max_positions: int, cp: int = 1) -> "PackedBatch":
        """Pack samples.

        Raises:
            ContractError: a size that is no integer from 1, no samples, or every sample that is empty, too long, no
                sequence, has an id that is no integer or outside the vocabulary, or a mask of the wrong length or with
                anything but bools, 0 and 1.
        """
        if isinstance(samples, (str, bytes, Mapping, Tensor)) or not isinstance(samples, Iterable):
            raise ContractError(f"PackedBatch: samples={samples!r:.80}, supported: a sequence of samples")
        for name, number in (("vocab_size", vocab_size), ("max_positions", max_positions), ("cp", cp)):
            if not whole_number(number) or number < 1:
                raise ContractError(f"PackedBatch: {name}={number!r}, supported: an integer of 1 and above")
        batch = cls(tuple(Sample.of(s) for s in samples), vocab_size, max_positions, cp)
        problems = [p for i, s in enumerate(batch.samples) for p in batch._problems(i, s)]
        if not batch.samples:
            problems.append("no samples; give at least one")
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ContractError("PackedBatch: " + "; ".join(problems[:8]) + more)
        return batch

    def _problems(self, index: int, sample: Sample) -> list[str]:
        problems = []
        parts: dict[str, Any] = {"prompt": sample.prompt, "response": sample.response}
        if sample.mask is not None:
            parts["mask"] = sample.mask
        for name, part in parts.items():
            if odd := tensor_problem(f"the {name} of sample {index}", part):
                problems.append(odd)
            elif not _is_row(part):
                problems.append(f"sample {index} has {name}={part!r:.80}, supported: a sequence with one entry a token")
        if problems:
            return problems
        tokens = [*sample.prompt, *sample.response]
        plain = set(map(type, tokens)) <= _PLAIN
        if not len(sample.prompt):
            problems.append(
                f"sample {index} has an empty prompt; its first response token has no row to be scored from"
            )
        if len(tokens) > self.max_positions:
            problems.append(
                f"sample {index} has {len(tokens)} tokens, the model has {self.max_positions} positions; cut the sample"
            )
        wrong = [] if plain else [t for t in tokens if not _is_integer(t)]
        if wrong:
            problems.append(f"sample {index} has token id {wrong[0]!r}, supported: integers; give the tokenizer's ids")
            return problems
        inside = plain and tokens and min(tokens) >= 0 and max(tokens) < self.vocab_size
        outside = [] if inside else [t for t in tokens if not 0 <= t < self.vocab_size]
        if outside:
            problems.append(f"sample {index} has token id {outside[0]}, supported: 0 to {self.vocab_size - 1}")
        if sample.mask is not None and len(sample.mask) != len(sample.response):
            problems.append(
                f"sample {index} has a mask of {len(sample.mask)} for {len(sample.response)} response tokens; "
                "give one entry each"
            )
        flags = [m for m in sample.mask if not _is_flag(m)] if sample.mask is not None else []
        if flags:
            problems.append(f"sample {index} has {flags[0]!r} in its mask, supported: True and False, or 1 and 0")
        return problems

    @cached_property
    def response_lengths(self) -> list[int]:
        return [len(s.response) for s in self.samples]

    @cached_property
    def lengths(self) -> list[int]:
        """Padded length of each sequence."""
        multiple = 1 if self.cp == 1 else 2 * self.cp
        return [-(-(len(s.prompt) + len(s.response)) // multiple) * multiple for s in self.samples]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [sequences + 1], over all ranks' tokens."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)

    @property
    def layout(self) -> str:
        """Name of the CP split in rl-attn; one rank needs no padding."""
        return "contiguous" if self.cp == 1 else "zigzag"

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def loss_mask(self) -> Tensor:
        """bool [response tokens], packed order."""
        mask = [bool(m) for s in self.samples for m in (s.mask if s.mask is not None else [True] * len(s.response))]
        return torch.tensor(mask, dtype=torch.bool)

    @cached_property
    def _packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        start = 0
        for sample, length in zip(self.samples, self.lengths):
            tokens = [*sample.prompt, *sample.response]
            ids += tokens + [0] * (length - len(tokens))
            positions += range(length)
            first = start + len(sample.prompt) - 1
            rows += range(first, first + len(sample.response))
            # a numpy array behind += would be added element by element
            targets.extend(sample.response)
            start += length
        as_tensor = [torch.from_numpy(np.fromiter(x, np.int64, len(x))) for x in (ids, positions, rows, targets)]
        return as_tensor[0], as_tensor[1], as_tensor[2], as_tensor[3]

    def content(self) -> bytes:
        """What tells this batch from any other of the same model: all its numbers, in packed order."""
        parts = [
            torch.tensor([[len(s.prompt), len(s.response)] for s in self.samples]),
            self._packed[0],
            self.loss_mask,
        ]
        return b"".join(host_array(part).tobytes() for part in parts)

    def rank_tokens(self, rank: int) -> Tensor:
        """Which packed tokens a rank holds: of each sequence's ``2 * cp`` chunks the ``rank``-th from both ends.

        Returns int64 ``[T/cp]``.
        """
        return rl_attn.cp_rows(self.cu_seqlens, rank, self.cp, self.layout)

    def for_rank(self, rank: int) -> RankBatch:
        """The part of one context parallel rank, on the host."""
        return self.once(("host", rank), lambda: self._for_rank(rank))

    def _for_rank(self, rank: int) -> RankBatch:
        ids, positions, rows, targets = self._packed
        mine = self.rank_tokens(rank)
        local = torch.full((self.tokens,), -1, dtype=torch.int64)
        local[mine] = torch.arange(mine.numel())
        local_rows = local[rows]
        slots = (local_rows >= 0).nonzero().flatten()
        # ascending rows keep the order of addition in the head's weight gradient that of the packed tokens
        slots = slots[local_rows[slots].argsort()]
        return RankBatch(
            token_ids=ids[mine], positions=positions[mine], rows=local_rows[slots], targets=targets[slots], slots=slots
        )

    def token_shards(self, comm: Communicator, later: LaterShares | None = None) -> TokenShards | None:
        """Where every rank's tokens lie in the batch as one rank would pack it, without padding; None for one rank."""
        if comm.world_size == 1:
            return None
        lengths = torch.tensor([len(s.prompt) + len(s.response) for s in self.samples])
        padded = torch.tensor(self.lengths)
        offset = torch.arange(self.tokens) - (padded.cumsum(0) - padded).repeat_interleave(padded)
        first = (lengths.cumsum(0) - lengths).repeat_interleave(padded)
        places = torch.where(offset < lengths.repeat_interleave(padded), first + offset, -1)
        return TokenShards(comm, [places[self.rank_tokens(rank)] for rank in range(self.cp)], later=later)

    def scored_shards(self, comm: Communicator, later: LaterShares | None = None) -> TokenShards | None:
        """The same for the scored rows: response tokens in packed order."""
        if comm.world_size == 1:
            return None
        return TokenShards(comm, [self.for_rank(rank).slots for rank in range(self.cp)], later=later)

    def on(self, rank: int, device: torch.device) -> RankBatch:
        """``for_rank(rank)`` on ``device``, made once."""
        return self.once(("rank", rank, device), lambda: self.for_rank(rank).to(device))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns, kept with the batch: every layer asks for the same."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    @cached_property
    def _kept(self) -> dict[Hashable, Any]:
        return {}

    def split(self, values: Tensor) -> list[Tensor]:
        """Per-sample views of per-response-token values in packed order."""
        return list(values.split(self.response_lengths))


def _is_row(value: object) -> bool:
    """Whether it has entries in an order of its own: sets and mappings have none that tokens could stand in."""
    if isinstance(value, (str, Set, Mapping)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") and hasattr(value, "__iter__")


def _is_integer(value: object) -> bool:
    if isinstance(value, Tensor):
        if tensor_problem("", value):
            return False
        whole = not value.is_floating_point() and not value.is_complex()
        return value.ndim == 0 and whole and value.dtype != torch.bool
    return whole_number(value)


def _is_flag(value: object) -> bool:
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return tensor_problem("", value) is None
    if isinstance(value, (bool, np.bool_)):
        return True
    return _is_integer(value) and bool(value in (0, 1))


def token_budget_problem(token_budget: int | None) -> str | None:
    """What is wrong with a budget of tokens; None where nothing is."""
    if token_budget is None or (_is_integer(token_budget) and token_budget >= 1):
        return None
    return f"token_budget={token_budget!r}, supported: an integer of 1 and above, or None for one batch"


def micro_batches(
    samples: Sequence[Any], token_budget: int | None, *, vocab_size: int, max_positions: int, cp: int = 1
) -> list[PackedBatch]:
    """Pack samples in order into batches of at most ``token_budget`` tokens; a longer sample is a batch of its own.

    The tokens that context parallelism pads with are not counted: micro-batches, whose gradients are added one after
    the other, are those of one rank.

    Raises:
        ContractError: as ``PackedBatch.pack``, for all samples at once, or a budget below one token.
    """
    whole = PackedBatch.pack(samples, vocab_size=vocab_size, max_positions=max_positions, cp=cp)
    if token_budget is None:
        return [whole]
    if problem := token_budget_problem(token_budget):
        raise ContractError(problem)
    groups: list[list[Sample]] = []
    held = 0
    for sample in whole.samples:
        length = len(sample.prompt) + len(sample.response)
        if not groups or held + length > token_budget:
            groups.append([])
            held = 0
        groups[-1].append(sample)
        held += length
    return [PackedBatch(tuple(g), vocab_size, max_positions, cp) for g in groups]
