"""Which version produced which generated tokens of one sample: contiguous spans that cover every token exactly."""

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_contract import ContractError


@dataclass(frozen=True)
class Span:
    """Generated tokens ``start <= i < end`` of a sample came from ``version`` (the label an engine stamped on them)."""

    version: str
    start: int
    end: int

    @classmethod
    def of(cls, span: Any) -> "Span":
        """From a tuple ``(version, start, end)`` or an engine's object with these attributes."""
        if isinstance(span, (tuple, list)) and len(span) == 3:
            version, start, end = span
        else:
            try:
                version, start, end = span.version, span.start, span.end
            except AttributeError as error:
                raise ContractError(f"{span!r} is no version span; give (version, start, end)") from error
        if not (whole_number(start) and whole_number(end)):
            raise ContractError(f"version span {(version, start, end)!r}; its start and end must be integers")
        return cls(str(version), int(start), int(end))


def check_spans(spans: Iterable[Any], generated: int) -> tuple[Span, ...]:
    """The spans in order, provided that they cover tokens 0 to ``generated`` exactly: no gap, overlap or empty span."""
    if not whole_number(generated) or generated < 0:
        raise ContractError(f"generated={generated!r}; give the number of generated tokens, an integer of 0 or more")
    if isinstance(spans, (str, bytes)) or not isinstance(spans, Iterable):
        raise ContractError(f"version spans are {spans!r:.80}; supported: a sequence of (version, start, end)")
    found = tuple(Span.of(span) for span in spans)
    at = 0
    for span in found:
        if span.start != at or span.end <= span.start:
            kind = "gap" if span.start > at else "overlap" if span.start < at else "empty span"
            raise ContractError(f"version spans {_brief(found)} have a {kind} at token {at} of {generated}")
        at = span.end
    if at != generated:
        raise ContractError(f"version spans {_brief(found)} cover {at} tokens, the sample has {generated}")
    return found


def spans_from_pauses(starts: Sequence[tuple[int, str]], generated: int) -> tuple[Span, ...]:
    """Spans for an engine that stamps none: ``starts`` lists, in order, the number of tokens a request had when each
    version began to serve it. Versions under which no token was made leave no span; neighbours of one version join."""
    if not isinstance(starts, Sequence) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and whole_number(pair[0]) for pair in starts
    ):
        raise ContractError(f"pause boundaries are {starts!r:.80}; supported: a list of (tokens, version)")
    if not whole_number(generated):
        raise ContractError(f"generated={generated!r}; give the number of generated tokens, an integer of 0 or more")
    merged: list[Span] = []
    ends = [at for at, _ in starts[1:]] + [generated]
    for (start, version), end in zip(starts, ends):
        if end < start:
            raise ContractError(f"pause boundaries {list(starts)} do not ascend up to {generated} tokens")
        if merged and merged[-1].version == version:
            merged[-1] = Span(version, merged[-1].start, end)
        elif end > start:
            merged.append(Span(version, start, end))
    return check_spans(merged, generated)


def whole_number(value: Any) -> bool:
    """An integer of any library; True is none, nor is 2.0, nor an array that holds one."""
    try:
        operator.index(value)
    except (TypeError, ValueError):
        return False
    # a library's own bool and a tensor of one element pass as an index
    boolean = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    return not boolean and getattr(value, "ndim", 0) == 0


def token_ids_of(where: str, token_ids: Iterable[Any]) -> list[int]:
    """The ids as integers.

    Raises:
        ContractError: one is no integer or is negative, or these are no list of numbers, as text or bytes.
    """
    if isinstance(token_ids, (str, bytes, bytearray)) or not isinstance(token_ids, Iterable):
        raise ContractError(f"{where}: token ids are {token_ids!r}; supported: a sequence of integers of 0 or more")
    if isinstance(token_ids, list) and set(map(type, token_ids)) == {int} and min(token_ids) >= 0:
        # what engines give, a hundred thousand ids a step
        return token_ids.copy()
    found: list[int] = []
    for at, value in enumerate(token_ids):
        if not whole_number(value) or value < 0:
            raise ContractError(f"{where}: token id {value!r} at {at}; supported: integers of 0 or more")
        found.append(int(value))
    return found


def tokens_digest(token_ids: Sequence[int]) -> str:
    """Hex sha256 of token ids, as decimal numbers joined by commas.

    Raises:
        ContractError: one is no integer or is negative, as ``StepLedger`` refuses it.
    """
    return hashlib.sha256(",".join(map(str, token_ids_of("tokens_digest", token_ids))).encode()).hexdigest()


def _brief(spans: Sequence[Span]) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in spans[:6]]
