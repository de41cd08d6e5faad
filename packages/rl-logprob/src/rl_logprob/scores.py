"""Log-probabilities of materialised logits: what a rollout engine and diagnostics call."""

from typing import Literal, overload

import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.checks import shown
from rl_logprob import ops, ops_gpu
from rl_logprob.checks import (
    check_logits,
    check_targets,
    check_vocab,
    refuse_nonfinite,
    refuse_rows,
    row_temperature,
)
from rl_logprob.support import Support, masked_logits, refuse_empty

Nonfinite = Literal["raise", "nan"]


def _state(
    logits: Tensor, vocab_size: int, temperature: float | Tensor, vocab_tile: int, entropy: bool, nonfinite: Nonfinite,
    support: Support | None = None, goal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Checked and contiguous logits, fp32 temperature [T], state fp64 [T, 3]."""
    check_vocab(vocab_size, vocab_tile)
    check_logits(logits, vocab_size)
    if nonfinite not in ("raise", "nan"):
        raise ContractError(f"nonfinite={shown(nonfinite)}; supported: 'raise', or 'nan' to give such rows NaN")
    temp = row_temperature(temperature, len(logits), logits.device)
    logits = logits.detach() if logits.is_cuda else logits.detach().contiguous()
    logits, key = masked_logits(logits, support, vocab_size, goal, temperature)
    state = ops.merge_tiles(*ops.tile_stats(logits, temp, 0, vocab_size, vocab_tile, entropy, *key, goal))
    if nonfinite == "raise":
        _refuse(state, temp)
    return logits, temp, state


def _refuse(state: Tensor, temperature: Tensor) -> None:
    if state.is_cuda:
        nothing = torch.empty(0, dtype=torch.int64)
        refuse_rows(state[:, 0], state, nothing, temperature, 1)
    else:
        refuse_nonfinite(state, temperature)


@overload
def selected_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    return_entropy: Literal[False] = False,
    nonfinite: Nonfinite = "raise",
    support: Support | None = None,
    return_rescued: Literal[False] = False,
) -> Tensor: ...
@overload
def selected_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    return_entropy: Literal[True],
    nonfinite: Nonfinite = "raise",
    support: Support | None = None,
    return_rescued: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def selected_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    return_entropy: bool = False,
    nonfinite: Nonfinite = "raise",
    support: Support | None = None,
    return_rescued: Literal[True],
) -> tuple[Tensor, ...]: ...
def selected_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    return_entropy: bool = False,
    nonfinite: Nonfinite = "raise",
    support: Support | None = None,
    return_rescued: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``log softmax(logits / temperature)[target]`` over ids 0..vocab_size-1; the bits of ``linear_logprob``.

    Args:
        logits: fp32 [T, at least vocab_size], accumulators of the head; columns from ``vocab_size`` on take no part.
        targets: int64 or int32 [T], ids below ``vocab_size``.
        temperature: positive number, or fp32 [T].
        vocab_tile: ids per tile; belongs to the contract.
        return_entropy: also return the entropy of each row, in nats.
        nonfinite: ``"raise"``, or ``"nan"``: a row with a NaN or +inf, or without a finite logit, gets NaN.
        support: the kept ids of each row, over which probabilities are renormalised; see ``sampling_support``. A target
            outside is kept all the same.
        return_rescued: also return which rows' targets were outside their support, bool [T].

    Returns:
        fp32 [T], nats; or a tuple of that, entropy fp32 [T] if asked for, rescued if asked for. No
        gradient flows; a trainer uses ``linear_logprob``.

    Raises:
        ContractError: types, shapes, a target or a temperature out of range, a nonfinite row, a support made at another
            temperature, or, on a CPU, one that keeps no id of a row.
        MissingSupport: a device without kernels.
    """
    if nonfinite not in ("raise", "nan"):
        raise ContractError(f"nonfinite={shown(nonfinite)}; supported: 'raise', or 'nan' to give such rows NaN")
    check_vocab(vocab_size, vocab_tile)
    check_logits(logits, vocab_size)
    check_targets(targets, len(logits), vocab_size)
    targets = targets.to(logits.device, torch.int64).contiguous()
    # a GPU is looked at once, when everything is under way
    early: Nonfinite = "nan" if logits.is_cuda else nonfinite
    goal = None if support is None else targets
    if logits.is_cuda and type(logits) is Tensor and not torch.compiler.is_compiling():
        temp = row_temperature(temperature, len(logits), logits.device)
        masked, key = masked_logits(logits.detach(), support, vocab_size, goal, temperature)
        logp, x, state = ops_gpu.score(masked, targets, temp, vocab_size, vocab_tile, return_entropy, *key)
    else:
        logits, temp, state = _state(logits, vocab_size, temperature, vocab_tile, return_entropy, early, support, goal)
        x = _target_logits(logits, targets, vocab_size)
        x = x / temp if temp.numel() else x
        logp = ops.selected(x, state)
    if logits.is_cuda and nonfinite == "raise":
        refuse_rows(logp, state, targets, temp, vocab_size)
    elif support is not None and nonfinite == "raise":
        refuse_empty(support, x, targets, state)
    found: tuple[Tensor, ...] = (logp, state[:, 2].float()) if return_entropy else (logp,)
    if return_rescued:
        found += (torch.zeros_like(targets, dtype=torch.bool) if support is None else support.outside(x, targets),)
    return found if len(found) > 1 else logp


def _target_logits(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """logits fp32 [T] of the targets; NaN on a GPU for one outside the vocabulary."""
    if not logits.is_cuda:
        return logits.gather(1, targets[:, None])[:, 0]
    safe = targets.clamp(0, vocab_size - 1)
    return torch.where(safe == targets, logits.gather(1, safe[:, None])[:, 0], torch.nan)


def full_logprob(
    logits: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    nonfinite: Nonfinite = "raise",
) -> Tensor:
    """Every id's log-probability, fp32 [T, vocab_size]; column i has the bits of ``selected_logprob`` with target i."""
    logits, temp, state = _state(logits, vocab_size, temperature, vocab_tile, False, nonfinite)
    return ops.full(logits, temp, state, vocab_size)


def entropy(
    logits: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    nonfinite: Nonfinite = "raise",
) -> Tensor:
    """Entropy of ``softmax(logits / temperature)`` over the real vocabulary, nats, fp32 [T]."""
    state = _state(logits, vocab_size, temperature, vocab_tile, True, nonfinite)[2]
    return state[:, 2].float()
