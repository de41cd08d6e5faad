"""What the public functions of every package refuse alike: what is no tensor, no integer, and no type of theirs.

What is asked of a tensor here is its attributes alone: no device is waited for, and no value is looked at.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.parameter import is_lazy

from rl_contract.errors import ContractError

_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided


def whole_number(value: Any) -> bool:
    """A Python or NumPy integer; True is none, nor is 512.0."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """What an error says of a value, in at most 80 characters; long integers and others have no repr to take."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def given_back(x: torch.Tensor) -> bool:
    """Whether the memory of ``x`` was given back, as sharded trainers do with weights that others are to gather again.

    False for what stands for a tensor while someone traces or transforms: it need have no memory.
    """
    if is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return x.untyped_storage().nbytes() == 0 and x.numel() > 0


def _right(x: Any) -> bool:
    """Whether a glance tells that ``x`` is dense and holds values: nearly all that is given is and does."""
    kind = type(x)
    # of those who trace, Dynamo alone shows a plain tensor without memory; asking for it alone is quicker
    if (kind is not _TENSOR and kind is not _PARAMETER) or is_dynamo_compiling():
        return False
    try:
        return x.untyped_storage().nbytes() > 0 and x.layout is _STRIDED and not x.is_nested
    except NotImplementedError:
        # no storage: sparse, or in a transform of torch.func
        return False


def tensor_problem(name: str, x: Any) -> str | None:
    """What argument ``name`` is in place of a dense tensor that holds values, and what to do; None where it is one."""
    if _right(x):
        return None
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__} {str(x)[:40]!r}; supported: a tensor, make one"
    if x.layout != torch.strided and not x.is_nested:
        return f"{x.layout}; supported: torch.strided, pass {name}.to_dense()"
    if is_compiling():
        return None if x.layout == torch.strided else f"a nested tensor ({x.layout}); supported: a dense one"
    if x.is_nested:
        return f"a nested tensor ({x.layout}); supported: a dense one, pass its parts one by one, or padded"
    if is_lazy(x):
        return f"{type(x).__name__}; supported: a tensor that holds values, initialize it first"
    if given_back(x):
        return "a tensor whose memory was given back; supported: one that holds its values, gather it again first"
    return None


def require_tensor(where: str, name: str, x: Any) -> None:
    """Raise ContractError, which says what ``where`` was given as ``name``, unless that is a dense tensor with values.

    Refused are nested, sparse and uninitialized tensors, and those whose memory was given back.
    """
    # the shortest way for what is right: engines come here for every tensor of every layer
    if not _right(x) and (problem := tensor_problem(name, x)) is not None:
        raise ContractError(f"{where} got {name} as {problem}")


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
