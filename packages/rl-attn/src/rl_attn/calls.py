"""What a launch may take over from an equal one before it, and values kept beside a batch's tensors.

An eager trainer asks the same in every layer. What a call decides (checks, a plan's row, grids, numbers for kernels)
follows from shapes, strides, types and a few numbers; finding it out anew takes longer than the launches.
"""

from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from rl_contract.checks import require_tensor

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
    """Of each: what the checks of a public function look at, whether its memory is there among it.

    Raises:
        ContractError: a nested tensor, which has no shape, or a sparse one.
    """
    found: list[Any] = []
    try:
        for x in tensors:
            # what has a storage is dense or nested
            found += (x.shape, x.dtype, x.device, x.untyped_storage().nbytes() > 0)
    except RuntimeError:
        for n, x in enumerate(tensors):
            require_tensor("rl_attn", f"tensor {n}", x)
        # in a transform of torch.func
        return tuple(part for x in tensors for part in (x.shape, x.dtype, x.device, x.layout))
    return tuple(found)


class Values:
    """What tensors held at one time, as far as can be told later without waiting for a GPU.

    PyTorch counts its own writes, but none by NumPy, by ``.data``, by a collective or by a kernel of one's own. What is
    on the host is compared itself. Of tensors of inference mode no write is counted at all: ``counted`` tells.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._marks = _marks(tensors)
        self._copies = [x.clone() if x.device.type == "cpu" else None for x in tensors]

    def hold(self, *tensors: Tensor) -> bool:
        """Whether these are the same tensors, unchanged. They must have lived since."""
        return _marks(tensors) == self._marks and all(
            copy is None or torch.equal(x, copy) for x, copy in zip(tensors, self._copies, strict=True)
        )


def counted(*tensors: Tensor) -> bool:
    """Whether PyTorch counts writes to all of them."""
    return not any(x.is_inference() for x in tensors)


def _marks(tensors: tuple[Tensor, ...]) -> list[tuple[int, int, int]]:
    return [(id(x), x._version, x.data_ptr()) for x in tensors]


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
