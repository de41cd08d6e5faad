"""Launch evidence: each opaque op records what it ran; a claim is made from these counts, never from configuration."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rl_contract.errors import ContractError


@dataclass(frozen=True)
class Launch:
    """One kind of launch.

    Attributes:
        boundary: contract boundary, e.g. ``"gemm.row"``.
        kernel: name of the kernel that ran, e.g. ``"rl_gemm.cpu.chain"``.
        plan: plan id, or ``"-"`` where a kernel has one form only.
        layout: e.g. ``"packed"``, ``"paged"``, ``"tp2"``; ``"-"`` where there is one.
        phase: ``"eager"``, ``"capture"`` or ``"replay"``.

    Raises:
        ContractError: a field that is no text.
    """

    boundary: str
    kernel: str
    plan: str = "-"
    layout: str = "-"
    phase: str = "eager"

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in vars(self).values()):
            raise ContractError(f"got {self!r}; supported: a Launch whose fields are texts; build one")


_lock = threading.Lock()
# one place to count in for each kind of launch, kept for good: whoever launches often holds on to it
_counts: dict[Launch, list[int]] = {}


def _place(launch: Launch) -> list[int]:
    with _lock:
        return _counts.setdefault(launch, [0])


def record_launch(launch: Launch, count: int = 1) -> None:
    """Count one launch. Called inside the opaque op, so a compiled graph cannot skip it.

    Raises:
        ContractError: not a ``Launch``, or no whole number of launches.
    """
    # types themselves, which cost least: engines come here several times a layer
    if type(launch) is not Launch:
        raise ContractError(f"record_launch got {launch!r}; supported: a Launch whose fields are texts; build one")
    if type(count) is not int or count < 0:
        raise ContractError(f"record_launch got count={count!r}; supported: a whole number from 0")
    with _lock:
        _counts.setdefault(launch, [0])[0] += count


def gpu_tally(boundary: str, kernel: str, plan: str = "-", layout: str = "-") -> Callable[[], None]:
    """Counts one launch at every call, as ``record_launch``, under the phase of the current stream, eager or capture.

    For operators that prepare their calls: the kind of launch is made and looked up once.

    Raises:
        ContractError: a field that is no text.
    """
    eager, capture = (_place(Launch(boundary, kernel, plan, layout, phase)) for phase in ("eager", "capture"))

    def count() -> None:
        place = capture if torch.cuda.is_current_stream_capturing() else eager
        with _lock:
            place[0] += 1

    return count


def launches() -> list[dict[str, Any]]:
    """What was launched in this process since the last reset, sorted, with counts from 1; ready for JSON."""
    with _lock:
        rows = [{**asdict(launch), "count": count} for launch, (count,) in _counts.items() if count]
    return sorted(rows, key=lambda r: (r["boundary"], r["kernel"], r["plan"], r["layout"], r["phase"]))


def reset_launches() -> None:
    with _lock:
        for place in _counts.values():
            place[0] = 0
