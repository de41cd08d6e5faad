"""What Megatron-core asks of CUDA, answered where the trainer runs on the CPU.

Megatron-core calls ``torch.cuda.current_device()`` where it allocates on "the" device; for a trainer on the CPU the
answer is the CPU. The replacement lives only inside ``cpu_device()``; only ``own_optimizer`` has another one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_depth = 0
_saved: dict[str, object] = {}
_device = torch.device("cpu")


def _current_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*args: object, **kwargs: object) -> None:
    return None


ANSWERS = {"current_device": _current_device, "synchronize": _nothing}
"""``torch.cuda`` functions that are answered, by name."""


def device() -> torch.device:
    """Where this process's trainer computes; ``topology.start`` decides."""
    return _device


def use(device: torch.device) -> None:
    """Set what ``device()`` answers."""
    global _device
    _device = device


@contextmanager
def cpu_device() -> Iterator[bool]:
    """Answer ``torch.cuda`` queries with the CPU inside the block; nothing happens for a trainer on a GPU.

    Blocks may nest; the outermost one restores the functions, also after an exception.

    Yields:
        True where the answers are installed.
    """
    global _depth
    if _device.type != "cpu":
        yield False
        return
    if _depth == 0:
        for name, answer in ANSWERS.items():
            _saved[name] = getattr(torch.cuda, name)
            setattr(torch.cuda, name, answer)
    _depth += 1
    try:
        yield True
    finally:
        _depth -= 1
        if _depth == 0:
            for name in ANSWERS:
                setattr(torch.cuda, name, _saved.pop(name))
