"""What the native arm's trainer ran, sitting by sitting: as its ranks reported it, and never a guess."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_parity import imports, sittings
from rl_parity.config import RunConfig
from rl_parity.rundir import RunDirectory

PACKAGE, DISTRIBUTION = "transformer_engine", "transformer-engine"
# what Megatron-core imports in every arm where it is there
OPTIONAL = (PACKAGE, "apex")
_IMPORT = """
import sys
try:
    import rl_megatron.trainer
except BaseException as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
"""
NOT_REPORTED = "native (not reported)"
# what every trainer was before there was the option
_LOCAL = "native (no TransformerEngine)"
_INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]'"


@dataclass(frozen=True)
class Began:
    """The operators that a run's native trainer began with.

    Attributes:
        operators: ``te`` or ``local``; None where nothing tells.
        certain: its ranks said so, or nothing else could have run; otherwise it follows from what was installed.
        name: how pages name it.
    """

    operators: str | None
    certain: bool
    name: str


def reports(run: RunDirectory) -> list[dict[str, Any]]:
    """What the ranks of every sitting reported about themselves, in that order, each thing once.

    Steps of a sitting that reported nothing add one whose name is ``native (not reported)``.
    """
    manifest = run.manifest()
    evidence = run.evidence("native")
    entries = sittings.entries(evidence)
    found = [native for entry in entries for native in _said(entry)]
    if _silent(run, manifest, entries):
        found.append({"name": _LOCAL if _before_the_option(manifest) else NOT_REPORTED})
    return [native for i, native in enumerate(found) if native not in found[:i]]


def names(run: RunDirectory) -> list[str]:
    """Every native trainer that ran, as pages name it."""
    return list(dict.fromkeys(native["name"] for native in reports(run)))


def substitutions(run: RunDirectory) -> list[dict[str, str]]:
    """What the trainers of every sitting ran instead of the engines' own."""
    evidence = run.evidence("native")
    held = [report for entry in sittings.entries(evidence) for report in (entry.get("reports") or {}).values()]
    return [one for report in held for one in report.get("substitutions") or []]


def began(run: RunDirectory) -> Began:
    """What a later sitting of the run has to go on with: states of ``te`` and ``local`` can't be read by each other."""
    manifest = run.manifest()
    said = [native for native in reports(run) if native.get("operators") in ("te", "local")]
    if said:
        return Began(said[-1]["operators"], True, said[-1]["name"])
    config = manifest["config"]
    asked = config.get("native_operators", "local")
    if asked != "auto":
        return Began(asked, True, NOT_REPORTED if asked == "te" else _LOCAL)
    if config.get("device", RunConfig.device) == "cpu" or config.get("placement") == "shared":
        return Began("local", True, _LOCAL)
    # later sittings went on with what the first one ran, whatever was installed by then
    versions = (manifest.get("sittings") or [manifest])[0].get("versions")
    if not isinstance(versions, Mapping) or DISTRIBUTION not in versions:
        return Began(None, False, NOT_REPORTED)
    installed = versions[DISTRIBUTION]
    if installed is None:
        return Began("local", True, _LOCAL)
    return Began("te", False, f"not reported, TransformerEngine {installed} was installed")


def _said(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    held = [report.get("native") for report in (entry.get("reports") or {}).values()]
    return [{**native, "name": native.get("name") or NOT_REPORTED} for native in held if native]


def _before_the_option(manifest: Mapping[str, Any]) -> bool:
    return "native_operators" not in manifest["config"]


def _silent(run: RunDirectory, manifest: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the arm holds steps of a sitting whose trainers did not report, as far as can be told."""
    total = len(run.recorded("native", manifest))
    did = sittings.spans(manifest, "native", total)
    numbered = {entry["sitting"] for entry in entries if "sitting" in entry and _said(entry)}
    unnumbered = [entry for entry in entries if "sitting" not in entry]
    if not unnumbered:
        return any(steps and i not in numbered for i, steps in enumerate(did))
    # older evidence does not say which sitting it is of: each that may have trained needs one
    told = sum(bool(_said(entry)) for entry in unnumbered)
    needed = sum(steps.start < total and i not in numbered for i, steps in enumerate(did))
    return told < max(needed, len(unnumbered))


def _located() -> ModuleSpec | None:
    try:
        return find_spec(PACKAGE)
    except ValueError:
        # this process holds a stand-in; workers will look for themselves
        return PathFinder.find_spec(PACKAGE)


def _problem(spec: ModuleSpec | None) -> str | None:
    """Why TransformerEngine can't serve here, as far as can be seen without importing it; None where nothing is."""
    if spec is None:
        return f"package {DISTRIBUTION} is not installed"
    folders = list(spec.submodule_search_locations or [])
    if spec.origin is None or not folders:
        return f"{PACKAGE} is found at {', '.join(folders) or spec.origin}, which is no package (no __init__.py)"
    if PathFinder.find_spec(f"{PACKAGE}.pytorch", folders) is None:
        return f"{PACKAGE} at {folders[0]} lacks its part for PyTorch"
    if _distribution() is None and "__version__" not in _text(Path(spec.origin)):
        return f"{PACKAGE} at {folders[0]} has no version: no dist-info of {DISTRIBUTION} is installed"
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.suffix == ".py" and path.is_file() else ""


def _distribution() -> str | None:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def version() -> str | None:
    """Of the TransformerEngine that trainers can import here; None where there is none. It is not imported."""
    return None if _problem(_located()) is not None else _distribution() or "of no known version"


def violations(c: RunConfig, going_on: Began | None = None) -> Iterator[str]:
    """What is wrong here with TransformerEngine, where the run needs it, or where it would break Megatron-core.

    Args:
        going_on: of a resumed run, what its native trainer began with.
    """
    spec = _located()
    problem = _problem(spec)
    if problem is None:
        return
    if c.native_operators == "te" and c.arm != "strict":
        if going_on is not None:
            yield (
                f"the run's native trainer ran TransformerEngine ({going_on.name}), and a run goes on with the "
                f"operators that it began with; {problem}; {_INSTALL}"
            )
        else:
            yield f"--native-operators te: {problem}; {_INSTALL}, or use local or auto"
    elif spec is not None:
        yield f"{problem}; Megatron-core imports it in every arm and fails; mend it ({_INSTALL}) or remove it"


def import_violations() -> Iterator[str]:
    """Why the trainer can't be imported beside an optional package of Megatron-core's that is installed here.

    What breaks as it is imported is seen by an import alone, in a process of its own; without such a package there is
    nothing to ask.
    """
    if all(PathFinder.find_spec(name) is None for name in OPTIONAL) or PathFinder.find_spec("rl_megatron") is None:
        return
    if (problem := imports.failure(_IMPORT)) is not None:
        yield problem
