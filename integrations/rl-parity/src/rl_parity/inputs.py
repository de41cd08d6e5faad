"""What a run reads beside weights: prompts, and what the model's folder says of itself and of its tokenizer.

The manifest has the sha256 of each as the run began (``manifest.INPUTS``), so that no later sitting goes on with
another one. A built-in model is made before anything reads it, and what is made is known before.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_contract import ContractError
from rl_parity import data
from rl_parity.config import RunConfig
from rl_parity.digests import apart
from rl_parity.jsonfile import REPAIR
from rl_parity.manifest import INPUTS, read_config
from rl_parity.models import spec_of, write_description
from rl_parity.rundir import MANIFEST, RunDirectory

PROMPTS, MODEL = "prompts", "model/"
# what engines, trainer and the encoding of prompts may read in a checkpoint folder; weights have a digest of their own
_OF_A_MODEL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
)


def has_copy(root: Path) -> bool:
    """Whether anything of a run's own copy of a built-in model is there; one that is gone is made again."""
    folder = root / "model"
    return any(folder.iterdir()) if folder.is_dir() else folder.exists() or folder.is_symlink()


def digests(root: Path, config: RunConfig, *, prompts: bool = True) -> dict[str, str]:
    """sha256 of the file of prompts, as ``prompts``, and of what describes the model, as ``model/NAME``, if there.

    Args:
        prompts: also of the prompts.

    Raises:
        ContractError: one cannot be read.
    """
    found = {}
    if prompts and config.prompts not in data.BUILT_IN and not config.prompts.startswith(data.RANDOM):
        found[PROMPTS] = _sha256(Path(config.prompts))
    spec = spec_of(config.model)
    if spec is None or has_copy(root):
        return found | _of_model(folder_of(root, config))
    with tempfile.TemporaryDirectory() as made:
        write_description(spec, Path(made))
        return found | _of_model(Path(made))


def folder_of(root: Path, config: RunConfig) -> Path:
    """Where a run's model is: a built-in one has a copy in the directory of the run."""
    return Path(config.model) if spec_of(config.model) is None else root / "model"


def check(run: RunDirectory, config: RunConfig, manifest: Mapping[str, Any], *, prompts: bool = True) -> None:
    """Raise ContractError where one is not what the run began with; an older run, whose manifest tells none, passes.

    Arguments as for ``digests``.
    """
    if INPUTS not in manifest:
        return
    told = {name: digest for name, digest in manifest[INPUTS].items() if prompts or name != PROMPTS}
    found = digests(run.root, config, prompts=prompts)
    for name in sorted(told.keys() | found.keys()):
        if told.get(name) != found.get(name):
            raise ContractError(_another(run.root, config, name, told.get(name), found.get(name)))


def check_copy(run: RunDirectory, manifest: Mapping[str, Any]) -> None:
    """``check`` of the run's own copy of a built-in model alone, which is there."""
    check(run, read_config(run.root / MANIFEST, manifest), manifest, prompts=False)


def _another(root: Path, config: RunConfig, name: str, told: str | None, found: str | None) -> str:
    if name == PROMPTS:
        if told is None or found is None:
            which = "lacks" if told is None else "has"
            return f"{root / MANIFEST} {which} the sha256 of prompts in {INPUTS}, they are {config.prompts}; {REPAIR}"
        path, remedy = Path(config.prompts), "give the file that the run began with"
    else:
        path, remedy = folder_of(root, config) / name.removeprefix(MODEL), "give the same checkpoint, undamaged"
    if spec_of(config.model) is not None and name != PROMPTS:
        remedy = f"restore it, or remove {path.parent}, it is made again"
        if not has_copy(root):
            ours, began = apart(found, told)
            return (
                f"{path} is gone, and these packages make one of sha256 {ours}, the run began with {began}; restore "
                f"{path.parent}, or resume with the packages that the run began with"
            )
    if found is None:
        return f"{path} is missing, the run began with it; {remedy}"
    if told is None:
        return f"{path} was not there when the run began; remove it"
    now, began = apart(found, told)
    return f"{path} has sha256 {now}, the run began with {began}; {remedy}"


def _of_model(folder: Path) -> dict[str, str]:
    return {f"{MODEL}{name}": _sha256(folder / name) for name in _OF_A_MODEL if (folder / name).is_file()}


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ContractError(f"{path} cannot be read ({error}); make it readable, or {REPAIR}") from error
