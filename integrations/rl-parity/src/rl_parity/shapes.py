"""What a run's evidence, pushes and sittings are made of: what is something else ends as one error that names it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_contract import ContractError
from rl_parity.jsonfile import REPAIR

# what is wrong with a value, by where it stands
_Shape = Callable[[str, Any], Iterator[str]]


def check_evidence(path: Path, evidence: Mapping[str, Any]) -> None:
    """Raise ContractError where the evidence of one arm, or of an earlier sitting in it, holds what no worker said."""
    _refuse(path, _sitting_evidence("", evidence))
    _refuse(path, _optional("earlier", evidence, _list(_sitting_evidence)))


def check_sync(path: Path, rows: Sequence[Any]) -> None:
    """Raise ContractError where a row is no state of a push."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in ("state", "version")):
            raise ContractError(f"{path} holds what is no state of a push ([{index}] is {_short(row)}); {REPAIR}")


def check_sittings(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ContractError where ``sittings`` is no list of them, or one begins at what is no step, or where what the
    run was made with is no mapping.
    """
    _refuse(path, _optional("sittings", manifest, _list(_sitting)))
    for section in ("versions", "hardware"):
        _refuse(path, _optional(section, manifest, _mapping))


def _refuse(path: Path, problems: Iterator[str]) -> None:
    for problem in problems:
        raise ContractError(f"{path}: {problem}; {REPAIR}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of(kind: type, words: str) -> _Shape:
    def shape(where: str, value: Any) -> Iterator[str]:
        # bool is an int to isinstance
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            yield f"{where!r} is {_short(value)}, supported is {words}"

    return shape


_mapping, _text, _step = _of(dict, "a mapping"), _of(str, "text"), _of(int, "a whole number")


def _list(each: _Shape) -> _Shape:
    def shape(where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{where!r} is {_short(value)}, supported is a list"
            return
        for index, item in enumerate(value):
            yield from each(f"{where}[{index}]", item)

    return shape


def _by_name(each: _Shape) -> _Shape:
    def shape(where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where!r} is {_short(value)}, supported is a mapping"
            return
        for name, item in value.items():
            yield from each(f"{where}.{name}", item)

    return shape


def _optional(where: str, holder: Mapping[str, Any], shape: _Shape) -> Iterator[str]:
    """``where`` ends with the key; one that is not there, or null, says nothing."""
    value = holder.get(where.rpartition(".")[2])
    if value is not None:
        yield from shape(where, value)


def _fields(**shapes: _Shape) -> _Shape:
    """A mapping in which these keys, where they are there, have these shapes."""

    def shape(where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where!r} is {_short(value)}, supported is a mapping"
            return
        for key, each in shapes.items():
            yield from _optional(f"{where}.{key}" if where else key, value, each)

    return shape


def _operators(where: str, value: Any) -> Iterator[str]:
    if value not in ("te", "local"):
        yield f"{where!r} is {_short(value)}, supported is te or local"


def _save(where: str, value: Any) -> Iterator[str]:
    """A saved state: its step and the digest of its weights."""
    if not isinstance(value, dict) or type(value.get("step")) is not int or not isinstance(value.get("digest"), str):
        yield f"{where!r} is {_short(value)}, supported is the step and the digest of a saved state"


_report = _fields(substitutions=_list(_by_name(_text)), native=_fields(name=_text, operators=_operators))
_sitting_evidence = _fields(
    # counts of launches are held against the run by rl_parity.bound
    train=_mapping,
    rollout=_mapping,
    reports=_by_name(_report),
    missing=_list(_text),
    saves=_list(_save),
    weights=_mapping,
    sitting=_step,
)
_sitting = _fields(
    from_step=_by_name(_step),
    done_again=_by_name(_list(_mapping)),
    save_every=_step,
    versions=_mapping,
    hardware=_mapping,
)
