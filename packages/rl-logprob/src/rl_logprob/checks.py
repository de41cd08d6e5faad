"""What the public functions accept; every refusal names what was given, what is supported and what to do."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_contract import ContractError, MissingSupport
from rl_contract.checks import shown, tensor_problem, whole_number
from rl_logprob.contract import MAX_VOCAB_TILE

# the smallest number of which fp32 has all bits
FP32_TINY = torch.finfo(torch.float32).tiny
# the largest integer that fp64 has, and hence a number that can be divided by, lies below
_MOST = 1 << 1023
# of a vocabulary, whose ids are int64
_MOST_IDS = (1 << 63) - 1


def number(value: Any) -> bool:
    """A Python or NumPy number that fp64 holds, NaN and infinity among them; True is none."""
    return isinstance(value, (float, np.floating)) or (whole_number(value) and -_MOST <= int(value) <= _MOST)


def usable_temperature(value: Any) -> Any:
    """Whether logits can be divided by this: positive and finite, and not so small that fp32 has not all of its bits.

    Args:
        value: a tensor fp32, which is answered by a tensor of bool, or a number, of which fp32 is asked.
    """
    if not isinstance(value, Tensor):
        value = fp32(value)
    return (value >= FP32_TINY) & (value < float("inf"))


def fp32(value: Any) -> float:
    """The number rounded to fp32, infinite beyond it."""
    with np.errstate(over="ignore"):
        return float(np.float32(float(value)))


def padded_vocab_size(vocab_size: int, vocab_tile: int = 512, max_world: int = 8) -> int:
    """The smallest size of at least ``vocab_size`` that ``max_world`` ranks share in whole tiles.

    A trainer pads its head to this at every world size, so that leaves of the hidden gradient do not depend on it.
    """
    given = (vocab_size, vocab_tile, max_world)
    if not all(map(whole_number, given)) or min(given) < 1:
        raise ContractError(
            f"padded_vocab_size got vocab_size={shown(vocab_size)}, vocab_tile={shown(vocab_tile)}, "
            f"max_world={shown(max_world)}; all must be positive integers"
        )
    step = vocab_tile * max_world
    return -(-vocab_size // step) * step


def real_rows(rows: int, rank: int, vocab_size: int) -> int:
    """How many of the rank's rows are ids of the real vocabulary."""
    return max(0, min(rows, vocab_size - rank * rows))


def check_vocab(vocab_size: int, vocab_tile: int) -> None:
    if not whole_number(vocab_size) or not 1 <= vocab_size <= _MOST_IDS:
        raise ContractError(f"vocab_size={shown(vocab_size)}; supported: a positive integer, the tokenizer's real size")
    if not whole_number(vocab_tile) or not 1 <= vocab_tile <= MAX_VOCAB_TILE:
        raise ContractError(f"vocab_tile={shown(vocab_tile)}; supported: 1..{MAX_VOCAB_TILE}")


def check_logits(logits: Tensor, vocab_size: int) -> None:
    check_tensor("logits", logits)
    if logits.dtype != torch.float32:
        raise ContractError(
            f"logits are {logits.dtype}; supported: float32, the accumulators of the head; "
            "compute them with rl_gemm.linear(..., out_dtype=torch.float32), do not convert rounded ones"
        )
    if logits.dim() != 2 or logits.shape[1] < vocab_size:
        raise ContractError(f"logits have shape {tuple(logits.shape)}; needs [T, at least vocab_size={vocab_size}]")


def check_tensor(name: str, x: Any) -> None:
    """A dense tensor that holds values, on a device that has kernels."""
    if problem := tensor_problem(name, x):
        raise ContractError(f"{name} is {problem}")
    check_device(x)


def check_device(x: Tensor) -> None:
    if x.device.type not in ("cpu", "cuda"):
        raise MissingSupport(f"rl_logprob got a tensor on {x.device}; supported: cpu, cuda; move it there")


def check_targets(targets: Tensor, rows: int, vocab_size: int) -> None:
    """int64 or int32 [rows]; on the CPU also every id in 0..vocab_size-1: on a GPU a bad one makes its row NaN."""
    check_tensor("targets", targets)
    if targets.shape != (rows,) or targets.dtype not in (torch.int64, torch.int32):
        raise ContractError(f"targets are {targets.dtype} {tuple(targets.shape)}; needs int64 or int32 [{rows}]")
    if targets.device.type == "cpu":
        refuse_targets(targets, vocab_size)


