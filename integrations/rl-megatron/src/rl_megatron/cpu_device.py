"""What Megatron-core asks of CUDA, answered on a machine without CUDA.

Megatron-core calls ``torch.cuda.current_device()`` where it allocates on "the" device; on a CPU the answer is the CPU.
No other module replaces a function of another library, and the replacement lives only inside ``cpu_device()``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_depth = 0
_saved: dict[str, object] = {}


def _current_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*args: object, **kwargs: object) -> None:
    return None


ANSWERS = {"current_device": _current_device, "synchronize": _nothing}
"""``torch.cuda`` functions that are answered, by name."""


@contextmanager
def cpu_device() -> Iterator[bool]:
    """Answer ``torch.cuda`` queries with the CPU inside the block; nothing happens where CUDA is there.

    Blocks may nest; the outermost one restores the functions, also after an exception.

    Yields:
        True where the answers are installed.
    """
    global _depth
    if torch.cuda.is_available():
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
