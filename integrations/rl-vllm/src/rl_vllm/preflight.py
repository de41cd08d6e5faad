"""Everything that can be known to be wrong before a weight is loaded, in one list."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_contract import ContractError, MissingSupport, Profile
from rl_vllm import platform
from rl_vllm.arguments import pass_label, rewriting_passes, unsupported
from rl_vllm.settings import ARCHITECTURES, hf_config_dict, settings_from_hf
from vime_sync import ModelShape
from vime_sync.shape import architectures

# module, attribute path: what strict mode takes hold of; present or not, whatever the version says
HOOKS = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    ("vllm.sampling_params", "SamplingParams.verify"),
    ("vllm.model_executor.layers.quantization", "register_quantization_config"),
    ("vllm.model_executor.custom_op", "op_registry_oot"),
    ("vllm.model_executor.custom_op", "PluggableLayer"),
    ("vllm.v1.attention.backends.registry", "register_backend"),
    ("vllm.v1.attention.selector", "_cached_get_attn_backend"),
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),
    ("vllm.v1.sample.sampler", "Sampler.compute_logprobs"),
    ("vllm.v1.sample.sampler", "Sampler.sample"),
    ("vllm.v1.sample.logits_processor", "LogitsProcessor.validate_params"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine"),
)


def missing_hooks(more: platform.Hooks = ()) -> list[str]:
    """Names of the hooks this vLLM lacks, of those needed everywhere and of ``more``."""
    missing = []
    for module, path in (*HOOKS, *more):
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path}")
    return missing


def engine_violations(profile: Profile, model: Any, tp: int, *, vllm_config: Any = None) -> list[str]:
    """Every reason why a strict engine can't hold ``profile``, each with what is supported.

    Args:
        model: checkpoint folder, mapping or transformers configuration.
        tp: tensor-parallel size of the engine.
        vllm_config: where vLLM's configuration exists already, it is checked too.
    """
    found: list[str] = []
    try:
        config = hf_config_dict(model)
    except ContractError as error:
        return [str(error)]
    # our own carrier
    if (config.get("quantization_config") or {}).get("quant_method") == "rl_strict":
        config = {k: v for k, v in config.items() if k != "quantization_config"}
    found += _model(profile, config, tp)
    folder = Path(str(model)) if isinstance(model, (str, Path)) else None
    if vllm_config is not None:
        found += _engine(profile, vllm_config)
        folder = Path(vllm_config.model_config.model)
        if vllm_config.load_config.load_format == "dummy":
            folder = None
    if folder is not None and folder.is_dir() and not found:
        found += _checkpoint(folder, ModelShape.from_hf_config(config))
    return found


def check_engine(profile: Profile, model: Any, tp: int, *, vllm_config: Any = None, found: Iterable[str] = ()) -> None:
    """Raise one ContractError that lists every violation; see ``engine_violations``. ``found``: those known already."""
    every = dict.fromkeys([*found, *engine_violations(profile, model, tp, vllm_config=vllm_config)])
    if every:
        raise ContractError("strict engine preflight: " + "; ".join(every))


def _model(profile: Profile, config: dict[str, Any], tp: int) -> list[str]:
    found = []
    settings = profile.settings
    try:
        architecture = (architectures(config) or ["?"])[0]
    except ContractError as error:
        return [str(error)]
    if architecture not in ARCHITECTURES:
        return [f"architecture {architecture}: supported are {', '.join(ARCHITECTURES)} (dense, full attention)"]
    try:
        shape = ModelShape.from_hf_config(config)
        shape.check_tp(tp)
    except (ContractError, RuntimeError) as error:
        return [str(error)]
    if settings.leaves % tp:
        found.append(f"leaves={settings.leaves} is not divisible by tp={tp}: build the profile with leaves >= {tp}")
    for name, k in (("o_proj", shape.heads * shape.head_dim), ("down_proj", shape.ffn)):
        if k % settings.leaves:
            found.append(f"leaves={settings.leaves} does not divide K={k} of {name}: use fewer leaves")
    if tp not in (1, 2, 4, 8):
        found.append(f"tp={tp}: supported are 1, 2, 4, 8")
    try:
        own = settings_from_hf(config, leaves=settings.leaves, dtype=settings.dtype)
        for field in ("hidden_size", "vocab_size", "norm_eps", "rope"):
            if getattr(own, field) != getattr(settings, field):
                found.append(
                    f"the model has {field}={getattr(own, field)!r}, the profile {getattr(settings, field)!r}: "
                    "build the profile from this model (rl_vllm.settings_from_hf)"
                )
    except ContractError as error:
        found.append(str(error))
    return found


def _engine(profile: Profile, vllm_config: Any) -> list[str]:
    import vllm.envs as envs

    found = []
    settings = profile.settings
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    try:
        here, arch = platform.current(), platform.arch()
    except MissingSupport as error:
        return [str(error)]
    if settings.arch != arch:
        found.append(f"the profile is for arch {settings.arch!r}, the engine runs on {arch!r}")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != settings.dtype:
        found.append(f"dtype={dtype}, the profile has {settings.dtype}: pass dtype={settings.dtype!r}")
    if here is platform.CUDA and dtype != "bfloat16":
        found.append(f"dtype={dtype} on a GPU: supported is bfloat16")
    found += _attention(profile, here, model, cache.block_size)
    passes = vllm_config.compilation_config.pass_config
    found += unsupported(
        lora=vllm_config.lora_config,
        speculative=vllm_config.speculative_config,
        pipeline=parallel.pipeline_parallel_size,
        expert=getattr(parallel, "enable_expert_parallel", False),
    )
    v2 = bool(getattr(vllm_config, "use_v2_model_runner", False))
    asked = {
        "decode context parallel": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "prefill context parallel": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "dual batch overlap": bool(getattr(parallel, "enable_dbo", False)),
        **{pass_label(name): bool(getattr(passes, name)) for name in rewriting_passes(passes)},
        f"kv_cache_dtype={cache.cache_dtype}": cache.cache_dtype not in ("auto", dtype),
        "CPU offload of weights": bool(getattr(vllm_config, "offload_config", None) and _offloads(vllm_config)),
        "the V2 model runner on a CPU": v2 and here is platform.CPU,
        f"head_dtype={getattr(model, 'head_dtype', None)}": getattr(model, "head_dtype", model.dtype) != model.dtype,
        "a KV transfer connector": vllm_config.kv_transfer_config is not None,
        "VLLM_BATCH_INVARIANT=1, which strict mode replaces,": bool(envs.VLLM_BATCH_INVARIANT),
    }
    found += [f"{what} is not supported: switch it off" for what, there in asked.items() if there]
    limit = getattr(model.hf_config, "max_position_embeddings", None)
    if limit and model.max_model_len > limit:
        found.append(f"max_model_len={model.max_model_len}: the position table has {limit} rows, use at most that")
    if missing := missing_hooks(here.hooks):
        found.append("this vLLM lacks " + ", ".join(missing))
    from rl_vllm.scope import foreign_overrides

    return found + foreign_overrides()


def _attention(profile: Profile, here: platform.Platform, model: Any, page: int | None) -> list[str]:
    if profile.settings.attention == "segments":
        return []
    if here is platform.CPU:
        return [f"attention={profile.settings.attention!r}: the paged CPU kernel serves 'segments'"]
    from rl_attn.nosplit import check_page, library_for

    try:
        library = library_for(profile.settings.arch)
    except ContractError as error:
        return [str(error)]
    found = []
    if (dim := model.get_head_size()) not in library.head_dims:
        found.append(f"attention='nosplit' with head_dim {dim}: {library.id} serves {library.head_dims}")
    try:
        # without a size vLLM takes its default of 16, which is certified
        check_page(library, page or 16)
    except ContractError as error:
        found.append(f"block_size={page}: {error}")
    return found


def _offloads(vllm_config: Any) -> bool:
    uva = getattr(vllm_config.offload_config, "uva", None)
    return bool(getattr(uva, "cpu_offload_gb", 0))


def _checkpoint(folder: Path, shape: ModelShape) -> list[str]:
    """Names and shapes from the safetensors headers; values are checked when they are loaded."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return [f"{folder} holds no *.safetensors: convert the checkpoint to safetensors"]
    have: dict[str, tuple[int, ...]] = {}
    types: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                have |= {name: tuple(s.get_shape()) for name, s in slices.items()}
                types |= {name: s.get_dtype() for name, s in slices.items()}
        except Exception as error:  # safetensors raises its own type for a broken header
            return [f"{file}: {error}"]
    want = dict(shape.hf_shapes())
    extra = set(have) - set(want) - ({"lm_head.weight"} if shape.tied else set())
    found = [f"checkpoint lacks {name}" for name in want if name not in have]
    quantised = sorted({t for name, t in types.items() if name in want and t not in ("BF16", "F16", "F32")})
    if quantised:
        found.append(f"checkpoint holds weights as {', '.join(quantised)}: strict mode supports unquantised weights")
    found += [f"checkpoint has unknown {name}" for name in sorted(extra) if not name.endswith("rotary_emb.inv_freq")]
    found += [
        f"checkpoint has {name} of shape {have[name]}, needed is {shape_}"
        for name, shape_ in want.items()
        if name in have and have[name] != shape_
    ]
    head = have.get("lm_head.weight")
    if shape.tied and head is not None and head != want["model.embed_tokens.weight"]:
        found.append(
            f"checkpoint has lm_head.weight of shape {head}, needed is {want['model.embed_tokens.weight']}: "
            "the model ties it to the embedding"
        )
    return found
