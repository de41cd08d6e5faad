"""Proof from a profiler's trace: which kernels ran inside the model, and that none of them is a stock one.

Inside the model is what was launched while its forward ran, by whatever thread, and every kernel of a CUDA graph, since
vLLM captures the model alone. A kernel may run there if it was launched from inside one of our opaque operators, if it
is one of our Triton kernels, or if it only moves bytes. A library's kernel in a graph, whose launch no operator
encloses any more, must have been seen inside our operators in another trace of the same check: trace a step of an eager
engine first.
"""

import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_contract import ContractError, MissingSupport

MODEL = "rl_vllm.model"
PACKAGES = ("rl_gemm", "rl_norm", "rl_attn", "rl_logprob", "rl_comm")
_OURS = tuple(f"{package}::" for package in PACKAGES)
# what is launched is called so; the other functions of Triton are parts of kernels
_DEFINITION = re.compile(r"^@(?:triton|gluon)\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+_kernel)\(", re.MULTILINE)
# kernels of PyTorch, NCCL and the driver that move bytes and compute nothing, by their whole names: what comes after an
# opening bracket are a functor's types
_AT = r"(?:at::native::)?(?:\(anonymous namespace\)::)?"
_MOVES = re.compile(
    r"Mem(?:cpy|set) .*|mem(?:cpy|set)(?:\d+\w*)?|ncclDevKernel_(?:AllGather|Broadcast|SendRecv)(?:_\w+)?(?:\(.*)?"
    rf"|(?:void )?{_AT}(?:"
    r"(?:CatArrayBatchedCopy\w*|vectorized_gather_kernel|indexSelect(?:Small|Large)Index)<.*"
    r"|index_elementwise_kernel<[\d, ]*at::native::(?:gpu_index_kernel|index_(?:kernel|copy)\w*)<.*"
    rf"|elementwise_kernel_with_index<[\w ]+, {_AT}arange_cuda_out\(.*"
    r"|(?:legacy::)?(?:vectorized_|unrolled_)?elementwise_kernel<[\d, ]*"
    rf"(?:at::native::gpu_kernel_impl(?:_nocast)?<)?{_AT}(?:FillFunctor<|direct_copy_kernel_cuda\().*)",
    re.DOTALL,
)
# Inductor names a kernel by the operators in it
_INDUCTOR = re.compile(r"^triton_poi_fused_(.+?)_?\d*$")
_MOVING_OPERATORS = frozenset((
    "embedding", "view", "reshape", "split", "clone", "copy", "cat", "to", "slice", "select", "expand",
    "permute", "transpose", "unsqueeze", "squeeze", "empty", "zeros", "full", "new", "as", "strided", "t",
    "constant", "pad", "nd", "unbind", "flatten", "alias", "detach", "getitem", "index", "where", "lt", "ge",
    "unsafe", "contiguous", "with", "sizes", "lift", "fresh", "arange",
))  # fmt: skip


@dataclass
class Findings:
    """Kernel name -> launches inside the model.

    Attributes:
        ours: launched from inside our operators, or our Triton kernels inside a graph.
        library: of ``ours``, a vendor's kernels.
        moves: bytes moved outside our operators.
        stock: everything else; must be empty.
        unexplained: kernels, inside or not, whose launch the trace does not hold; must be empty.
        steps, graphs: forward passes, and launches of graphs, that were traced.
    """

    ours: Counter[str] = field(default_factory=Counter)
    library: set[str] = field(default_factory=set)
    moves: Counter[str] = field(default_factory=Counter)
    stock: Counter[str] = field(default_factory=Counter)
    unexplained: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    graphs: int = 0


