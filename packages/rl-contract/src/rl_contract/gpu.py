"""What every package with GPU kernels asks of a device, and of an installation that may have no Triton."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from rl_contract.errors import MissingSupport


def arch_of(device_index: int, supported: Collection[str], package: str) -> str:
    """Name of the device's contracts, as ``sm90`` or ``gfx942``, one of ``supported``.

    Raises:
        MissingSupport: any other device; ``package`` is who has no contract for it.
    """
    properties = torch.cuda.get_device_properties(device_index)
    hip = torch.version.hip is not None
    name = properties.gcnArchName.split(":")[0] if hip else f"sm{properties.major}{properties.minor}"
    if name not in supported:
        raise MissingSupport(f"{package} got a {properties.name} ({name}); supported GPUs: {supported}")
    return name


@cache
def processors_of(device_index: int) -> int:
    """Multiprocessors or compute units of the device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@contextmanager
def needs_triton(package: str) -> Iterator[None]:
    """Around the import of kernels of ``package``.

    Raises:
        MissingSupport: an import inside fails, as all of these do where Triton is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingSupport(
            f"{package} on a GPU needs Triton ({error}); install a PyTorch build with Triton"
        ) from error
