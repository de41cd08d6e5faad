"""Bytes between the host and a GPU."""

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``; from the host without waiting, so that a GPU's stream goes on."""
    if x.device.type != "cpu" or device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
