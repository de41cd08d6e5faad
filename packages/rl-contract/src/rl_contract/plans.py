"""Plan files: frozen launch choices that ship with a kernel package, one JSON file per architecture, never timed.

A plan chooses among things that leave the bits alone; a file that asks for anything else is refused by name.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rl_contract.errors import ContractError


class _HasArch(Protocol):
    @property
    def arch(self) -> str: ...


P = TypeVar("P", bound=_HasArch)
R = TypeVar("R")
# a row of any size says 2**62
MOST = 2**62
# beyond these no GPU launches anything
_LIMITS = {
    "block_m": 1024, "block_n": 1024, "block_k": 1024, "warps": 32, "stages": 64, "group_m": 1024, "per_sm": 64,
    "parts": 64, "slices": 64, "programs": 64, "unroll": 64, "max_registers": 255,
}  # fmt: skip
_WORDS = {
    int: "a whole number from 0 to 2**62",
    bool: "true or false",
    str: "a word",
    Mapping: "an object",
    list: "a list",
}


def refuse_fields(given: Collection[str], known: Collection[str], forbidden: Collection[str], where: str) -> None:
    """Raises ContractError where ``given`` holds a field that decides the bits, or one that is not known."""
    unknown = set(given) - set(known)
    bad = sorted(unknown & set(forbidden))
    if bad:
        raise ContractError(
            f"{where} asks to change {bad}, which decides the bits; a plan may set {sorted(known)} only"
        )
    if unknown:
        raise ContractError(f"{where} has unknown fields {sorted(unknown)}; supported: {sorted(known)}")


def check_fields(data: Any, types: Mapping[str, Any], needed: Collection[str], where: str) -> None:
    """Raises ContractError naming every field of ``needed`` that ``data`` lacks and every one of another type.

    Types: ``int`` (0 to 2**62), ``bool``, ``str``, ``Mapping`` or ``list``.
    """
    if not isinstance(data, Mapping):
        raise ContractError(f"{where} is {str(data)[:40]!r}; supported: an object with {sorted(types)}")
    problems = [f"lacks {name!r}" for name in sorted(needed) if name not in data]
    for name, kind in types.items():
        value = data.get(name)
        fits = isinstance(value, kind) and (kind is not int or (not isinstance(value, bool) and 0 <= value <= MOST))
        if name in data and not fits:
            problems.append(f"{name}={value!r}, supported: {_WORDS[kind]}")
    if problems:
        raise ContractError(f"{where}: " + "; ".join(problems) + "; mend the file")


def limit_problems(record: Any) -> list[str]:
    """One line for every number of a launch shape that no GPU can launch."""
    return [
        f"{name}={getattr(record, name)!r}, supported: at most {most}"
        for name, most in _LIMITS.items()
        if getattr(record, name, 0) > most
    ]


def build(record: type[R], data: Any, forbidden: Collection[str], where: str) -> R:
    """The dataclass ``record`` from one object of a plan file, every field's name and type checked."""
    known = {f.name: f.type for f in fields(record)}  # type: ignore[arg-type]
    needed = [f.name for f in fields(record) if f.default is MISSING]  # type: ignore[arg-type]
    if isinstance(data, Mapping):
        refuse_fields(data, known, forbidden, where)
    check_fields(data, known, needed, where)
    try:
        return record(**data)
    except ContractError as error:
        raise ContractError(f"{where}: {error}") from error


class PlanFiles(Generic[P]):
    """The plan files of one package.

    Args:
        package: import name of the package whose folder ``plans`` holds ``<arch>.json``.
        parse: checks and builds plans from the file's content and a name for messages.
        fallback: architecture whose file serves one that has none of its own; None where there is no such file.
    """

    def __init__(self, package: str, parse: Callable[[Mapping[str, Any], str], P], fallback: str | None = None) -> None:
        self._package, self._parse, self._fallback = package, parse, fallback
        self._shipped: dict[str, P] = {}
        # plans put in place of shipped ones in this process, by architecture
        self.own: dict[str, P] = {}

    def read(self, path: str | Path) -> P:
        """The plans in the file ``path``.

        Raises:
            ContractError: no file that can be read, no JSON object in UTF-8, or not a valid plan; names the file.
        """
        if not isinstance(path, (str, Path)):
            raise ContractError(f"{self._package} got plan file {path!r}; supported: a path")
        return self._load(Path(path))

    def _load(self, path: Path | Traversable) -> P:
        remedy = f"supported: a plan file of {self._package}, a JSON object as in its folder plans; write it again"
        try:
            data = json.loads(path.read_bytes().decode())
        except OSError as error:
            raise ContractError(f"{path} cannot be read: {error}; {remedy}") from error
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{path} holds no JSON: {error}; {remedy}") from error
        if not isinstance(data, dict):
            raise ContractError(f"{path} holds a JSON {type(data).__name__}; {remedy}")
        try:
            return self._parse(data, path.name)
        except (LookupError, TypeError, AttributeError) as error:
            raise ContractError(f"{path} is no valid plan: {type(error).__name__}: {error}; {remedy}") from error

    def shipped(self, arch: str) -> P:
        """The plans of ``arch`` that come with the package.

        Raises:
            ContractError: the package ships none, or the file is not a valid plan.
        """
        if arch not in self._shipped:
            room = files(self._package) / "plans"
            path = room / f"{arch}.json"
            if not path.is_file() and self._fallback is not None:
                path = room / f"{self._fallback}.json"
            if not path.is_file():
                there = sorted(p.name.removesuffix(".json") for p in room.iterdir() if p.name.endswith(".json"))
                raise ContractError(f"{self._package} has no plans for {arch!r}, supported: {there}")
            self._shipped[arch] = self._load(path)
        return self._shipped[arch]

    def use(self, plans: P) -> None:
        """Replace the shipped plans of ``plans.arch`` in this process, e.g. by those ``tools/certify`` wrote.

        Raises:
            ContractError: no plans, e.g. the path of a file.
        """
        if not isinstance(getattr(plans, "arch", None), str):
            raise ContractError(f"{self._package} got plans {plans!r}; supported: what its plans.read(path) returns")
        self.own[plans.arch] = plans

    def current(self, arch: str) -> P:
        return self.own.get(arch) or self.shipped(arch)