@contextmanager
def recording(path: str, model: Any) -> Iterator[None]:
    """Profile what runs inside, a forward pass of ``model`` marked, and write the trace to ``path``."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    marks: list[Any] = []

    def enter(*_: Any) -> None:
        marks.append(record_function(MODEL))
        marks[-1].__enter__()

    def leave(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    try:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        if gpu:
            # kernels in flight would be in the trace without their launches
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as found:
            yield
            if gpu:
                torch.cuda.synchronize()
    finally:
        for hook in hooks:
            hook.remove()
    found.export_chrome_trace(path)


def our_kernels() -> frozenset[str]:
    """Names of the Triton kernels that the installed packages define."""
    names: set[str] = set()
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in Path(folder).glob("*.py"):
                names.update(_DEFINITION.findall(file.read_text()))
    return frozenset(names)


class _Intervals:
    """Time ranges of one thread; nested ones are joined with the outer."""

    def __init__(self) -> None:
        self._ranges: dict[Any, list[tuple[float, float]]] = {}

    def add(self, thread: Any, start: float, end: float) -> None:
        self._ranges.setdefault(thread, []).append((start, end))

    def finish(self) -> None:
        for thread, ranges in self._ranges.items():
            joined: list[tuple[float, float]] = []
            for start, end in sorted(ranges):
                if joined and start <= joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
                else:
                    joined.append((start, end))
            self._ranges[thread] = joined

    def hold(self, thread: Any, at: float) -> bool:
        ranges = self._ranges.get(thread, ())
        found = bisect_right(ranges, (at, float("inf"))) - 1  # type: ignore[arg-type]
        return found >= 0 and ranges[found][0] <= at <= ranges[found][1]


def moves_bytes(kernel: str) -> bool:
    fused = _INDUCTOR.match(kernel)
    if fused:
        return set(re.split(r"_+", fused[1])) <= _MOVING_OPERATORS | {""}
    return bool(_MOVES.fullmatch(kernel))


def read(trace: Any, ours: Iterable[str], library: Iterable[str] = ()) -> Findings:
    """What one trace (a path, or its parsed JSON) shows. ``library``: vendor kernels that are known to be ours.

    Raises:
        ContractError: no readable trace, or an event in it without what it is read for.
    """
    where = "the trace"
    if isinstance(trace, (str, Path)):
        where = str(trace)
        try:
            trace = json.loads(Path(trace).read_text())
        except (OSError, ValueError) as error:
            raise ContractError(f"{trace}: {error}; give a trace that rl_vllm.trace_step wrote") from error
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(events, list) or not all(isinstance(e, Mapping) for e in events):
        raise ContractError(f"{where} holds no list of events, traceEvents; give one that rl_vllm.trace_step wrote")
    events = [e for e in events if e.get("ph") == "X"]
    if wrong := next((e for e in events if not _complete(e)), None):
        raise ContractError(
            f"{where} has an event without name, time, thread or arguments ({str(dict(wrong))[:120]}); give one that "
            "rl_vllm.trace_step wrote"
        )
    names, known = frozenset(ours), set(library)
    found, model, operators, launches = Findings(), _Intervals(), _Intervals(), {}
    for e in events:
        start, end = float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0))
        category, name = e.get("cat", ""), e["name"]
        if name == MODEL and category in ("user_annotation", "cpu_op"):
            model.add(None, start, end)
            found.steps += 1
        elif category == "cpu_op" and name.startswith(_OURS):
            operators.add(e["tid"], start, end)
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {}):
            launches[e["args"]["correlation"]] = e
            found.graphs += "GraphLaunch" in name
    model.finish()
    operators.finish()
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches.get(e.get("args", {}).get("correlation"))
        if launch is None:
            # of copies that the driver is asked for there is none
            if e["cat"] == "kernel":
                found.unexplained[e["name"]] += 1
            continue
        kernel, at, thread = e["name"], float(launch["ts"]), launch["tid"]
        in_graph = "GraphLaunch" in launch["name"]
        if not in_graph and not model.hold(None, at):
            continue
        own = kernel in names or kernel in known
        if own or (not in_graph and operators.hold(thread, at)):
            found.ours[kernel] += 1
            if kernel not in names and not moves_bytes(kernel):
                found.library.add(kernel)
        elif moves_bytes(kernel):
            found.moves[kernel] += 1
        else:
            found.stock[kernel] += 1
    return found


def _complete(event: Mapping[str, Any]) -> bool:
    times = (event.get("ts"), event.get("dur", 0))
    return (
        isinstance(event.get("name"), str)
        and all(isinstance(t, int | float) and math.isfinite(t) for t in times)
        and isinstance(event.get("tid"), int | str)
        and isinstance(event.get("args", {}), Mapping)
    )


def check(traces: Iterable[Any], ours: Iterable[str] | None = None) -> list[Findings]:
    """Findings of each trace in order; a library's kernel seen inside our operators in one counts in those after it.

    Raises:
        ContractError: a stock kernel ran inside the model, a trace shows no kernel of ours there or a kernel whose
            launch it does not hold, or no trace was given.
    """
    if isinstance(traces, (str, bytes, Path, Mapping)) or not isinstance(traces, Iterable):
        raise ContractError(f"traces are {traces!r:.80}; give a list of them, that of an eager step first")
    names = our_kernels() if ours is None else frozenset(ours)
    library: set[str] = set()
    every, problems = [], []
    for number, trace in enumerate(traces):
        where = f"trace {trace}" if isinstance(trace, (str, Path)) else f"trace {number}"
        found = read(trace, names, library)
        library |= found.library
        every.append(found)
        if not found.ours:
            problems.append(
                f"{where} shows no kernel of ours inside the model ({found.steps} passes) and proves nothing"
            )
        problems += [
            f"{where}: {name} ran {n} times without a record of its launch, which proves nothing; trace another step"
            for name, n in found.unexplained.items()
        ]
        problems += [f"{where}: stock kernel {name} ran {n} times inside the model" for name, n in found.stock.items()]
    if not every:
        problems.append("no trace was given, which proves nothing; give those that rl_vllm.trace_step wrote")
    if problems:
        raise ContractError("; ".join(problems))
    return every


def trace_step(llm: Any, path: str) -> None:
    """Let every worker profile its next forward pass: it writes ``path.RANK``.

    Raises:
        ContractError: it is no engine.
        MissingSupport: a CPU engine, which launches no kernels that a trace could show.
    """
    from rl_vllm import platform
    from rl_vllm.client import check_llm

    check_llm("trace_step", llm)
    if platform.current() is platform.CPU:
        raise MissingSupport("trace_step got an engine on a CPU; supported: on a GPU; rl_vllm.report counts operators")
    llm.collective_rpc("rl_trace", args=(path,))


def main(arguments: list[str]) -> int:
    """``tools/trace_engine``: 0 where no stock kernel ran inside the model."""
    try:
        for path, found in zip(arguments, check(arguments)):
            counts = f"{sum(found.ours.values())} of ours ({len(found.library)} library kernels)"
            print(f"{path}: {found.steps} passes, {found.graphs} graphs, {counts}, {sum(found.moves.values())} moves")
            for name, n in found.ours.most_common():
                print(f"  {n:6} {name[:110]}")
    except ContractError as error:
        print(error)
        return 1
    return 0


__all__ = ["MODEL", "Findings", "check", "main", "our_kernels", "read", "recording", "trace_step"]
