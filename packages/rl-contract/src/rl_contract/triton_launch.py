"""Triton launches without Triton's look at every argument, for a caller that knows an equal launch came before.

``kernel[grid](...)`` finds out at every call for which types, alignments and integers the kernel is compiled, which
takes longer than the launch. An operator that keeps what it decided by shapes, strides, types and device has found
that out already: it keeps a ``Prepared`` beside its decisions.
"""

from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

_MOST = 4096
_ALIGNMENT = 16
# the launcher of a compiled kernel is called as in these; elsewhere the kernel itself is, as Triton documents
_KNOWN_LAUNCHER = ("3.6.", "3.7.", "3.8.", "3.9.")
# in these, what such a launcher does before it calls the function compiled for the kernel is known, too
_KNOWN_FUNCTION = "3.6."
_MOST_MAPS = 256
_Value = TypeVar("_Value")
_missing = object()
# two threads may launch a kernel for the first time at once
_keeping = Lock()


@cache
def _triton() -> tuple[Any, Any, Any, bool]:
    """Triton's switches at run time and for compiling, its driver, and whether its launcher is a known one."""
    import triton
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, knobs.compilation, driver, triton.__version__.startswith(_KNOWN_LAUNCHER)


def _watched(runtime: Any, compilation: Any) -> bool:
    """Whether someone watches launches or compiles for debugging: Triton's own path then does what he asks for."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # chains of hooks, empty as a rule; one function or None before Triton 3.5
    hooks = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(hooks or runtime.debug or compilation.instrumentation_mode)


class Prepared:
    """``kernel[grid](*moving, **fixed, **options)``, where only the places of tensors in memory may move.

    A caller keeps one per combination of everything that a compilation depends on: which of the moving arguments are
    None, types, the device of all tensors, blocks of descriptors, every entry of ``fixed`` and of ``options``. A launch
    goes to the current stream of the current device. It is Triton's own under the interpreter, on AMD, with a pointer
    that is no multiple of 16 bytes, with hooks around launches, and where another device is current than at first.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``.
        grid: one to three numbers of programs, none of them 0.
        fixed: by name, the parameters that are the same in every call: integers, floats, constexprs. Those left out
            move, also where they have a default.
        options: of the compiler, as ``num_warps``.
    """

    __slots__ = (
        "_compiled", "_device", "_direct", "_fixed", "_grid", "_head", "_maps", "_options", "_order", "_tail", "kernel",
    )  # fmt: skip

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: Mapping[str, Any], **options: Any) -> None:
        self.kernel, self._fixed, self._options = kernel, dict(fixed), options
        self._grid = (*grid, 1, 1)[:3]
        names = list(kernel.arg_names)
        unknown = [name for name in fixed if name not in names]
        if unknown:
            raise TypeError(f"{kernel.__name__} has no parameters {unknown}; it takes {names}")
        moving = [name for name in names if name not in fixed]
        # most kernels take what moves first, and need no sorting at a call
        leads = names[: len(moving)] == moving
        self._tail = tuple(fixed[name] for name in names[len(moving) :]) if leads else ()
        self._order = None if leads else [moving.index(name) if name in moving else _missing for name in names]
        self._compiled: Any = None
        self._direct: Any = None
        self._head: tuple[Any, ...] = ()
        self._maps: _Maps | None = None
        self._device = -1

    def __call__(self, *moving: Any) -> None:
        """``moving``: a tensor, a descriptor (``at``) or None for each parameter that is not fixed, in their order."""
        if self._compiled is None or self.kernel.pre_run_hooks:
            return self._by_triton(moving)
        runtime, compilation, driver, _ = _triton()
        active = driver.active
        device = active.get_current_device()
        addresses = 0
        given: list[Any] = []
        for value in moving:
            if isinstance(value, Tensor):
                value = value.data_ptr()
                addresses |= value
            elif self._maps is not None and value is not None:
                given += self._maps.of(len(given), value)
                continue
            given.append(value)
        if addresses % _ALIGNMENT or device != self._device or _watched(runtime, compilation):
            return self._by_triton(moving)
        arguments = (*given, *self._tail) if self._order is None else self._sorted(given)
        if self._direct is None:
            self._compiled[self._grid](*arguments)
        else:
            self._direct(*self._grid, active.get_current_stream(device), *self._head, *arguments)

    def _sorted(self, given: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
        assert self._order is not None
        return tuple(
            self._fixed[name] if place is _missing else given[place]  # type: ignore[call-overload]
            for name, place in zip(self.kernel.arg_names, self._order)
        )

    def _by_triton(self, moving: tuple[Any, ...]) -> None:
        arguments = (*moving, *self._tail) if self._order is None else self._sorted(moving)
        compiled = self.kernel[self._grid](*arguments, **self._options)
        aligned = all(value.data_ptr() % _ALIGNMENT == 0 for value in moving if isinstance(value, Tensor))
        # AMD's compiler also asks how large a tensor is; interpreted launches return nothing
        if self._compiled is None and compiled is not None and aligned and torch.version.hip is None:
            with _keeping:
                # a call that another thread has begun goes on with what was kept first
                if self._compiled is None:
                    self._keep(compiled)

    def _keep(self, compiled: Any) -> None:
        runtime, compilation, driver, launcher_known = _triton()
        run, function = getattr(compiled, "run", None), getattr(compiled, "function", None)
        metadata = getattr(compiled, "packed_metadata", None)
        # what was compiled and never loaded was not launched either
        if run is None or function is None or _watched(runtime, compilation):
            return
        self._device = driver.active.get_current_device()
        if launcher_known and metadata is not None:
            # no metadata and no hooks of this launch
            self._head, self._direct = (function, metadata, None, None, None), run
            bare = _bare(run, compiled) if self._order is None else None
            if bare is not None:
                self._direct, self._maps = bare
                flags = run.launch_cooperative_grid, run.launch_pdl
                # no scratch either
                self._head = (function, *flags, None, None, metadata, None, None, None)
        self._compiled = compiled


class _Maps:
    """The copy engine's maps of the descriptors that a kernel is given, kept by where their tensors lie."""

    def __init__(self, make: Callable[[Any, Any], list[Any]], metadata: list[Any]) -> None:
        self._make, self._metadata = make, metadata
        self._kept: dict[tuple[int, int], tuple[Any, Any, list[Any]]] = {}
        self._numbers: dict[int, int] = {}

    def of(self, place: int, descriptor: Any) -> list[Any]:
        """What stands for ``descriptor`` among the arguments, the first of which is number ``place``."""
        key = place, descriptor.base.data_ptr()
        found = self._kept.get(key)
        # one address may hold tensors of several shapes
        if found is not None and found[0] is descriptor.shape and found[1] is descriptor.strides:
            return found[2]
        # descriptors come in the order of their places
        number = self._numbers.setdefault(place, len(self._numbers))
        made = self._make(descriptor, self._metadata[number])
        if len(self._kept) >= _MOST_MAPS:
            self._kept.clear()
        self._kept[key] = descriptor.shape, descriptor.strides, made
        return made


