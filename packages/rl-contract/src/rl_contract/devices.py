"""A tensor's bytes, their way between the host and a GPU, and the host's as NumPy sees them."""

import numpy as np
import torch

from rl_contract.errors import ContractError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)] + ["float16", "float32", "float64"]
_NUMPY = {getattr(torch, name): np.dtype(name).str for name in ("bool", *_NUMBERS)}
_NUMPY[torch.bfloat16] = _NUMPY[torch.uint16]
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter


class _Memory:
    """A storage as NumPy asks for it, held for as long as an array shows it."""

    __slots__ = ("__array_interface__", "storage")
    __array_interface__: dict[str, object]
    storage: torch.UntypedStorage


def host_array(x: torch.Tensor) -> np.ndarray:
    """A CPU tensor of any strides as an array that shares its memory, writable; bf16 as its uint16 bits.

    ``Tensor.numpy`` would mark the storage as one that can't be resized, and resizing is how sharded trainers give the
    memory of weights and activations back.

    Raises:
        ContractError: another device, a complex type or one that NumPy has no word for, a tensor whose memory was given
            back, a lazily negated one, or what stands for a tensor as a FakeTensor does.
    """
    return _shown(x, x.shape, None if x.is_contiguous() else x.stride())


def host_span(x: torch.Tensor) -> np.ndarray:
    """All that lies between the first and the last element of ``x``, as one dimension; else as ``host_array``."""
    if x.is_contiguous():
        return _shown(x, (x.numel(),), None)
    span = 1 + sum([(n - 1) * step for n, step in zip(x.shape, x.stride())]) if x.numel() else 0
    return _shown(x, (span,), None)


def _shown(x: torch.Tensor, shape: tuple[int, ...], steps: tuple[int, ...] | None) -> np.ndarray:
    kind, form = type(x), _NUMPY.get(x.dtype)
    plain = kind is _TENSOR or kind is _PARAMETER or kind.__torch_dispatch__ is _TENSOR.__torch_dispatch__
    if form is None or not plain or not x.is_cpu or x.is_neg():
        raise ContractError(
            f"an array was asked of a {kind.__name__} of {x.dtype} on {x.device}; supported: a plain tensor of "
            "booleans or real numbers on the CPU, not negated lazily; copy it there, resolve_neg it, or view it as "
            "integers"
        )
    storage, address = x.untyped_storage(), x.data_ptr()
    if not address or not storage.nbytes():
        if x.numel():
            raise ContractError(
                "an array was asked of a tensor whose memory was given back; supported: one that holds its values, "
                "gather it again first"
            )
        return np.empty(shape, form)
    interface = {"shape": shape, "typestr": form, "data": (address, False), "version": 3}
    if steps is not None:
        interface["strides"] = tuple([step * x.element_size() for step in steps])
    memory = _Memory()
    memory.__array_interface__, memory.storage = interface, storage
    return np.asarray(memory)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``; from the host without waiting, so that a GPU's stream goes on."""
    if x.device.type != "cpu" or device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def row_major_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a strided tensor in row-major order, uint8 [n]; no copy where ``x`` is contiguous."""
    flat = x.detach().resolve_conj().resolve_neg()
    if not flat.is_contiguous():
        # torch copies no elements of some types, e.g. two fp4 in a byte
        flat = flat.view(_WORDS.get(flat.element_size(), flat.dtype))
    flat = flat.contiguous().reshape(-1)
    # one element, or none, is contiguous whatever its stride says, and a view of another type reads the stride
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() < 2 else flat.view(torch.uint8)
