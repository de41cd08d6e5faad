"""Optional packages that Megatron-core imports where it finds them: which of them an error of its import comes from."""

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import NamedTuple


class _Optional(NamedTuple):
    name: str
    package: str
    distributions: str
    works: str


_TE = _Optional(
    "TransformerEngine",
    "transformer_engine",
    "transformer-engine transformer-engine-torch",
    "import transformer_engine.pytorch",
)
_APEX = _Optional("Apex", "apex", "apex", "import apex")
_KNOWN = {"transformer_engine": _TE, "transformer_engine_torch": _TE, "apex": _APEX, "amp_C": _APEX}
# functions of Megatron that read a version
_READERS = {"get_te_version": _TE, "is_te_min_version": _TE}


def broken_installation(error: BaseException) -> str | None:
    """What to say where importing Megatron-core failed by an optional package that it imports; None where it did not.

    Megatron-core takes an installation that raises anything but ImportError, has no version or not all its parts for
    one that serves, so nothing of this package can fall back to another arm.
    """
    for cause in _chain(error):
        if found := _culprit(cause):
            return (
                f"megatron-core imports {found.name}, whose installation ({_place(found.package)}) is broken: "
                f"{type(cause).__name__}: {cause}; no arm can run beside it: remove it (pip uninstall "
                f"{found.distributions}), take the folder from the path, or install one that fits this torch and "
                f"CUDA, so that '{found.works}' works"
            )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[int] = []
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.append(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _culprit(cause: BaseException) -> _Optional | None:
    # what Megatron asked of the package itself
    if found := _known(getattr(cause, "obj", None)):
        return found
    # its own code runs, or Megatron's that asks for its version; the outermost one imported the others
    for frame, _ in walk_tb(cause.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if found := _KNOWN.get(package) or _READERS.get(frame.f_code.co_name):
            return found
        # a module of Megatron's that compares its version as it is imported
        held = map(_known, frame.f_globals.values()) if package == "megatron" else iter(())
        if type(cause).__name__ == "InvalidVersion" and (found := next(filter(None, held), None)):
            return found
    if isinstance(cause, SyntaxError):
        # no line of it has run
        return next((_KNOWN[part] for part in Path(cause.filename or "").parts if part in _KNOWN), None)
    if not isinstance(cause, ImportError):
        return None
    name = (cause.name or "").replace("-", "_")
    # one that is not there at all is what Megatron expects, and handles
    absent = isinstance(cause, ModuleNotFoundError) and not isinstance(cause, metadata.PackageNotFoundError)
    if absent and name in _KNOWN:
        return None
    return _KNOWN.get(name.partition(".")[0])


def _known(module: object) -> _Optional | None:
    return _KNOWN.get(module.__name__.partition(".")[0]) if isinstance(module, ModuleType) else None


def _place(package: str) -> str:
    try:
        spec = find_spec(package)
    except ValueError:
        spec = None
    found = None if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or ())
    return found or "at no known place"
