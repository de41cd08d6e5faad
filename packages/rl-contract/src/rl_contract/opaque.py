"""Operators that a compiler and a graph see as one node: a schema, kernels by device, shapes for tracing.

As ``torch.library.custom_op``, whose Python around every call (it looks for aliases of outputs, and for a kernel that
was switched off) costs an eager trainer more than the kernels' own launches: the library's define and impl alone.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from rl_contract.checks import given_back
from rl_contract.errors import ContractError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", None: "CompositeExplicitAutograd"}
_libraries: dict[str, torch.library.Library] = {}


def _keys(*names: str) -> Any:
    found = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for name in names:
        found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return found


# before 2.13, PyTorch's compiler can't trace a kernel of ours inside a transform of torch.func; the dispatcher's own
# way on is left alone, which takes an operator without a gradient for a constant
TRANSFORMS = torch.__version__ >= TorchVersion("2.13")
# what torch.func shuts out of the dispatcher while one of its transforms handles a call, to be let in again below it
_BELOW = _keys(
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode"),
    *("FuncTorchGradWrapper", "Functionalize", "ADInplaceOrView", "AutogradCPU", "AutogradOther"),
)
_VMAP = _keys("FuncTorchVmapMode")


class OpaqueOp:
    """One operator of the dispatcher, called as ``torch.ops.NAMESPACE.NAME``.

    Args:
        name: ``"namespace::name"``.
        function: its kernel for ``device_type``; the annotations make the schema.
        mutates_args: names of the tensors that it writes; it may not return them or views of them.
        device_type: ``"cpu"``, ``"cuda"``, or None for a kernel of every device. One of ``"cpu"`` is never given a
            tensor whose memory was given back: that is refused, from a compiled graph and in a backward, too. On a GPU,
            whose launches are to cost no more, callers look themselves.

    Attributes:
        overload: the dispatcher's operator, for ``torch.library.opcheck`` and callers that keep it.

    Raises:
        ContractError: another device type, a name without a namespace or of an operator that there is, a function
            that no schema can be made of, or a parameter that is a list of tensors or must be given by name. Nothing
            is registered then.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], mutates_args: Sequence[str], device_type: str | None
    ) -> None:
        self.name = name
        _check_kind(name, device_type)
        namespace, short = name.split("::")
        try:
            schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        except ValueError as error:
            raise ContractError(
                f"{name} can't be made of {getattr(function, '__name__', function)}: {error}; supported: annotated "
                "tensors, numbers and texts by place, and names of its tensors in mutates_args"
            ) from error
        arguments = torch._C.parse_schema(name + schema).arguments
        # kernels are given all by place, and each tensor is looked at
        lists = [x.name for x in arguments if "List[" in str(x.type) and "Tensor" in str(x.type)]
        odd = lists + [x.name for x in arguments if x.kwarg_only]
        if odd:
            raise ContractError(
                f"{name} got parameters {odd} that are lists of tensors or must be given by name; supported: tensors, "
                "numbers and texts by place; pass lists as single tensors"
            )
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        self._library = _libraries[namespace]
        try:
            self._library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        except RuntimeError as error:
            raise ContractError(
                f"{name} can't be defined, give a name that no operator of the process has: {error}"
            ) from error
        self.overload = getattr(getattr(torch.ops, namespace), short).default
        self._tensors = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        self._names = [argument.name for argument in arguments]
        self._written = [i for i, argument in enumerate(arguments) if argument.name in mutates_args]
        self._differentiable = False
        self.register_kernel(device_type)(function)
        if self._tensors and TRANSFORMS:
            self._library.impl(short, self._transformed, "FuncTorchDynamicLayerBackMode")

    def register_kernel(self, device_type: str | None) -> Callable[[_Function], _Function]:
        """Decorator of the kernel for another device type."""
        _check_kind(self.name, device_type)

        def register(function: _Function) -> _Function:
            guarded = self._guarded(function, device_type == "cpu")
            self._library.impl(self.name.split("::")[1], guarded, _DISPATCH_KEYS[device_type])
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

    def _refuse_tangents(self) -> None:
        # the dispatcher drops tangents of an operator without a word
        if forward_ad._current_level >= 0:
            raise ContractError(
                f"{self.name} got called under forward-mode differentiation (torch.func.jvp, dual_level), and has "
                "no tangents; supported: backward(), torch.autograd.grad"
            )

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def fake(*arguments: Any, **named: Any) -> Any:
            self._refuse_tangents()
            self._refuse_gradients(arguments)
            return function(*arguments, **named)

        return fake

    def _transformed(self, *arguments: Any) -> Any:
        """The call inside a transform of ``torch.func``, below which kernels see plain tensors that require nothing.

        As the dispatcher's own way on: the transform's wrappers come off, the call is made again without it.
        """
        interpreter = retrieve_current_functorch_interpreter()
        self._refuse_tangents()
        self._refuse_gradients(arguments)
        level, functorch = interpreter.level(), torch._C._functorch
        wraps_tensors = interpreter.key() == functorch.TransformType.Grad
        if wraps_tensors:
            arguments = tuple(
                functorch._unwrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x for x in arguments
            )
        with interpreter.lower():
            included = torch._C._dispatch_tls_local_include_set() - _VMAP
            excluded = torch._C._dispatch_tls_local_exclude_set() - _BELOW
            with torch._C._ForceDispatchKeyGuard(included, excluded):
                result = self.overload(*arguments)
        if not wraps_tensors or result is None:
            return result
        if isinstance(result, torch.Tensor):
            return functorch._wrap_for_grad(result, level)
        return tuple(functorch._wrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x for x in result)

    def _refuse_given_back(self, arguments: Sequence[Any]) -> None:
        for i in self._tensors:
            if i < len(arguments) and arguments[i] is not None and given_back(arguments[i]):
                raise ContractError(
                    f"{self.name} got {self._names[i]} as a tensor whose memory was given back; supported: one that "
                    "holds its values, gather it again first, before a backward, too"
                )

    def _guarded(self, function: Callable[..., Any], on_cpu: bool) -> Callable[..., Any]:
        tensors, written = self._tensors, self._written

        def kernel(*arguments: Any) -> Any:
            if on_cpu:
                self._refuse_given_back(arguments)
            if forward_ad._current_level >= 0:
                self._refuse_tangents()
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


def _check_kind(name: str, device_type: str | None) -> None:
    if device_type not in _DISPATCH_KEYS:
        raise ContractError(f"{name} got device_type={device_type!r}; supported: 'cpu', 'cuda', None for both")
    if not isinstance(name, str) or name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
        raise ContractError(f"an operator got name={name!r}; supported: 'namespace::name'")


def opaque_op(
    name: str, *, mutates_args: Sequence[str] = (), device_type: str | None = "cpu"
) -> Callable[[Callable[..., Any]], OpaqueOp]:
    """Decorator that makes an ``OpaqueOp`` of its first kernel."""
    return lambda function: OpaqueOp(name, function, mutates_args, device_type)
