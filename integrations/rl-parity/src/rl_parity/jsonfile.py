"""Reading JSON and lines of it: whatever is wrong with a file ends as one error that names it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_contract import ContractError

REPAIR = "restore the file or give a directory as `rl-parity run --out` wrote it"


def read_text(path: Path, repair: str = REPAIR) -> str:
    """The file as UTF-8.

    Raises:
        ContractError: it is missing, cannot be read, or is no UTF-8.
    """
    if not path.is_file():
        raise ContractError(f"{path} is missing; {repair}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} cannot be read ({type(error).__name__}: {error}); {repair}") from error


def parse(path: Path, text: str, line: int | None = None, *, kind: type = dict, repair: str = REPAIR) -> Any:
    """The value that ``text`` of the file holds.

    Raises:
        ContractError: it is empty, no JSON, or of another kind.
    """
    where = str(path) if line is None else f"{path}, line {line}"
    if not text.strip():
        raise ContractError(f"{where} is empty; {repair}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{where} is not whole JSON ({error}); {repair}") from error
    if not isinstance(value, kind):
        wanted = "a JSON object" if kind is dict else kind.__name__
        raise ContractError(f"{where} holds {type(value).__name__}, supported is {wanted}; {repair}")
    return value


def read_object(path: Path, repair: str = REPAIR) -> dict[str, Any]:
    """The JSON object that the file holds; raises as ``read_text`` and ``parse`` do."""
    found: dict[str, Any] = parse(path, read_text(path, repair), repair=repair)
    return found


def read_list(path: Path) -> list[Any]:
    """The JSON list that the file holds; raises as ``read_text`` and ``parse`` do."""
    found: list[Any] = parse(path, read_text(path), kind=list)
    return found


def lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line; raises as ``parse`` does."""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        yield number, parse(path, line, number)


def require(path: Path, data: Mapping[str, Any], kinds: Mapping[str, type], line: int | None = None) -> None:
    """Raise ContractError where a key is missing or of another kind."""
    where = str(path) if line is None else f"{path}, line {line}"
    for key, kind in kinds.items():
        # bool is an int to isinstance
        if type(data.get(key)) is not kind:
            raise ContractError(f"{where}: {key!r} is {data.get(key)!r}, supported is {kind.__name__}; {REPAIR}")
