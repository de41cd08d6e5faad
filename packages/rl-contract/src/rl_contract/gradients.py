"""Where a weight's gradient goes: into the trainer's fp32 ``main_grad``, or back to autograd in the weight's type."""

import torch

from rl_contract.checks import tensor_problem
from rl_contract.errors import ContractError
from rl_contract.memory import distinct


def apart(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors``, those that came before as views of themselves, for a ``torch.autograd.Function`` under a compiler.

    PyTorch's compiler takes a tensor that a Function is given twice for one argument: 2.11 then loses a gradient
    (pytorch#183604), later ones do not trace the call. The first place keeps the tensor itself and its attributes.
    """
    if not torch.compiler.is_compiling():
        return tensors
    found: list[torch.Tensor] = []
    for x in tensors:
        found.append(x.view_as(x) if any(x is other for other in found) else x)
    return tuple(found)


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """``weight.main_grad``, or None where it is absent or None.

    Raises:
        ContractError: it is not an fp32 tensor of weight's shape on weight's device, elements of it share memory, or
            its memory was given back.
    """
    found = getattr(weight, "main_grad", None)
    if found is None:
        return None
    if problem := tensor_problem("main_grad", found):
        given = problem.partition(";")[0]
    elif found.dtype != torch.float32 or found.shape != weight.shape or found.device != weight.device:
        given = f"{found.dtype} {tuple(found.shape)} on {found.device}"
    elif not (found.is_contiguous() or distinct(zip(found.shape, found.stride()))):
        given = f"a view with strides {found.stride()}, in which elements share memory"
    else:
        return found
    raise ContractError(
        f"weight.main_grad is {given}; supported: torch.float32 {tuple(weight.shape)} on {weight.device}, added to in "
        "place; keep gradients in fp32, or remove main_grad to get the gradient in weight's type"
    )


def add_to_main_grad(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Add fp32 ``grad`` to ``weight.main_grad`` and return None; without one return it in weight's type.

    Raises:
        ContractError: as ``main_grad_of``; nothing is written.
    """
    return add_onto(main_grad_of(weight), weight, grad)


def add_onto(main_grad: torch.Tensor | None, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """``add_to_main_grad`` where ``main_grad_of(weight)`` has been looked up already."""
    if main_grad is None:
        return grad.to(weight.dtype)
    main_grad.add_(grad)
    return None
