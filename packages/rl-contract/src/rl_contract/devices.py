"""A tensor's bytes, and their way between the host and a GPU."""

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
