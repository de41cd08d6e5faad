"""One GEMM entry for GPUs: picks, by the frozen plans, the Triton kernel or the certified library that computes the
same bits.

Order and rounding are those of ``triton_gemm``; which evaluation of the tree runs (one program per leaf and a merge,
one program for all leaves, a library call) never shows in the bits.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_contract import ContractError, MissingSupport
from rl_contract.evidence import gpu_tally
from rl_contract.gpu import arch_of, needs_triton, processors_of
from rl_contract.triton_launch import keep
from rl_gemm import plans, vendor
from rl_gemm.contract import MATRIX_STEP

_MAX_LEAVES = 16
_GLUON_TRITON = "3.6."
_SLICE = 8192  # rows of one library call; certificates reach this far
Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@cache
def _triton() -> Any:
    with needs_triton("rl_gemm"):
        from rl_gemm import triton_gemm
    return triton_gemm


@cache
def _merge() -> Any:
    _triton()
    from rl_gemm import triton_merge

    return triton_merge


@cache
def _gluon() -> Any | None:
    """The Gluon kernel, or None under another Triton than it was tested with: another kernel of the plan then runs."""
    import triton

    # Gluon is experimental and its names change between releases
    if not triton.__version__.startswith(_GLUON_TRITON):
        return None
    from rl_gemm import gluon_tree

    return gluon_tree


@cache
def _gated() -> Any:
    _triton()
    from rl_gemm import triton_gate_up

    return triton_gate_up


@cache
def arch(device_index: int) -> str:
    """Name of the device's contracts: ``sm90``, ``gfx942``, ``gfx950``.

    Raises:
        MissingSupport: any other device.
    """
    return arch_of(device_index, sorted(MATRIX_STEP), "rl_gemm")


class Call(NamedTuple):
    """An operator's call as decided for everything that the decision depends on, but for the plans in force."""

    own: plans.Plans
    run: Any


_calls: dict[Any, Call] = {}


def looks(x: Tensor) -> tuple[Any, ...]:
    """All of a tensor that a choice of kernels, or a compilation, may depend on."""
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % vendor.ALIGNMENT


def known(key: Any) -> Any | None:
    """The call kept for ``key``, unless other plans are in force now."""
    call = _calls.get(key)
    return call.run if call is not None and plans.current(call.own.arch) is call.own else None


def kept(key: Any, own: plans.Plans, run: Any) -> Any:
    """``run``, which ``known`` finds from now on while ``own`` are the plans in force."""
    keep(_calls, key, Call(own, run))
    return run


def check(a: Tensor, b: Tensor, leaves: int, fused: int) -> str:
    """Name of the contracts of the device that holds a [M, K] and b [N, K]; raises as ``gemm``."""
    name = arch(a.device.index or 0)
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise ContractError(
            f"rl_gemm on {name} got {a.dtype} and {b.dtype}; supported: bfloat16, never TF32 or fp16; convert the model"
        )
    if a.device != b.device:
        raise ContractError(f"rl_gemm got tensors on {a.device} and {b.device}; both must be on one device")
    k, step = a.shape[1], MATRIX_STEP[name]
    if leaves > _MAX_LEAVES:
        raise ContractError(f"tree({leaves}) on {name}: supported are up to {_MAX_LEAVES} leaves on one rank")
    if leaves > 1 and k % (leaves * fused * step):
        raise ContractError(
            f"tree({leaves}) on {name} needs K divisible by {fused}*{leaves}*{step}, got K={k}; "
            "use fewer leaves or pad K"
        )
    return name


def _dense(x: Tensor) -> Tensor:
    """``x`` itself if one of its dimensions is contiguous and rows do not overlap, else a contiguous copy."""
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return x
    if x.stride(0) == 1 and x.stride(1) >= x.shape[0]:
        return x
    return x.contiguous()


# which of the two operands of a product are read the other way round: x [M, K] and y [N, K] are the plain way
_VIEWS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nt": lambda x, y: (x, y),
    "nn": lambda x, y: (x, y.t()),
    "tn": lambda x, y: (x.t(), y.t()),
}


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    leaves: int = 1,
    fused: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    operation: str = "forward",
    boundary: str = "gemm.column",
    views: str = "nt",
) -> Tensor:
    """a [M, K], b [N, K], bf16, any strides -> [M, N]: tree(``leaves``) over K, bias in fp32, one rounding.

    ``operation`` says which call of the layer this is; plans and certificates are kept by it and by the weight's shape.
    ``views``: ``nn`` where b is given as [K, N], ``tn`` where also a is, as [K, M].

    Raises:
        ContractError: another type, mixed devices, or K that the leaves do not divide into whole matrix steps.
        MissingSupport: a GPU without contracts, or no Triton.
    """
    key = gemm_key(a, b, leaves, fused, bias, out_dtype, operation, boundary, views)
    return (known(key) or prepare(key, a, b, bias))(a, b, bias)


