"""What a launch may take over from an equal one before it, and values kept beside a batch's tensors.

An eager trainer asks the same in every layer. What a call decides (checks, a plan's row, grids, numbers for kernels)
follows from shapes, strides, types and a few numbers; finding it out anew takes longer than the launches.
"""

from typing import Any, Generic, TypeVar
from weakref import ref

from torch import Tensor

T = TypeVar("T")


def traits(*tensors: Tensor) -> tuple[Any, ...]:
    """Device of the first, and of each: shape, strides, dtype."""
    found: list[Any] = [tensors[0].device]
    for x in tensors:
        found += (x.shape, x.stride(), x.dtype)
    return tuple(found)


# what public functions on a GPU have found right, by their name and all that their checks look at; see ``keep``
right: dict[Any, None] = {}


def looks(*tensors: Tensor) -> tuple[Any, ...]:
    """Of each: what the checks of a public function look at."""
    found: list[Any] = []
    for x in tensors:
        found += (x.shape, x.dtype, x.device, x.layout)
    return tuple(found)


class ByTensor(Generic[T]):
    """One value beside each tensor, by identity, for as long as the tensor lives."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[ref[Tensor], T]] = {}

    def get(self, x: Tensor) -> T | None:
        found = self._found.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def keep(self, x: Tensor, value: T) -> T:
        number = id(x)

        def forget(gone: ref[Tensor]) -> None:
            # the number may be another tensor's by now
            found = self._found.get(number)
            if found is not None and found[0] is gone:
                del self._found[number]

        self._found[number] = ref(x, forget), value
        return value
