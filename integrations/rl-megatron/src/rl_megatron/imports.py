"""Importing a module of this package where Megatron-core is missing or broken: one error that says what to do.

Python imports the package before any of its modules, so a finder that the package installs sees every one of them,
whichever is asked for first. It finds modules of this package alone, as Python would.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from rl_contract import MissingSupport
from rl_megatron.installations import broken_installation


def missing(name: str, error: BaseException) -> MissingSupport | None:
    """What to raise from the import of ``name`` in place of ``error``; None where neither Megatron-core is missing nor
    an optional package of its broken.
    """
    # of a module that another one imports: the outermost name is the one that was asked for
    cause = error.__cause__ if isinstance(error, MissingSupport) and error.__cause__ is not None else error
    said = None
    if isinstance(cause, ModuleNotFoundError) and (cause.name or "").split(".")[0] == "megatron":
        said = (
            f"{name} needs megatron-core, which is not installed ({cause}); supported: 0.16.1 and above; "
            "pip install 'megatron-core>=0.16.1'"
        )
    elif broken := broken_installation(cause):
        said = f"{name}: {broken}"
    if said is None:
        return None
    found = MissingSupport(said)
    found.__cause__ = cause
    return found


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception as error:
            if found := missing(module.__name__, error):
                raise found from found.__cause__
            raise


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("rl_megatron."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Have the errors of every import of a module of this package named; once is enough."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
