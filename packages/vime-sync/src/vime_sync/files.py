"""Files that others wrote: whatever is wrong with one is a ContractError that names it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rl_contract import ContractError

# what opening, decoding and taking apart a damaged file can raise; ContractError is a ValueError
DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, SafetensorError,
)  # fmt: skip


@contextmanager
def reading(what: str, advice: str) -> Iterator[None]:
    """Turn damage found inside into ``ContractError("{what} (the damage); {advice}")``."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, ContractError):
            raise ContractError(f"{what}: {error}") from error
        raise ContractError(f"{what} ({error!r}); {advice}") from error


@contextmanager
def making(what: str) -> Iterator[None]:
    """Turn what a file system does not take, found inside, into ``ContractError``."""
    try:
        yield
    except OSError as error:
        raise ContractError(f"{what} cannot be made ({error}); give a place in a folder that takes files") from error


def path_of(where: str, given: str | os.PathLike[str]) -> Path:
    """The path; ContractError that says what ``where`` was given instead of one."""
    if not isinstance(given, (str, os.PathLike)) or not str(given) or "\0" in str(given):
        raise ContractError(
            f"{where} got the path {given!r:.80}; supported: a str or a pathlib.Path, without null bytes"
        )
    return Path(given)


def read_json(path: Path) -> Any:
    """The document, in UTF-8; raises what ``reading`` turns into a refusal."""
    return json.loads(path.read_bytes().decode("utf-8"))
