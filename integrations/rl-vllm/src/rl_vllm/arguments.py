"""The one switch: ``engine_args`` for Python, ``--hf-overrides`` for ``vllm serve``; both end in ``apply_strict``."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_contract import ContractError, MissingSupport, Profile, check_built
from rl_vllm import platform

MODES = ("strict", "audit", "off")


def engine_args(profile: Profile, mode: str = "strict", **overrides: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` or ``EngineArgs``.

    Args:
        profile: the contracts the engine must hold.
        mode: ``strict`` installs the strict operators and refuses what they do not cover; ``audit`` keeps vLLM's own
            operators, but reports the same log-probabilities (temperature-scaled), accepts the same weight pushes and
            answers ``report``; ``off`` returns the overrides alone.
        overrides: any argument of ``vllm.LLM``, e.g. ``model``, ``tensor_parallel_size``, ``max_model_len``.

    Raises:
        ContractError: an unknown mode, a profile that is none or not what its settings make (``check_built``), a
            tensor_parallel_size that is no positive integer, a model that is neither name nor path, overrides that
            contradict strict mode (vLLM's defaults too, where they are given), or an ``additional_config`` with a key
            that is spelled like an option and is none.
        MissingSupport: vLLM or this package is not installed, vLLM lacks a hook or runs on an unknown platform.
    """
    if mode not in MODES:
        raise ContractError(f"mode={mode!r} is not supported; supported: {MODES}")
    if mode == "off":
        return dict(overrides)
    _positive("tensor_parallel_size", overrides.get("tensor_parallel_size", 1))
    if not isinstance(overrides.get("model", ""), (str, os.PathLike)):
        raise ContractError(f"model={overrides['model']!r:.80}, supported: a name or a path")
    check_built(profile)
    if _plugin_excluded():
        raise ContractError(
            f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} keeps vLLM from loading rl_vllm; add it there or unset it"
        )
    if not _plugin_known():
        raise MissingSupport(
            "rl_vllm can be imported but is not installed, so vLLM's processes would not load it; supported: an "
            "installed one, whose entry point they find: pip install integrations/rl-vllm"
        )
    here = platform.current()
    from rl_vllm import options
    from rl_vllm.config import carrier
    from rl_vllm.plugin import TRANSFER_BACKEND, register

    more = overrides.get("additional_config")
    problems = options.problems(more, profile.fingerprint)
    if mode == "strict":
        problems = _contradicted(here, overrides) + problems
    elif isinstance(more, Mapping):
        problems += [f"{key} is an option of strict mode; leave it out" for key in options.NAMES if key in more]
    if problems:
        raise ContractError(f"{mode} engine arguments: " + "; ".join(problems))

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
        args.setdefault("worker_cls", here.workers["audit"])
        return args
    given = args.get("hf_overrides") or {}
    if not isinstance(given, Mapping):
        raise ContractError("hf_overrides must be a mapping in strict mode, which carries its profile there")
    args["hf_overrides"] = {**given, **carrier(profile)}
    for field, (value, _) in here.fields.items():
        args.setdefault(field, value)
    processors = list(args.get("logits_processors") or [])
    args["logits_processors"] = processors + [p for p in here.logits_processors if p not in processors]
    return args


def _contradicted(here: platform.Platform, overrides: Mapping[str, Any]) -> list[str]:
    """Overrides other than what strict mode sets; None, and a worker class of ``auto``, leave the choice to it."""
    found = []
    for field, (value, _) in here.fields.items():
        given = overrides.get(field)
        left = given is None or (field == "worker_cls" and given == "auto")
        if not left and getattr(given, "name", given) != value:
            found.append(f"{field}={given!r}, strict mode needs {value!r}; leave it unset")
    return found


def serve_flags(profile: Profile, path: str | Path) -> list[str]:
    """Write the profile to ``path`` and return the flags that make ``vllm serve`` strict.

    Raises:
        ContractError: it is no profile, or not what its settings make, or the path cannot be written.
    """
    check_built(profile)
    try:
        Path(path).write_text(json.dumps(profile.to_dict(), indent=1, sort_keys=True))
    except OSError as error:
        raise ContractError(f"{path} cannot be written ({error}); give a file in a directory that exists") from error
    return ["--hf-overrides", json.dumps({"quantization_config": {"quant_method": "rl_strict", "profile": str(path)}})]


def apply_strict(arguments: Any) -> None:
    """Set what strict mode needs on vLLM's ``EngineArgs``, in place.

    Raises:
        ContractError: the user set something else; every contradiction is listed.
    """
    if problems := settle(arguments):
        raise ContractError("strict engine arguments: " + "; ".join(problems))


