"""What a run on GPUs needs beyond what any run needs: devices, room, plans, and engines with the hooks we use."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError, MissingSupport
from rl_parity.config import RunConfig
from rl_parity.digests import apart
from rl_parity.gpus import ARCHS, Gpu, visible
from rl_parity.launch.processes import end_group
from rl_parity.placement import GIB, KV_BLOCK, engine_share, place, trainer_bytes

# packages whose kernels are launched by frozen plans
PLANNED = ("rl_gemm", "rl_attn", "rl_logprob")
_HOOKS_SECONDS = 180.0
_ASK_HOOKS = """
# by this name, which tells what breaks Megatron-core's import
from rl_megatron import trainer
from rl_vllm import platform
from rl_vllm.preflight import missing_hooks
print("missing:" + ", ".join(missing_hooks(platform.current().hooks)))
"""


def arch(gpus: list[Gpu]) -> str:
    """The one architecture of the GPUs, as profiles name it.

    Raises:
        MissingSupport: one that has no contracts, or several.
    """
    found = sorted({gpu.capability for gpu in gpus})
    if len(found) != 1 or found[0] not in ARCHS:
        kinds = ", ".join(sorted({f"{gpu.name} (compute capability {gpu.capability})" for gpu in gpus})) or "none"
        raise MissingSupport(
            f"GPUs: {kinds}; supported are GPUs of one architecture, with compute capability {', '.join(ARCHS)}; "
            "choose such with --gpus, or use --device cpu"
        )
    return ARCHS[found[0]]


def violations(c: RunConfig, weight_bytes: int) -> Iterator[str]:
    """Every reason why ``c`` cannot run on this machine's GPUs."""
    if torch.version.cuda is None:
        yield f"--device cuda: torch {torch.__version__} is a build without CUDA; install one with CUDA"
    try:
        gpus = visible(c.gpus)
        name = arch(gpus)
    except (ContractError, MissingSupport) as error:
        yield str(error)
        return
    yield from _plans(name)
    if c.attention == "nosplit":
        yield from _library(name)
    try:
        placed = place(c, gpus)
    except ContractError as error:
        yield str(error)
    else:
        for engine in range(c.rollout.engines):
            try:
                engine_share(c, weight_bytes, placed, engine)
            except ContractError as error:
                yield str(error)
        used = set(placed.trainers) | {p for engine in placed.engines for p in engine}
        for spot in sorted(used):
            gpu, share = gpus[spot], c.gpu_memory_utilization * placed.engines_beside(spot)
            # a share that was asked for leaves room for others
            needed = share * gpu.memory + trainer_bytes(c, weight_bytes, placed, spot) if share else 0.9 * gpu.memory
            if gpu.free < needed:
                yield (
                    f"GPU {gpu.index} ({gpu.name}): {gpu.free / GIB:.0f} of {gpu.memory / GIB:.0f} GiB are free, "
                    f"needed are {needed / GIB:.0f}; end what else runs there, choose others with --gpus, or ask for "
                    "less with --gpu-memory-utilization"
                )


def _plans(name: str) -> Iterator[str]:
    for package in PLANNED:
        try:
            import_module(f"{package}.plans").plan_files.current(name)
        except ContractError as error:
            yield str(error)


def _library(name: str) -> Iterator[str]:
    """The file of the attention library must be the certified one, byte for byte."""
    nosplit = import_module("rl_attn.nosplit")
    try:
        library = nosplit.library_for(name)
    except ContractError as error:
        yield str(error)
        return
    try:
        nosplit.check_page(library, KV_BLOCK)
    except ContractError as error:
        yield f"--attention nosplit: {error}"
    found = [path for folder in sys.path if (path := Path(folder) / library.path).is_file()]
    if not found:
        yield f"--attention nosplit: {library.path} is not installed; install {library.shipped_in}, or use segments"
    elif (digest := hashlib.sha256(found[0].read_bytes()).hexdigest()) != library.sha256:
        ours, certified = apart(digest, library.sha256, 16)
        yield (
            f"--attention nosplit: {found[0]} has sha256 {ours}, certified is {certified} of "
            f"{library.shipped_in}; install that version, or use segments"
        )


class EngineQuestion:
    """Whether the installed vLLM and Megatron-core can be made strict; asked in a process of its own, with ``with``.

    Importing vLLM takes seconds and may take hold of CUDA; meanwhile everything else is checked.
    """

    def __enter__(self) -> "EngineQuestion":
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ASK_HOOKS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            end_group(self._process)

    def answer(self) -> list[str]:
        """The violation, if there is one."""
        try:
            out, err = self._process.communicate(timeout=_HOOKS_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"vLLM did not import within {_HOOKS_SECONDS:.0f} s; repair the installation"]
        answers = [line for line in out.splitlines() if line.startswith("missing:")]
        if not answers:
            last = (err.strip().splitlines() or ["no message"])[-1]
            return [
                f"rl-vllm and rl-megatron cannot take hold of the installed engines ({last}); repair the installation"
            ]
        missing = answers[-1].removeprefix("missing:")
        return [f"this vLLM lacks {missing}, which strict mode needs; install a supported version"] if missing else []


def notes(c: RunConfig) -> list[str]:
    """What costs speed here and leaves the bits alone."""
    try:
        name = arch(visible(c.gpus))
        certificates = import_module("rl_gemm.plans").plan_files.current(name).certificates
        here = environment()
    except (ContractError, MissingSupport, OSError) as error:
        return [f"the library of GEMMs could not be looked at: {error}"]
    if any(dict(certificate.environment) == here for certificate in certificates):
        return []
    return [
        f"no certificate of the GEMM library is for {here}; Triton kernels serve every shape, with the same bits. "
        "tools/certify makes one"
    ]


@cache
def environment() -> dict[str, str]:
    """What a certificate of the GEMM library holds for, on the first visible GPU."""
    found: Any = import_module("rl_gemm.vendor").environment(0)
    return dict(found)
