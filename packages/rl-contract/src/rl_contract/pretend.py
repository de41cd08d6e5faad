"""A GPU that is not there, for a process of its own: operators on CPU tensors take their way for a GPU, to the launch.

Triton's kernels are compiled for the GPU, and a launch is noted in place of run; so tests see what would be launched,
and ``tools/host_costs`` what an operator costs the host. Results hold whatever was in memory.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rl_contract import opaque
from rl_contract.dry_run import SHARED_LIMIT, TARGETS
from rl_contract.errors import ContractError


class Noted(NamedTuple):
    """One launch. Tensors are noted by address, descriptors by that of their tensor, its shape, strides and block."""

    name: str
    function: int
    """Which loaded binary."""
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]


class _Driver:
    """As much of a Triton driver as compiling and launching ask for."""

    def __init__(self, arch: str, launched: list[Noted] | None) -> None:
        self.utils, self._arch, self._launched, self._loaded = self, arch, launched, 0
        self.device, self.stream = 0, 7

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        self._loaded += 1
        return 0, self._loaded, 32, 0, 1024

    def unload_module(self, _: int) -> None:
        pass

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self._arch], "multiprocessor_count": 132}

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGETS[self._arch])

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def launcher_cls(self, _source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            if self._launched is not None:
                arguments = tuple(map(_plain, rest[4:]))
                self._launched.append(Noted(metadata.name, function, (x, y, z), stream, arguments))

        return launch


def _plain(value: Any) -> Any:
    if hasattr(value, "base"):
        return _plain(value.base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def pretend_gpu(arch: str = "sm90", *, note: bool = True) -> tuple[Any, list[Noted]]:
    """Make this process one with such a GPU, for good: before any kernel package is imported.

    Args:
        note: whether launches are noted; without, a launch is a call that does nothing.

    Returns:
        The driver, whose current ``device`` and ``stream`` may be set, and the list of launches, which grows.

    Raises:
        ContractError: operators were defined already; they keep the kernels of their devices.
    """
    if opaque._libraries:
        raise ContractError(
            f"pretend_gpu got a process with operators of {sorted(opaque._libraries)}; supported: one that has "
            "imported no kernel package yet; call it first"
        )
    from triton.runtime import driver

    launched: list[Noted] = []
    active = _Driver(arch, launched if note else None)
    driver.set_active(active)
    opaque._DISPATCH_KEYS.update(cpu="CUDA", cuda="CPU")
    number = TARGETS[arch][1]
    major, minor = divmod(number, 10) if isinstance(number, int) else (9, 4)
    properties = SimpleNamespace(
        major=major, minor=minor, multi_processor_count=132, name=f"pretended {arch}", gcnArchName=arch
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_name = lambda *_: properties.name
    cuda.is_current_stream_capturing = lambda: False
    return active, launched


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16, off: int = 0) -> torch.Tensor:
    """A CPU tensor that lies as a GPU's allocator puts one, on a multiple of 512 bytes, and ``off`` bytes behind it."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    room = torch.empty(size + 512 + off, dtype=torch.uint8)
    first = -room.data_ptr() % 512 + off
    return room[first : first + size].view(dtype).view(shape)
