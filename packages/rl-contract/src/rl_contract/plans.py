"""Plan files: frozen launch choices that ship with a kernel package, one JSON file per architecture, never timed.

A plan chooses among things that leave the bits alone; a file that asks for anything else is refused by name.
"""

import json
from collections.abc import Callable, Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rl_contract.errors import ContractError


class _HasArch(Protocol):
    @property
    def arch(self) -> str: ...


P = TypeVar("P", bound=_HasArch)


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

    def read(self, path: Path) -> P:
        return self._parse(json.loads(path.read_text()), path.name)

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
            self._shipped[arch] = self._parse(json.loads(path.read_text()), path.name)
        return self._shipped[arch]

    def use(self, plans: P) -> None:
        """Replace the shipped plans of ``plans.arch`` in this process, e.g. by those ``tools/certify`` wrote."""
        self.own[plans.arch] = plans

    def current(self, arch: str) -> P:
        return self.own.get(arch) or self.shipped(arch)
