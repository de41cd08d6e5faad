"""The one switch: ``engine_args`` for Python, ``--hf-overrides`` for ``vllm serve``; both end in ``apply_strict``."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_contract import ContractError, Profile

MODES = ("strict", "audit", "off")
LOGITS_PROCESSOR = "rl_vllm.sampling:StrictSampling"
WORKERS = {"strict": "rl_vllm.worker.StrictCPUWorker", "audit": "rl_vllm.worker.AuditCPUWorker"}

# field of vLLM's EngineArgs -> (value strict mode sets, values a user may have left there)
STRICT_FIELDS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "worker_cls": (WORKERS["strict"], ("auto",)),
    # temperature-scaled log-probabilities: the sampling distribution, which is what a trainer recomputes
    "logprobs_mode": ("processed_logprobs", ("raw_logprobs",)),
    # a checkpoint's generation_config.json would bring top-p and top-k along
    "generation_config": ("vllm", ("auto",)),
    # compiled graphs on the CPU are not yet proven equal
    "enforce_eager": (True, (False, None)),
    "async_scheduling": (False, (None,)),
}


def engine_args(profile: Profile, mode: str = "strict", **overrides: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` or ``EngineArgs``.

    Args:
        profile: the contracts the engine must hold.
        mode: ``strict`` installs the strict operators and refuses what they do not cover; ``audit`` keeps vLLM's own
            operators, but reports the same log-probabilities (temperature-scaled), accepts the same weight pushes and
            answers ``report``; ``off`` returns the overrides alone.
        overrides: any argument of ``vllm.LLM``, e.g. ``model``, ``tensor_parallel_size``, ``max_model_len``.

    Raises:
        ContractError: an unknown mode, or an override that contradicts strict mode.
    """
    from rl_vllm.config import carrier
    from rl_vllm.plugin import TRANSFER_BACKEND, register

    if mode not in MODES:
        raise ContractError(f"mode={mode!r} is not supported; supported: {MODES}")
    if mode == "off":
        return dict(overrides)
    if _plugin_excluded():
        raise ContractError(
            f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} keeps vLLM from loading rl_vllm; add it there or unset it"
        )
    register()
    args = dict(overrides)
    args.setdefault("weight_transfer_config", {"backend": TRANSFER_BACKEND})
    args.setdefault("dtype", profile.settings.dtype)
    if isinstance(args["weight_transfer_config"], Mapping):
        from vllm.config import WeightTransferConfig

        args["weight_transfer_config"] = WeightTransferConfig(**args["weight_transfer_config"])
    if mode == "audit":
        args.setdefault("logprobs_mode", "processed_logprobs")
        args.setdefault("generation_config", "vllm")
        args.setdefault("worker_cls", WORKERS["audit"])
        return args
    given = args.get("hf_overrides") or {}
    if not isinstance(given, Mapping):
        raise ContractError("hf_overrides must be a mapping in strict mode, which carries its profile there")
    args["hf_overrides"] = {**given, **carrier(profile)}
    for field, (value, _) in STRICT_FIELDS.items():
        args.setdefault(field, value)
    processors = list(args.get("logits_processors") or [])
    args["logits_processors"] = processors + [LOGITS_PROCESSOR] * (LOGITS_PROCESSOR not in processors)
    return args


def serve_flags(profile: Profile, path: str | Path) -> list[str]:
    """Write the profile to ``path`` and return the flags that make ``vllm serve`` strict."""
    Path(path).write_text(json.dumps(profile.to_dict(), indent=1, sort_keys=True))
    return ["--hf-overrides", json.dumps({"quantization_config": {"quant_method": "rl_strict", "profile": str(path)}})]


def apply_strict(arguments: Any) -> None:
    """Set what strict mode needs on vLLM's ``EngineArgs``, in place.

    Raises:
        ContractError: the user set something else; every contradiction is listed.
    """
    from rl_vllm.config import METHOD, carried, carrier

    problems = []
    for field, (value, untouched) in STRICT_FIELDS.items():
        given = getattr(arguments, field, value)
        if given != value and given not in untouched:
            problems.append(f"{field}={given!r}, strict mode needs {value!r}; leave it unset")
        elif hasattr(arguments, field):
            setattr(arguments, field, value)
    processors = list(arguments.logits_processors or [])
    foreign = [p for p in processors if p != LOGITS_PROCESSOR]
    if foreign:
        problems.append(f"logits_processors={foreign!r} change the sampling distribution; remove them")
    if arguments.quantization not in (None, METHOD):
        problems.append(f"quantization={arguments.quantization!r}; strict mode supports unquantised weights")
    if problems:
        raise ContractError("strict engine arguments: " + "; ".join(problems))
    arguments.logits_processors = [LOGITS_PROCESSOR]
    profile = carried(arguments.hf_overrides)
    assert profile is not None
    # a path becomes the profile itself, so that workers on other hosts need no file
    arguments.hf_overrides = {**arguments.hf_overrides, **carrier(profile)}
    if arguments.dtype == "auto":
        arguments.dtype = profile.settings.dtype


def _plugin_excluded() -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and "rl_vllm" not in allowed.split(",")


@contextmanager
def cpu_environment(tensor_parallel_size: int = 1, *, kv_cache_gib: int = 1) -> Iterator[None]:
    """Environment that vLLM's CPU build reads before its workers start; what was set before wins, and stays afterwards.

    ``VLLM_CPU_OMP_THREADS_BIND``: one core per rank, round robin; vLLM refuses more ranks than NUMA nodes otherwise.
    ``VLLM_CPU_KVCACHE_SPACE``: GiB of cache per worker.
    ``NUMBA_NUM_THREADS``: one thread per rank when ranks share cores.
    ``VLLM_BATCH_INVARIANT`` is refused: on a CPU it replaces aten by GPU kernels.

    Raises:
        ContractError: VLLM_BATCH_INVARIANT is on.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise ContractError(
            "VLLM_BATCH_INVARIANT=1 does not work in vLLM's CPU build; unset it, strict mode replaces it"
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    wanted = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}
    if tensor_parallel_size > 1:
        per_rank = [str(cores[r % len(cores)]) for r in range(tensor_parallel_size)]
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(per_rank), "NUMBA_NUM_THREADS": "1"}
    ours = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