def gemm_key(
    a: Tensor,
    b: Tensor,
    leaves: int,
    fused: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    operation: str,
    boundary: str,
    views: str,
) -> tuple[Any, ...]:
    """What the call of ``gemm`` with these arguments is kept by."""
    like = None if bias is None else looks(bias)
    return looks(a), looks(b), like, leaves, fused, out_dtype, operation, boundary, views


def prepare(key: tuple[Any, ...], x: Tensor, y: Tensor, bias: Tensor | None = None) -> Run:
    """The call of ``gemm`` with these tensors and the rest of ``key``; kept where it holds for others that look alike.

    Raises:
        as ``gemm``; nothing is kept then.
    """
    _, _, _, leaves, fused, out_dtype, operation, boundary, views = key
    a, b = _VIEWS[views](x, y)
    name = check(a, b, leaves, fused)
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0:
        return lambda x, *_: x.new_empty((m, n), dtype=out_dtype)
    fused = 1 if leaves == 1 else fused
    dense = _dense(a), _dense(b)
    if dense[0] is not a or dense[1] is not b or (bias is not None and not bias.is_contiguous()):
        # a copy lies where it lies: what to do is looked up for it
        def by_copies(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
            a, b = _VIEWS[views](x, y)
            return gemm(
                _dense(a), _dense(b), leaves=leaves, fused=fused, bias=None if bias is None else bias.contiguous(),
                out_dtype=out_dtype, operation=operation, boundary=boundary,
            )  # fmt: skip

        return by_copies
    own = plans.current(name)
    # a plan's key is the weight's own shape, whichever way round it is read
    weight = {"forward": (n, k), "grad_input": (k, n), "grad_weight": (m, n)}[operation]
    rows = k if operation == "grad_weight" else m
    for use in own.choices(operation, *weight, leaves, rows):
        if use == plans.LIBRARY:
            if leaves == 1 and _library_may(own, operation, weight, rows, a, b, bias, out_dtype):
                count = gpu_tally(boundary, f"rl_gemm.{vendor.NAME}", operation)
                return kept(key, own, _counted(count, _library(a, views, out_dtype)))
            continue
        kernel = _shallow(own.kernels[use], k // leaves // fused, fused)
        if _fits(kernel, a, b, k // leaves, fused):
            count = gpu_tally(boundary, f"rl_gemm.triton.{kernel.kind}", f"{name}:{use}:tree{leaves}")
            run = launcher(kernel, a, b, leaves, fused, bias, out_dtype)
            return kept(key, own, _counted(count, run))
    raise MissingSupport(
        f"no plan of {own.arch} fits {operation} N={n} K={k} leaves={leaves} M={m}; add a row to the plan file"
    )


def _counted(count: Callable[[], None], run: Run) -> Run:
    def counted(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        count()
        return run(x, y, bias)

    return counted


def gate_up_swiglu(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [M, K], weight [2F, K] = [gate; up], bf16 -> [M, F], or None where the plans have no kernel for it.

    Raises:
        ContractError, MissingSupport: as ``gemm``.
    """
    key = plans.GATE_UP, looks(x), looks(weight)
    return (known(key) or prepare_gate_up(key, x, weight))(x, weight)


def prepare_gate_up(key: tuple[Any, ...], x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor | None]:
    """The call of ``gate_up_swiglu`` with these tensors; kept where it holds for others that look alike."""
    name = check(x, weight, 1, 1)
    m, (n, k) = x.shape[0], weight.shape
    if _dense(x) is not x or _dense(weight) is not weight:
        return lambda x, weight: gate_up_swiglu(_dense(x), _dense(weight))
    own = plans.current(name)
    for use in own.choices(plans.GATE_UP, n, k, 1, m) if m else ():
        if use == plans.UNFUSED:
            break
        kernel = own.kernels[use]
        if x.stride(1) == weight.stride(1) == 1 and _fits(kernel, x, weight, k, 1):
            return kept(key, own, _gate_up_launcher(kernel, x, weight, f"{name}:{use}"))
    return kept(key, own, lambda *_: None)


def _gate_up_launcher(kernel: plans.Kernel, x: Tensor, weight: Tensor, plan: str) -> Callable[[Tensor, Tensor], Tensor]:
    column, swiglu = (gpu_tally(boundary, "rl_gemm.triton.gated", plan) for boundary in ("gemm.column", "swiglu"))
    empty = partial(torch.empty, (x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    go = _gated().prepared(kernel, x, weight, empty(), processors_of(x.device.index or 0))

    def run(x: Tensor, weight: Tensor) -> Tensor:
        column()
        swiglu()
        out = empty()
        go(x, weight, out)
        return out

    return run


def _library_may(
    own: plans.Plans,
    operation: str,
    key: tuple[int, int],
    rows: int,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> bool:
    if not vendor.aligned(a, b) or (bias is not None and (out_dtype != a.dtype or bias.dtype != a.dtype)):
        return False
    # certificates are of operands that lie as the layers' own do; others may get other kernels
    lying = {"forward": (a, b), "grad_input": (a, b.t()), "grad_weight": (a.t(), b.t())}[operation]
    if not all(t.is_contiguous() for t in lying):
        return False
    environment = vendor.environment(a.device.index or 0)
    sizes = {min(rows, _SLICE), rows % _SLICE or _SLICE} if operation != "grad_weight" else {rows}
    return all(own.certified(environment, operation, *key, size, bias is not None) for size in sizes)


def _library(a: Tensor, views: str, out_dtype: torch.dtype) -> Run:
    """The library's call for operands given by ``views``, of which ``a`` is the first, read as [M, K]."""
    # a gradient of weights has its certificates for all of its rows
    if a.shape[0] <= _SLICE or views == "tn" or not a.is_contiguous():
        return partial(vendor.product, views, out_dtype)
    return partial(vendor.product_by_rows, views, out_dtype, _SLICE)


def _copy_engine_may(x: Tensor) -> bool:
    outer = x.stride(0) if x.stride(1) == 1 else x.stride(1)
    return x.data_ptr() % 16 == 0 and outer * x.element_size() % 16 == 0


def _shallow(kernel: plans.Kernel, part: int, fused: int) -> plans.Kernel:
    """``kernel``, with a block depth that divides each part of a fused leaf."""
    depth = kernel.block_k
    while fused > 1 and kernel.kind == "leaf" and part % depth:
        depth //= 2
    return kernel if depth == kernel.block_k else replace(kernel, block_k=depth)


def _fits(kernel: plans.Kernel, a: Tensor, b: Tensor, leaf_k: int, fused: int) -> bool:
    part = leaf_k // fused
    if fused > 1 and part % kernel.block_k:
        return False
    if kernel.kind == "leaf":
        return True
    # the copy engine reads whole blocks: a block that hangs over a leaf would fetch the next leaf's elements
    whole = leaf_k % kernel.block_k == 0 or leaf_k == a.shape[1]
    possible = torch.version.hip is None and whole and _copy_engine_may(a) and _copy_engine_may(b)
    if kernel.kind != "hopper":
        return possible
    leaves, whole_rows = a.shape[1] // leaf_k, b.shape[0] % 8 == 0
    shared = leaves % kernel.parts == 0 and leaves // kernel.parts in (1, 2, 4, 8)
    return possible and shared and whole_rows and leaf_k % kernel.block_k == 0 and _gluon() is not None


def launcher(
    kernel: plans.Kernel,
    a: Tensor,
    b: Tensor,
    leaves: int,
    fused: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    stamps: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Run:
    """``kernel`` and the merge that may follow it, for operands that look alike, whichever way round they are given.

    ``stamps``: where a profile wants the times of the two.
    """
    (m, _), n, processors = a.shape, b.shape[0], processors_of(a.device.index or 0)
    empty = partial(torch.empty, (m, n), dtype=out_dtype, device=a.device)
    given, (first, second) = (leaves, fused, processors), stamps
    module, joins, early = _triton(), kernel.kind != "tree" and leaves > 1, kernel.kind == "tma"
    size: tuple[int, ...] = (leaves, m, n)
    if kernel.kind == "hopper":
        module, joins = _gluon(), kernel.parts > 1
        assert module is not None
        size = module.workspace(kernel, a, b).shape if joins else size
    if not joins:
        go = module.prepared(kernel, a, b, bias, empty(), *given, first)

        def whole(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
            out = empty()
            go(x, y, bias, out)
            return out

        return whole
    parts = partial(torch.empty, size, dtype=torch.float32, device=a.device)
    roots = parts()
    go = module.prepared(kernel, a, b, None, roots, *given, first)
    merge = _merge().prepared(roots, bias, empty(), early, second)

    def joined(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        out, roots = empty(), parts()
        go(x, y, None, roots)
        merge(roots, bias, out)
        return out

    return joined