def settle(arguments: Any) -> list[str]:
    """As ``apply_strict``, but returns the contradictions, so that one error can list them with all others."""
    here = platform.current()
    from rl_vllm.config import METHOD, carried, carrier

    problems = []
    for field, (value, untouched) in here.fields.items():
        given = getattr(arguments, field, value)
        # a backend may be given as a member of vLLM's enumeration
        if getattr(given, "name", given) != value and given not in untouched:
            problems.append(f"{field}={given!r}, strict mode needs {value!r}; leave it unset")
        elif hasattr(arguments, field):
            setattr(arguments, field, value)
    foreign = [p for p in arguments.logits_processors or [] if p not in here.logits_processors]
    if foreign:
        problems.append(f"logits_processors={foreign!r} change the sampling distribution; remove them")
    if arguments.quantization not in (None, METHOD):
        problems.append(f"quantization={arguments.quantization!r}; strict mode supports unquantised weights")
        arguments.quantization = None
    problems += unsupported(
        lora=arguments.enable_lora,
        speculative=arguments.speculative_config,
        pipeline=arguments.pipeline_parallel_size,
        expert=arguments.enable_expert_parallel,
    )
    # taken out, so that vLLM's own refusal of one of them does not hide what else is wrong
    arguments.enable_lora = arguments.enable_expert_parallel = False
    arguments.speculative_config, arguments.pipeline_parallel_size = None, 1
    profile = carried(arguments.hf_overrides)
    assert profile is not None
    wanted = profile.settings.dtype
    for field, fallback, fits in (("dtype", wanted, ("auto", wanted)), ("kv_cache_dtype", "auto", ("auto", wanted))):
        given = str(getattr(arguments, field)).removeprefix("torch.")
        if given not in fits:
            problems.append(f"{field}={given}, the profile has {wanted}: pass {field}={fallback!r}")
            setattr(arguments, field, fallback)
    problems += _quiet_compiler(arguments)
    arguments.logits_processors = list(here.logits_processors) or None
    # a path becomes the profile itself, so that workers on other hosts need no file
    arguments.hf_overrides = {**arguments.hf_overrides, **carrier(profile)}
    if arguments.dtype == "auto":
        arguments.dtype = profile.settings.dtype
    from rl_vllm import options

    if wrong := options.problems(arguments.additional_config, profile.fingerprint):
        problems += wrong
        arguments.additional_config = {}
    # vLLM names its compiled graphs by its configuration, in which the profile takes no part by itself
    arguments.additional_config = {**(arguments.additional_config or {}), options.FINGERPRINT: profile.fingerprint}
    return problems


def unsupported(*, lora: Any, speculative: Any, pipeline: int, expert: bool) -> list[str]:
    """What no strict operator serves, in the words of every entrance."""
    asked = {
        "LoRA": bool(lora),
        "speculative decoding": speculative is not None,
        f"pipeline parallel {pipeline}": pipeline > 1,
        "expert parallel": bool(expert),
    }
    return [f"{what} is not supported: switch it off" for what, there in asked.items() if there]


def _quiet_compiler(arguments: Any) -> list[str]:
    """Switch off, in place, the passes that put another kernel where strict ones stand; returns those asked for."""
    from vllm.config import CompilationConfig

    if not isinstance(compilation := arguments.compilation_config, CompilationConfig):
        arguments.compilation_config = CompilationConfig()
        return [f"compilation_config={compilation!r:.80}, supported: a mapping or vLLM's CompilationConfig"]
    passes = compilation.pass_config
    names = rewriting_passes(passes)
    asked = [name for name in names if getattr(passes, name)]
    for name in names:
        if name not in asked:
            setattr(passes, name, False)
    # vLLM would compile each switched-off operator once more by itself
    if not {"all", "none"} & set(compilation.custom_ops):
        compilation.custom_ops = [*compilation.custom_ops, "all"]
    return [f"{pass_label(name)} is not supported: switch it off" for name in asked]


def rewriting_passes(passes: Any) -> list[str]:
    """Flags of vLLM's pass configuration that replace operators, whatever this version has of them."""
    fields = getattr(type(passes), "__dataclass_fields__", None) or vars(passes)
    return sorted(n for n in fields if n.startswith(("fuse_", "enable_")))


def pass_label(name: str) -> str:
    return "sequence parallel" if name == "enable_sp" else f"the fusion pass {name}"


def _positive(name: str, value: Any) -> None:
    # True is an int to isinstance
    if type(value) is not int or value < 1:
        raise ContractError(f"{name}={value!r}, supported: a positive integer")


def _plugin_excluded() -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and "rl_vllm" not in allowed.split(",")


def _plugin_known() -> bool:
    return any(found.name == "rl_vllm" for found in metadata.entry_points(group="vllm.general_plugins"))


@contextmanager
def cpu_environment(tensor_parallel_size: int = 1, *, kv_cache_gib: int = 1) -> Iterator[None]:
    """Environment that vLLM's CPU build reads before its workers start; what was set before wins, and stays afterwards.

    ``VLLM_CPU_OMP_THREADS_BIND``: one core per rank, round robin; vLLM refuses more ranks than NUMA nodes otherwise.
    ``VLLM_CPU_KVCACHE_SPACE``: GiB of cache per worker.
    ``NUMBA_NUM_THREADS``: one thread per rank when ranks share cores.
    ``VLLM_BATCH_INVARIANT`` is refused: on a CPU it replaces aten by GPU kernels.

    Raises:
        ContractError: VLLM_BATCH_INVARIANT is on, or a size is no positive integer.
    """
    _positive("tensor_parallel_size", tensor_parallel_size)
    _positive("kv_cache_gib", kv_cache_gib)
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
