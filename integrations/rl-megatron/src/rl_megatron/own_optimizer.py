"""Megatron-core's optimizer on torch's Adam and Megatron's own norm and clip, whatever else is installed.

As they are imported, four modules of Megatron-core take Adam, the gradient norm and the scaling from TransformerEngine
or Apex where one of them is there. Inside ``pinned()`` these names hold what Megatron takes where neither is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale

from rl_contract import MissingSupport

FOREIGN = frozenset({"transformer_engine", "transformer_engine_torch", "apex", "amp_C"})
"""Packages whose code Megatron's optimizer may hold."""

_SCALING = {
    "amp_C": None,
    "multi_tensor_applier": local_multi_tensor_applier,
    "multi_tensor_scale": local_multi_tensor_scale,
    "multi_tensor_scale_impl": local_multi_tensor_scale,
}
PINS: dict[str, dict[str, Any]] = {
    "megatron.core.optimizer": {
        "Adam": torch.optim.AdamW,
        "SGD": torch.optim.SGD,
        "USING_PYTORCH_OPTIMIZER": True,
    },
    "megatron.core.optimizer.optimizer": _SCALING,
    "megatron.core.optimizer.clip_grads": _SCALING
    | {
        "multi_tensor_l2norm": local_multi_tensor_l2_norm,
        "l2_norm_impl": local_multi_tensor_l2_norm,
        # a scale that stays on the device, of newer Megatron-core, which has none of its own
        "multi_tensor_scale_tensor": None,
        "multi_tensor_scale_tensor_impl": None,
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "Adam": torch.optim.Adam,
        "HAVE_APEX_OR_TE": False,
        "USING_TE_OPTIMIZER": False,
        "USING_APEX_OPTIMIZER": False,
    },
}
"""What each module's names hold inside ``pinned()``; a name that a module does not have is left out."""


@contextmanager
def pinned() -> Iterator[None]:
    """Give Megatron's names what it has without TransformerEngine and Apex; undone on exit, also after an error.

    Raises:
        MissingSupport: a name of another package that this version has besides; nothing is changed.
    """
    saved: list[tuple[ModuleType, str, Any]] = []
    try:
        for home, pins in PINS.items():
            module = import_module(home)
            for name in pins.keys() & vars(module).keys():
                saved.append((module, name, getattr(module, name)))
                setattr(module, name, pins[name])
            if left := sorted(name for name, value in vars(module).items() if _foreign(value)):
                raise MissingSupport(
                    f"OptimizerConfig(kind='megatron'): {home} has {', '.join(left[:4])} of TransformerEngine or Apex, "
                    "which this arm never runs; use kind='strict', a supported megatron-core, or uninstall them"
                )
        yield
    finally:
        for module, name, value in reversed(saved):
            setattr(module, name, value)


def what_runs(optimizer: Any) -> dict[str, str]:
    """Class of the update, functions of norm and clip that ``get_megatron_optimizer``'s result runs, by full name."""
    clip = import_module("megatron.core.optimizer.clip_grads")
    # one for each kind of parameter, or one alone
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    classes = sorted({qualified(type(part.optimizer)) for part in parts if part.optimizer is not None})
    scale = getattr(clip, "multi_tensor_scale_tensor_impl", None) or clip.multi_tensor_scale_impl
    return {"update": ", ".join(classes), "norm": qualified(clip.l2_norm_impl), "clip": qualified(scale)}


def qualified(found: Any) -> str:
    """Module and name of a class or function."""
    return f"{found.__module__}.{getattr(found, '__qualname__', None) or found.__name__}"


def _foreign(value: object) -> bool:
    if isinstance(value, ModuleType):
        home = value.__name__
    else:
        # an instance has its class's
        home = getattr(value, "__module__", None) or type(value).__module__
    return str(home).partition(".")[0] in FOREIGN
