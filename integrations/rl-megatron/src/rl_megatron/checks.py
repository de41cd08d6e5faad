"""What callers may hand to a trainer: numbers, sequences of them and objects of a class; what is wrong, in words."""

import os
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def real(value: object) -> bool:
    """A number of any library that a double holds, NaN and infinity among them; True is none, nor is a tensor."""
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def instance_problem(name: str, value: object, kind: type) -> str | None:
    """What is wrong with a value that must be a ``kind``; None where nothing is."""
    return None if isinstance(value, kind) else f"{name}={value!r:.80}, supported: a {kind.__name__}"


def choice_problem(name: str, value: object, known: Sequence[str]) -> str | None:
    """What is wrong with a value that must be one of these strings; an array of them is none."""
    if isinstance(value, str) and value in known:
        return None
    return f"{name}={value!r:.80}, supported: {', '.join(map(repr, known))}"


def tensor_problem(name: str, value: object) -> str | None:
    """What is wrong with a tensor that has no plain numbers in memory; None for all others, and for what is none."""
    if not isinstance(value, Tensor):
        return None
    if is_lazy(value):
        given = "an uninitialized parameter"
    elif value.is_nested:
        given = "a nested tensor"
    elif value.layout != torch.strided:
        given = f"a tensor of layout {value.layout}"
    elif value.is_meta:
        given = "a tensor on the meta device, which has no values"
    elif value.is_quantized:
        given = f"a quantized tensor of {value.dtype}"
    else:
        return None
    return f"{name} is {given}, supported: a dense tensor with its values (x.to_dense(), x.dequantize(), x.unbind())"


def sequence_problem(name: str, values: object, each: str) -> str | None:
    """What is wrong with what must have a length and an order; ``each`` says what its entries are."""
    if problem := tensor_problem(name, values):
        return problem
    if isinstance(values, (np.ndarray, Tensor)) and values.ndim > 0:
        return None
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        return None
    return f"{name}={values!r:.80}, supported: a sequence of {each}"


def numbers_problem(name: str, values: Any) -> str | None:
    """What is wrong with a list, an array or a tensor of numbers; None where nothing is."""
    if problem := sequence_problem(name, values, "numbers"):
        return problem
    if isinstance(values, np.ndarray):
        fits = values.ndim == 1 and values.dtype.kind in "fiu"
        return None if fits else f"{name} is {values.dtype} {values.shape}, supported: numbers in one dimension"
    if isinstance(values, Tensor):
        fits = values.ndim == 1 and not values.is_complex() and "bool" not in str(values.dtype)
        return None if fits else f"{name} is {values.dtype} {tuple(values.shape)}, supported: numbers in one dimension"
    for i, value in enumerate(values):
        if problem := tensor_problem(f"{name}[{i}]", value):
            return problem
        if not (real(value) or (isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex())):
            return f"{name} holds {value!r:.80}, supported: numbers"
    return None


def folder_problem(name: str, value: object) -> str | None:
    """What is wrong with a path."""
    path = os.fspath(value) if hasattr(value, "__fspath__") else value
    # a path of the standard library is never empty
    if isinstance(path, str) and path and "\0" not in path:
        return None
    return f"{name}={value!r:.80}, supported: a path"
