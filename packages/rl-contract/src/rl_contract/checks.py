"""What the public functions of every package refuse alike: what is no tensor, no integer, and no type of theirs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_contract.errors import ContractError


def whole_number(value: Any) -> bool:
    """A Python or NumPy integer; True is none, nor is 512.0."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def tensor_problem(name: str, x: Any) -> str | None:
    """What argument ``name`` is in place of a dense tensor, and what to do; None where it is one."""
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__} {str(x)[:40]!r}; supported: a tensor, make one"
    if x.layout != torch.strided:
        return f"{x.layout}; supported: torch.strided, pass {name}.to_dense()"
    return None


def require_tensor(where: str, name: str, x: Any) -> None:
    """Raise ContractError, which says what ``where`` was given as ``name``, unless that is a dense tensor."""
    # one call and no more for what is right: engines come here for every tensor of every layer
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        raise ContractError(f"{where} got {name} as {tensor_problem(name, x)}")


def dtype_problem(name: str, value: Any, supported: Sequence[torch.dtype]) -> str | None:
    """What argument ``name`` is in place of one of these types, and what to do; None where it is one."""
    if isinstance(value, torch.dtype):
        if value in supported:
            return None
        given, todo = str(value), f"take {supported[0]} and convert the result yourself"
    else:
        # the name of a type, NumPy's types and its dtypes
        said = value if isinstance(value, str) else getattr(value, "name", getattr(value, "__name__", ""))
        meant = [t for t in supported if str(t).removeprefix("torch.") == str(said).removeprefix("torch.")]
        given = f"{value!r:.80} (a {type(value).__name__})"
        todo = f"pass {meant[0]}" if meant else "pass one of these, or None"
    return f"{name}={given}, supported: {', '.join(map(str, supported))}; {todo}"