def refuse_targets(targets: Tensor, vocab_size: int) -> None:
    """Raise if an id is outside 0..vocab_size-1."""
    bad = (targets < 0) | (targets >= vocab_size)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ContractError(
            f"target {int(targets[row])} in row {row} is no id of the vocabulary 0..{vocab_size - 1} "
            f"({int(bad.sum())} such rows); give a masked position any valid id and leave it out by the mask"
        )


def row_temperature(temperature: float | Tensor, rows: int, device: torch.device | None = None) -> Tensor:
    """fp32 [rows], every value positive and finite; on a GPU empty for the number 1, and a tensor there is not looked
    at.
    """
    gpu = device is not None and device.type == "cuda"
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature)
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        if temperature.shape != (rows,) or temperature.dtype != torch.float32:
            raise ContractError(
                f"temperature is {temperature.dtype} {tuple(temperature.shape)}; needs a number or float32 [{rows}]"
            )
        if temperature.is_cuda:
            return temperature.contiguous()
        refuse_temperature(temperature)
        return temperature.contiguous().to(device) if gpu else temperature.contiguous()
    if isinstance(temperature, Tensor):
        real = temperature.dtype != torch.bool and not temperature.is_complex()
    else:
        real = number(temperature)
    if not real:
        raise ContractError(f"temperature={shown(temperature)}; needs a number that fp32 holds, or float32 [{rows}]")
    # what an engine asks for at every step; no tensor is made to see that 1 is positive
    if gpu and not isinstance(temperature, Tensor) and temperature == 1.0:
        return torch.empty(0, dtype=torch.float32, device=device)
    given = float(temperature)
    value = fp32(given)
    if abs(value) == float("inf") != abs(given):
        raise ContractError(f"temperature={shown(temperature)}; needs a number that fp32 holds, or float32 [{rows}]")
    # an empty batch still refuses a meaningless temperature
    one = torch.full((1,), value, dtype=torch.float32)
    if not gpu:
        refuse_temperature(one)
        return one.expand(rows).contiguous()
    if not usable_temperature(value):
        refuse_temperature(one)
    return torch.full((0 if value == 1.0 else rows,), value, dtype=torch.float32, device=device)


def said_temperature(given: float | Tensor, rows: Tensor) -> float | Tensor:
    """What ranks compare of a temperature whose ``row_temperature`` is ``rows``: one number where that is known."""
    if not isinstance(given, Tensor) or not (given.is_cuda or given.dim()):
        # also of no rows
        return fp32(given)
    alike = not rows.is_cuda and len(rows) and bool((rows == rows[0]).all())
    return float(rows[0]) if alike else rows


def refuse_temperature(value: Tensor) -> None:
    """Raise if a temperature is not positive and finite, or so small that fp32 has not all of its bits."""
    bad = ~usable_temperature(value)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ContractError(
            f"temperature {float(value[row])} in row {row}; supported: positive and finite, at least {FP32_TINY:.3g}; "
            "score greedy tokens at temperature 1, which is also what the trainer must use then"
        )


def refuse_nonfinite(state: Tensor, temperature: Tensor) -> None:
    """Raise if a row's state is NaN: its logits / temperature hold a NaN or +inf, or nothing above -inf."""
    bad = torch.isnan(state[:, 0])
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        held = float(temperature[row]) if temperature.numel() else 1.0
        divided = f" once divided by temperature {held:g}" if held < 1 else ""
        raise ContractError(
            f"logits of row {row} hold a NaN, +inf or no finite value{divided} ({int(bad.sum())} such rows); "
            "a log-probability is defined for finite logits only; look for the first nonfinite activation or weight"
            + (", or take a larger temperature" if divided else "")
        )


def refuse_rows(logp: Tensor, state: Tensor, targets: Tensor, temperature: Tensor, vocab_size: int) -> None:
    """On a GPU: one look at the result, the only wait for the device, and the causes only if a row is NaN.

    Inside a graph capture nothing can be looked at: such rows stay NaN.
    """
    if torch.cuda.is_current_stream_capturing() or not bool(torch.isnan(logp).any()):
        return
    refuse_targets(targets, vocab_size)
    refuse_temperature(temperature)
    refuse_nonfinite(state, temperature)
