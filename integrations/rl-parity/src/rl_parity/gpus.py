"""The GPUs of this machine as nvidia-smi lists them; asking creates no CUDA context in this process."""

import os
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from rl_contract import ContractError, MissingSupport
from rl_parity.config import is_count

_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "driver_version")
MIB = 2**20
# compute capability -> the architecture that contracts, plans and certificates are named after
ARCHS = {"9.0": "sm90"}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``index`` is nvidia-smi's, which is CUDA's under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int
    free: int
    capability: str
    driver: str

    @property
    def arch(self) -> str | None:
        return ARCHS.get(self.capability)

    def to_dict(self) -> dict[str, Any]:
        """As the manifest keeps it: without what is free at the moment."""
        return {name: value for name, value in asdict(self).items() if name != "free"}


def _query() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingSupport(f"nvidia-smi lists no GPU ({error}); use --device cpu, or install the driver") from error
    return done.stdout


def parse(text: str) -> list[Gpu]:
    """GPUs from nvidia-smi's CSV.

    Raises:
        MissingSupport: a line that is not what was asked for.
    """
    found = []
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            index, uuid, name, total, free, capability, driver = cells
            found.append(
                Gpu(
                    index=int(index),
                    uuid=uuid,
                    name=name,
                    memory=int(total) * MIB,
                    free=int(free) * MIB,
                    capability=capability,
                    driver=driver,
                )
            )
        except ValueError:
            raise MissingSupport(f"nvidia-smi answered {line!r}, needed is {', '.join(_FIELDS)}") from None
    return found


def visible(gpus: str = "") -> list[Gpu]:
    """The GPUs that a run may use, in the order they are to be used.

    Args:
        gpus: ``"0,2"`` as in ``--gpus``; empty takes those of ``CUDA_VISIBLE_DEVICES``, or all.

    Raises:
        MissingSupport: no driver, or no such GPU. ContractError: not a list of indices, or one given twice.
    """
    there = {gpu.index: gpu for gpu in parse(_query())}
    asked, source = gpus, "--gpus"
    if not asked and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        asked, source = os.environ["CUDA_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES"
        if not asked.strip():
            raise MissingSupport("CUDA_VISIBLE_DEVICES is empty, so no GPU may be used; unset it, or give --gpus")
    if not asked:
        return list(there.values())
    by_uuid = {gpu.uuid: gpu.index for gpu in there.values()}
    out: list[Gpu] = []
    for part in (p.strip() for p in asked.split(",")):
        index = by_uuid.get(part, int(part) if is_count(part) else None)
        if index is None:
            raise ContractError(f"{source} {asked!r}: {part!r} is no index; give e.g. 0,1")
        if index not in there:
            raise MissingSupport(f"{source} {asked!r}: there is no GPU {index}; there are {sorted(there)}")
        if there[index] in out:
            raise ContractError(f"{source} {asked!r} names GPU {index} twice; give each once")
        out.append(there[index])
    return out


def misspelled(asked: str) -> str | None:
    """What is wrong with ``--gpus`` whatever GPUs there are, or None."""
    parts = [part.strip() for part in asked.split(",")] if asked else []
    for part in parts:
        if not is_count(part) and not part.startswith("GPU-"):
            return f"--gpus {asked!r}: {part!r} is no index; give e.g. 0,1"
        if parts.count(part) > 1:
            return f"--gpus {asked!r} names GPU {part} twice; give each once"
    return None


def choose_device(asked: str) -> str:
    """``auto`` as ``cuda`` where a CUDA build of torch sees a GPU, else ``cpu``."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.version.cuda is not None and torch.cuda.is_available() else "cpu"