def _bare(run: Any, compiled: Any) -> tuple[Any, _Maps | None] | None:
    """The function that Triton's launcher ``run`` calls in the end, and what makes its arguments of descriptors; None
    where that is not known, or where a launch needs scratch memory."""
    import triton

    kind = type(run)
    if not triton.__version__.startswith(_KNOWN_FUNCTION) or kind.__name__ != "CudaLauncher":
        return None
    from triton.backends.nvidia import driver

    if run.global_scratch_size or run.profile_scratch_size:
        return None
    call, names = run.launch, getattr(getattr(run.launch, "__code__", None), "co_freevars", ())
    metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    if not names:
        return (call, None) if not metadata else None
    inner = dict(zip(names, call.__closure__, strict=True)).get("launcher")
    if inner is None or not metadata or None in metadata:
        return None
    return inner.cell_contents, _Maps(driver.make_tensordesc_arg, metadata)


def launcher(compiled: Any) -> Callable[..., None]:
    """``launch(grid, device, *arguments)`` of a kernel that Triton has launched on ``device``, the current one, for a
    caller that looks it up by what it was compiled for; ``grid``: three numbers."""
    runtime, compilation, driver, launcher_known = _triton()
    run: Any = getattr(compiled, "run", None)
    head = (getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None), None, None, None)
    known = launcher_known and not any(x is None for x in (run, *head[:2]))

    def launch(grid: tuple[int, int, int], device: int, *arguments: Any) -> None:
        if not known or _watched(runtime, compilation):
            compiled[grid](*arguments)
        else:
            run(*grid, driver.active.get_current_stream(device), *head, *arguments)

    return launch


def at(descriptor: Any, base: Tensor) -> Any:
    """``descriptor`` of another tensor, of the type, shape and strides that it was made for, 16 bytes aligned.

    Making one looks at all of them again. ``descriptor`` may have lost its own tensor (``without_base``).
    """
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = base
    return moved


def without_base(descriptor: Any) -> Any:
    """``descriptor`` for ``at``, which keeps no tensor alive."""
    return at(descriptor, None)  # type: ignore[arg-type]


def keep(kept: dict[Any, _Value], key: Any, value: _Value) -> _Value:
    """Put ``value`` into a cache of decisions, which starts anew when it is full, and return it."""
    if len(kept) >= _MOST:
        kept.clear()
    kept[key] = value
    return value
