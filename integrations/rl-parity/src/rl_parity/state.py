"""What a trainer must keep to go on in a later sitting: one file a rank, one description, there whole or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError
from rl_parity.digests import apart
from rl_parity.jsonfile import read_object
from vime_sync import tensor_digests

DESCRIPTION = "state.json"
_REPAIR = "resume from another copy of the run directory, or start the run again"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved state: ``step`` is the next step to do, ``digest`` that of the weights which it will push.

    ``ranks`` holds each rank's digest, in rank order.
    """

    folder: Path
    run_id: str
    step: int
    digest: str
    ranks: tuple[str, ...]


def write_rank(folder: Path, rank: int, state: Mapping[str, Any]) -> dict[str, str]:
    """Write one rank's nested state of tensors and numbers; returns ``{"file", "digest"}``."""
    from safetensors.torch import save_file

    tensors, numbers = {}, {}
    for name, value in _flat(state):
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach().contiguous().cpu()
        else:
            numbers[name] = value
    path = folder / f"rank-{rank:03d}.safetensors"
    save_file(tensors, str(path), metadata={"numbers": json.dumps(numbers)})
    _sync(path)
    return {"file": path.name, "digest": _digest(tensors, numbers)}


def read_rank(folder: Path, rank: int, digest: str) -> dict[str, Any]:
    """What ``write_rank`` wrote, nested again.

    Raises:
        ContractError: the file is missing, unreadable, or does not have that digest.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / f"rank-{rank:03d}.safetensors"
    try:
        with safe_open(str(path), framework="pt") as file:
            numbers = json.loads((file.metadata() or {})["numbers"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ContractError(f"{path} cannot be read ({type(error).__name__}: {error}); {_REPAIR}") from error
    if (found := _digest(tensors, numbers)) != digest:
        now, told = apart(found, digest)
        raise ContractError(f"{path} has digest {now}, {DESCRIPTION} says {told}; {_REPAIR}")
    out: dict[str, Any] = {}
    for name, value in (*tensors.items(), *numbers.items()):
        *above, last = name.split("/")
        at = out
        for key in above:
            at = at.setdefault(key, {})
        at[last] = value
    return out


def begin(root: Path, step: int) -> Path:
    """An empty folder for the ranks to write to; ``finish`` makes it count."""
    folder = root / f".step-{step:05d}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def finish(folder: Path, *, run_id: str, step: int, digest: str, ranks: Sequence[Mapping[str, str]]) -> Saved:
    """Describe what the ranks wrote, put it in its place in one move, and remove older states."""
    own = tuple(rank["digest"] for rank in ranks)
    described = {"run_id": run_id, "step": step, "digest": digest, "ranks": list(own)}
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    _sync(folder / DESCRIPTION)
    target = folder.parent / _name(step)
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)
    for other in folder.parent.iterdir():
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return Saved(folder=target, run_id=run_id, step=step, digest=digest, ranks=own)


def _name(step: int) -> str:
    return f"step-{step:05d}"


def latest(root: Path) -> Saved | None:
    """The newest whole state under ``root``, or None.

    Raises:
        ContractError: its description cannot be read, or is of another step than its folder.
    """
    found = sorted(path for path in root.glob("step-*") if (path / DESCRIPTION).is_file()) if root.is_dir() else []
    if not found:
        return None
    path = found[-1] / DESCRIPTION
    try:
        data = read_object(path, _REPAIR)
        step = data["step"]
        if type(step) is not int or found[-1].name != _name(step):
            raise ContractError(f"{path} says step {step!r}, its folder is {found[-1].name}; {_REPAIR}")
        return Saved(
            folder=found[-1],
            run_id=str(data["run_id"]),
            step=step,
            digest=str(data["digest"]),
            ranks=tuple(str(digest) for digest in data["ranks"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"{path} cannot be read ({type(error).__name__}: {error}); {_REPAIR}") from error


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if "/" in str(key):
                raise ContractError(f"state key {key!r} holds a slash, which separates levels; rename it")
            yield from _flat(inner, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def _digest(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> str:
    lines = [f"{name}={digest}" for name, digest in sorted(tensor_digests(tensors.items()))]
    lines += [f"{name}={value!r}" for name, value in sorted(numbers.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
