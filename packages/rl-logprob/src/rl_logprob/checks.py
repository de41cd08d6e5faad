"""What the public functions accept; every refusal names what was given, what is supported and what to do."""

import torch
from torch import Tensor

from rl_contract import ContractError, MissingSupport
from rl_logprob.contract import MAX_VOCAB_TILE


def padded_vocab_size(vocab_size: int, vocab_tile: int = 512, max_world: int = 8) -> int:
    """The smallest size of at least ``vocab_size`` that ``max_world`` ranks share in whole tiles.

    A trainer pads its head to this at every world size, so that leaves of the hidden gradient do not depend on it.
    """
    if vocab_size < 1 or vocab_tile < 1 or max_world < 1:
        raise ContractError(
            f"padded_vocab_size got vocab_size={vocab_size}, vocab_tile={vocab_tile}, max_world={max_world}; "
            "all must be positive"
        )
    step = vocab_tile * max_world
    return -(-vocab_size // step) * step


def check_vocab(vocab_size: int, vocab_tile: int) -> None:
    if vocab_size < 1:
        raise ContractError(f"vocab_size={vocab_size}; supported: a positive integer, the tokenizer's real size")
    if not 1 <= vocab_tile <= MAX_VOCAB_TILE:
        raise ContractError(f"vocab_tile={vocab_tile}; supported: 1..{MAX_VOCAB_TILE}")


def check_logits(logits: Tensor, vocab_size: int) -> None:
    if logits.dtype != torch.float32:
        raise ContractError(
            f"logits are {logits.dtype}; supported: float32, the accumulators of the head; "
            "compute them with rl_gemm.linear(..., out_dtype=torch.float32), do not convert rounded ones"
        )
    if logits.dim() != 2 or logits.shape[1] < vocab_size:
        raise ContractError(f"logits have shape {tuple(logits.shape)}; needs [T, at least vocab_size={vocab_size}]")
    check_device(logits)


def check_device(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise MissingSupport(f"rl_logprob got a tensor on {x.device}; supported: cpu; move it there")


def check_targets(targets: Tensor, rows: int, vocab_size: int) -> None:
    """int64 [rows], every id in 0..vocab_size-1."""
    if targets.shape != (rows,) or targets.dtype not in (torch.int64, torch.int32):
        raise ContractError(f"targets are {targets.dtype} {tuple(targets.shape)}; needs int64 or int32 [{rows}]")
    bad = (targets < 0) | (targets >= vocab_size)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ContractError(
            f"target {int(targets[row])} in row {row} is no id of the vocabulary 0..{vocab_size - 1} "
            f"({int(bad.sum())} such rows); give a masked position any valid id and leave it out by the mask"
        )


def row_temperature(temperature: float | Tensor, rows: int) -> Tensor:
    """fp32 [rows], every value positive and finite."""
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        if temperature.shape != (rows,) or temperature.dtype != torch.float32:
            raise ContractError(
                f"temperature is {temperature.dtype} {tuple(temperature.shape)}; needs a number or float32 [{rows}]"
            )
        value = temperature.contiguous()
    else:
        value = torch.full((rows,), float(temperature), dtype=torch.float32)
        if rows == 0:
            # an empty batch still refuses a meaningless temperature
            row_temperature(temperature, 1)
    bad = ~((value > 0) & torch.isfinite(value))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ContractError(
            f"temperature {float(value[row])} in row {row}; supported: positive and finite; "
            "score greedy tokens at temperature 1, which is also what the trainer must use then"
        )
    return value


def refuse_nonfinite(state: Tensor) -> None:
    """Raise if a row's state is NaN: its logits hold a NaN or +inf, or nothing above -inf."""
    bad = torch.isnan(state[:, 0])
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ContractError(
            f"logits of row {row} hold a NaN, +inf or no finite value ({int(bad.sum())} such rows); "
            "a log-probability is defined for finite logits only; look for the first nonfinite activation or weight"
        )
