"""TransformerEngine for the native arm: whether its operators can serve here, and what of them really runs.

Nothing is imported before it is asked for, so that a strict run never loads it by this module.
"""

import os
import sys
from collections.abc import Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import torch

from rl_contract import ContractError, MissingSupport
from rl_megatron.checks import choice_problem

NativeOperators = Literal["auto", "te", "local"]
"""``te`` is Megatron's TransformerEngine spec, ``local`` its own modules, ``auto`` the first where it can serve."""
NATIVE_OPERATORS: tuple[str, ...] = get_args(NativeOperators)

_NAME = "transformer_engine"
_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def option_problem(operators: object, mode: object) -> str | None:
    """What is wrong with the option by itself; None where nothing is."""
    if problem := choice_problem("native_operators", operators, NATIVE_OPERATORS):
        return problem
    # an array of modes is another problem's
    if isinstance(mode, str) and mode == "strict" and operators != "auto":
        return f"native_operators={operators!r} with mode='strict', which runs its own; leave it out"
    return None


class Choice(NamedTuple):
    """Which operators run, and why ``auto`` did not take TransformerEngine's; None where it was not asked or did."""

    operators: Literal["te", "local"]
    fallback: str | None = None


def choose(operators: str, *, device: str, dtype: str, staged: bool = False) -> Choice:
    """Which operators the native arm runs.

    Args:
        device: type of the device, ``cpu`` or ``cuda``.
        dtype: of the weights, as the profile names it.
        staged: ranks share a GPU, so that bytes between them move through the host.

    Raises:
        ContractError: no such option, or ``te`` with a device, a type or ranks that it can't serve.
        MissingSupport: ``te`` where Megatron-core can't import TransformerEngine.
    """
    if problem := option_problem(operators, "native"):
        raise ContractError(problem)
    if operators == "local":
        return Choice("local")
    unfit = None
    if device != "cuda":
        unfit = f"device={device!r}, TransformerEngine supports: 'cuda'"
    elif dtype != "bfloat16":
        unfit = f"dtype={dtype!r}, its packed attention supports: 'bfloat16'"
    elif staged:
        unfit = "ranks that share a GPU, its collectives support: NCCL, a GPU for each rank"
    missing = missing_part() if unfit is None else None
    if unfit is None and missing is None:
        return Choice("te")
    if operators == "auto":
        return Choice("local", unfit or f"TransformerEngine can't be used, {missing}")
    if unfit is not None:
        raise ContractError(f"native_operators='te' with {unfit}; use 'local', or 'auto'")
    raise MissingSupport(
        f"native_operators='te' needs TransformerEngine, {missing}; pip install --no-build-isolation "
        "'transformer-engine[pytorch]' for this torch and CUDA, or use 'local', or 'auto'"
    )


def missing_part() -> str | None:
    """Why Megatron-core can't use TransformerEngine in this process; None where it can."""
    try:
        spec = find_spec(_NAME)
    except ValueError:
        return f"and sys.modules[{_NAME!r}] is a module without __spec__, which stands in for it"
    if spec is None:
        return f"and no package {_NAME} is installed"
    try:
        import_module(f"{_NAME}.pytorch")
        loaded = import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    except Exception as error:
        # a library that is not found is an OSError, versions that differ are an AssertionError
        return f"and importing it fails with {type(error).__name__}: {error}"
    return None if loaded else "and megatron-core found none as it was imported"


def version() -> str:
    """Of the installed TransformerEngine."""
    try:
        return metadata.version(_NAME)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(_NAME), "__version__", "of no known version"))


def label(operators: str) -> str:
    """How pages name a native arm."""
    return f"native (TransformerEngine {version()})" if operators == "te" else "native (no TransformerEngine)"


def report(operators: str, fallback: str | None = None) -> dict[str, Any]:
    """What the native arm runs: its name, the attention that was asked for and, once it has run, the one that ran.

    Args:
        fallback: why ``auto`` took ``local``, as ``choose`` says; it is reported as it is.
    """
    found: dict[str, Any] = {"name": label(operators), "operators": operators}
    if fallback is not None:
        found["fallback"] = fallback
    if operators == "te":
        found |= {
            "transformer_engine": version(),
            "attention_asked": "auto: " + ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in _SWITCHES),
            "attention_ran": _attention_ran(),
        }
    return found


def _attention_ran() -> str | None:
    """The last backend that its attention chose; None before the first call."""
    home = sys.modules.get(f"{_NAME}.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen: dict[str, Any] = getattr(home, "_attention_backends", None) or {}
    if chosen.get("use_flash_attention"):
        return f"FlashAttention {chosen.get('flash_attention_backend')}"
    if chosen.get("use_fused_attention"):
        return f"FusedAttention (cuDNN), {chosen.get('fused_attention_backend')}"
    return "UnfusedDotProductAttention" if chosen.get("use_unfused_attention") else None


def name_random_state() -> None:
    """Give Megatron's tracker of generators the state that TransformerEngine's layers ask it for as they are built.

    Recomputation leaves the tracker initialised and without one. Nothing is drawn from it: weights are loaded.
    """
    random = import_module("megatron.core.tensor_parallel.random")
    tracker, name = random.get_cuda_rng_tracker(), random._MODEL_PARALLEL_RNG_TRACKER_NAME
    if tracker.is_initialized() and name not in tracker.get_states():
        tracker.add(name, 1)


def add_to_main_grads(model: torch.nn.Module) -> None:
    """Let its linear layers add weight gradients to ``main_grad`` themselves; call once every weight has one.

    Megatron's own option needs Apex for the head, whose gradient stays one of autograd.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 - not declared by Module


def refuse_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raise ContractError where a strict model holds a module of TransformerEngine; Megatron prefers them if it can."""
    found = [
        f"{name} ({type(module).__qualname__})"
        for name, module in modules
        if any(kind.__module__.partition(".")[0] == _NAME for kind in type(module).__mro__)
    ]
    if found:
        raise ContractError(
            f"the strict model would run TransformerEngine's operators in {', '.join(found[:4])} ({len(found)} "
            "modules); this megatron-core puts them where the layer spec names none, use a supported version"
        )
