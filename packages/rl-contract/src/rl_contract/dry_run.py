"""Triton launches compiled for a GPU that is not there, for tests: what production code would launch, and its needs.

with no_gpu("sm90") as built:
    launch(...)  # on CPU tensors, which nothing reads
assert all(b.shared <= SHARED_LIMIT["sm90"] and b.spilled == 0 for b in built)
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
# bytes of shared memory (LDS) that one program may have
SHARED_LIMIT = {"sm90": 232448, "gfx942": 65536, "gfx950": 163840}


@dataclass(frozen=True, kw_only=True)
class Built:
    """One compiled launch."""

    name: str
    shared: int
    """Bytes of shared memory of one program."""
    spilled: int
    """sm90: bytes of stack a thread; gfx: spilled vector registers."""
    text: str
    """PTX or AMD assembly."""


class _NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGETS[self._arch])

    def get_current_device(self) -> str:
        # Triton keeps what it compiled by device
        return f"no {self._arch}"

    def get_current_stream(self, device: str) -> int:
        return 0


def _stack(cubin: bytes) -> int:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+)", report)
    assert found, f"cuobjdump names no stack: {report}"
    return max(map(int, found))


def _built(kernel: Any) -> Built:
    asm = kernel.asm
    if "cubin" in asm:
        text, spilled = asm["ptx"], _stack(asm["cubin"])
    else:
        text = asm["amdgcn"]
        found = re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)
        assert found, "the compiler's report has no spill count"
        spilled = max(map(int, found))
    return Built(name=kernel.metadata.name, shared=kernel.metadata.shared, spilled=spilled, text=text)


@contextmanager
def no_gpu(arch: str) -> Iterator[list[Built]]:
    """Inside, every Triton launch is compiled for ``arch`` with the arguments it was given, listed, and not run.

    Not for a process that uses a GPU: the driver is replaced.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    built: list[Built] = []
    run, hip = JITFunction.run, torch.version.hip

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        built.append(_built(kernel))
        return kernel

    driver.set_active(_NoDevice(arch))
    JITFunction.run = compiled
    torch.version.hip = "none" if arch.startswith("gfx") else None
    try:
        yield built
    finally:
        JITFunction.run, torch.version.hip = run, hip
        driver.set_active(None)
