"""Operators that a compiler and a graph see as one node: a schema, kernels by device, shapes for tracing.

As ``torch.library.custom_op``, whose Python around every call (it looks for aliases of outputs, and for a kernel that
was switched off) costs an eager trainer more than the kernels' own launches: the library's define and impl alone.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from rl_contract.errors import ContractError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", None: "CompositeExplicitAutograd"}
_libraries: dict[str, torch.library.Library] = {}


class OpaqueOp:
    """One operator of the dispatcher, called as ``torch.ops.NAMESPACE.NAME``.

    Args:
        name: ``"namespace::name"``.
        function: its kernel for ``device_type``; the annotations make the schema.
        mutates_args: names of the tensors that it writes; it may not return them or views of them.
        device_type: ``"cpu"``, ``"cuda"``, or None for a kernel of every device.

    Attributes:
        overload: the dispatcher's operator, for ``torch.library.opcheck`` and callers that keep it.

    Raises:
        ContractError: another device type, or a parameter that is a list of tensors or must be given by name.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], mutates_args: Sequence[str], device_type: str | None
    ) -> None:
        self.name = name
        namespace, short = name.split("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        self._library = _libraries[namespace]
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        self._library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, namespace), short).default
        arguments = self.overload._schema.arguments
        # kernels are given all by place, and each tensor is looked at
        lists = [x.name for x in arguments if "List[" in str(x.type) and "Tensor" in str(x.type)]
        odd = lists + [x.name for x in arguments if x.kwarg_only]
        if odd:
            raise ContractError(
                f"{name} got parameters {odd} that are lists of tensors or must be given by name; supported: tensors, "
                "numbers and texts by place; pass lists as single tensors"
            )
        self._tensors = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        self._written = [i for i, argument in enumerate(arguments) if argument.name in mutates_args]
        self._differentiable = False
        self.register_kernel(device_type)(function)

    def register_kernel(self, device_type: str | None) -> Callable[[_Function], _Function]:
        """Decorator of the kernel for another device type."""
        if device_type not in _DISPATCH_KEYS:
            raise ContractError(f"{self.name} got device_type={device_type!r}; supported: 'cpu', 'cuda', None for both")

        def register(function: _Function) -> _Function:
            self._library.impl(self.name.split("::")[1], self._guarded(function), _DISPATCH_KEYS[device_type])
            return function

        return register

    def register_fake(self, function: _Function) -> _Function:
        """Decorator of the function that says shapes and types alone."""
        torch.library.register_fake(self.name, self._refusing(function), lib=self._library)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """As ``torch.library.register_autograd``; without it a call that would have to be differentiated is refused."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context, lib=self._library)
        self._differentiable = True

    def _refuse_gradients(self, arguments: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and not self._differentiable:
            for i in self._tensors:
                if i < len(arguments) and arguments[i] is not None and arguments[i].requires_grad:
                    raise ContractError(
                        f"{self.name} got a tensor that requires grad, and has no gradient; supported: under "
                        "torch.no_grad(), or the package's functions, whose gradients are in order"
                    )

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def fake(*arguments: Any, **named: Any) -> Any:
            self._refuse_gradients(arguments)
            return function(*arguments, **named)

        return fake

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        tensors, written = self._tensors, self._written

        def kernel(*arguments: Any) -> Any:
            # the dispatcher drops tangents of an operator without a word
            if forward_ad._current_level >= 0:
                raise ContractError(
                    f"{self.name} got called under forward-mode differentiation (torch.func.jvp, dual_level), and has "
                    "no tangents; supported: backward(), torch.autograd.grad"
                )
            if torch.is_grad_enabled():
                self._refuse_gradients(arguments)
            result = function(*arguments)
            for i in written:
                # one with a default may be missing
                if i < len(arguments) and arguments[i] is not None and not arguments[i].is_inference():
                    torch.autograd.graph.increment_version(arguments[i])
            return result

        return kernel if tensors or written else function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.overload(*arguments, **named)


def opaque_op(
    name: str, *, mutates_args: Sequence[str] = (), device_type: str | None = "cpu"
) -> Callable[[Callable[..., Any]], OpaqueOp]:
    """Decorator that makes an ``OpaqueOp`` of its first kernel."""
    return lambda function: OpaqueOp(name, function, mutates_args, device_type)
