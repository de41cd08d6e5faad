"""What is replaced inside vLLM, and for how long: only while a strict worker builds its model.

vLLM's registries of out-of-tree layers are process-wide. They are filled when a strict model starts to be built and put
back when it stands, so an engine without our configuration, before or after, builds exactly its own classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_contract import Communicator, MissingSupport, Profile, SingleRank
from rl_vllm import platform


@dataclass(frozen=True)
class Strict:
    """What every strict layer of one engine shares.

    Attributes:
        profile: the contracts this engine must hold.
        comm: the tensor-parallel ranks, in rank order.
    """

    profile: Profile
    comm: Communicator


def communicator(group: Any, profile: Profile) -> Communicator:
    """The peers of one of vLLM's groups, in rank order, agreed on the profile, moving bytes where the layers live."""
    if group.world_size == 1:
        return SingleRank()
    from rl_comm import TreeCommunicator

    if platform.current() is platform.CPU:
        return TreeCommunicator(group.cpu_group, identity=profile.fingerprint)
    return TreeCommunicator(group.device_group, host_group=group.cpu_group, identity=profile.fingerprint)


_active: Strict | None = None


def active() -> Strict:
    """The engine being built.

    Raises:
        MissingSupport: a strict layer is constructed outside a strict worker.
    """
    if _active is None:
        raise MissingSupport(
            "a strict layer was constructed outside a strict worker: "
            "start the engine with rl_vllm.engine_args(profile), which selects the worker class"
        )
    return _active


def foreign_overrides() -> list[str]:
    """Operators that another plugin has already replaced in this process."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rl_vllm.layers import replacements

    found = [
        f"{name} is already replaced by {op_registry_oot[name].__module__}.{op_registry_oot[name].__qualname__}"
        for name in replacements()
        if name in op_registry_oot
    ]
    member = AttentionBackendEnum[platform.current().backend]
    if member.is_overridden():
        found.append(f"attention backend {member.name} is already replaced by {member.get_path()}")
    return found


@contextmanager
def building(strict: Strict) -> Iterator[None]:
    """Inside, vLLM builds strict layers; outside, it is as it came."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from rl_vllm.layers import replacements

    global _active
    if _active is not None:
        raise MissingSupport("two strict models are being built at once in one process; build one after the other")
    if foreign := foreign_overrides():
        raise MissingSupport("another plugin replaces what strict mode replaces: " + "; ".join(foreign))
    ours = replacements()
    here = platform.current()
    member = AttentionBackendEnum[here.backend]
    # get_rope keeps its modules for the whole process: a stock one must not be handed to a strict model
    stock_rope = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    selector._cached_get_attn_backend.cache_clear()
    register_backend(member, here.backend_path)
    op_registry_oot.update(ours)
    _active = strict
    try:
        yield
    finally:
        _active = None
        for name in ours:
            op_registry_oot.pop(name, None)
        member.clear_override()
        selector._cached_get_attn_backend.cache_clear()
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(stock_rope)
