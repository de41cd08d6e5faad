"""Entry point ``vllm.general_plugins``: loaded in every vLLM process, strict or not.

It adds four things (a quantisation config, a weight-transfer backend, the reading of ``rl_strict`` in the engine's
arguments, the check of a request to such an engine) and replaces no operator: that happens inside a strict worker while
it builds its model, see ``scope``. On a CPU it also asks for what vLLM's own attention takes for granted.
"""

import functools
from typing import Any

from rl_contract import ContractError, MissingSupport

TRANSFER_BACKEND = "vime_sync"


def register() -> None:
    """Idempotent.

    Raises:
        MissingSupport: vLLM is not installed, or lacks a hook that strict mode needs; its name is in the message.
    """
    from rl_vllm import platform

    platform.require_vllm()
    from rl_vllm import config
    from rl_vllm.preflight import missing_hooks

    if missing := missing_hooks():
        raise MissingSupport("this vLLM lacks what rl-vllm needs: " + "; ".join(missing))
    config.register()
    _register_transfer()
    _wrap_engine_args()
    _wrap_admission()
    _ask_for_amx()


def _register_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "rl_vllm.transfer", "VimeSyncTransferEngine")


def _wrap_engine_args() -> None:
    # vLLM offers no hook between its arguments and its configuration
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if getattr(stock, "_rl_vllm", False):
        return

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from rl_vllm import platform
        from rl_vllm.arguments import settle
        from rl_vllm.config import carried
        from rl_vllm.preflight import check_engine

        profile = carried(self.hf_overrides)
        if profile is None:
            return stock(self, *args, **kwargs)
        found = settle(self)
        try:
            vllm_config = stock(self, *args, **kwargs)
        except Exception as error:
            # vLLM may refuse by itself what was asked beside us; all of it belongs into one error
            if found:
                raise ContractError(
                    "; ".join(["strict engine preflight: " + found[0], *found[1:], str(error)])
                ) from error
            raise
        hf_config = vllm_config.model_config.hf_config
        check_engine(profile, hf_config, self.tensor_parallel_size, vllm_config=vllm_config, found=found)
        if platform.current() is platform.CUDA:
            from rl_vllm.fusing import decide

            decide(vllm_config)
        return vllm_config

    create_engine_config._rl_vllm = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def _wrap_admission() -> None:
    # logits processors are vLLM's own hook for this, but its V2 model runner has none, and with one an engine no longer
    # schedules a step while the last one runs
    from vllm import SamplingParams

    stock = SamplingParams.verify
    if getattr(stock, "_rl_vllm", False):
        return

    @functools.wraps(stock)
    def verify(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if model_config.quantization == "rl_strict":
            from rl_vllm.sampling import refuse

            refuse(self)
        return stock(self, model_config, *args, **kwargs)

    verify._rl_vllm = True  # type: ignore[attr-defined]
    SamplingParams.verify = verify  # type: ignore[method-assign]


def _ask_for_amx() -> None:
    # vLLM's attention takes AMX wherever the processor has it, but Linux ends a process that uses it and has not asked
    # (signal 4); only oneDNN asks, and products of small models go elsewhere
    import torch
    from vllm.platforms import current_platform

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None and current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        ask()
