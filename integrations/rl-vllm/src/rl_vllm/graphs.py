"""Launches of captured CUDA graphs: what a capture recorded is counted again at each replay.

In a replay no Python runs, so the ops themselves can't count. Captures and replays go through three methods of
``torch.cuda.CUDAGraph``, whoever calls them (vLLM has several graph runners); these are wrapped once in a strict
worker's process, and a graph that captured nothing of ours stays as it was.
"""

import functools
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rl_contract import launches

Kind = tuple[str, str, str, str]  # boundary, kernel, plan, layout


@dataclass
class Captured:
    """One graph: what it launches, and how often it has run since the last reset."""

    launches: Counter[Kind] = field(default_factory=Counter)
    replays: int = 0


_captures: "weakref.WeakKeyDictionary[Any, Captured]" = weakref.WeakKeyDictionary()
# graphs that are gone, folded
_gone: Counter[Kind] = Counter()
_totals = Counter[str]()
_before: Counter[Kind] = Counter()


def _captured_so_far() -> Counter[Kind]:
    found: Counter[Kind] = Counter()
    for row in launches():
        if row["phase"] == "capture":
            found[(row["boundary"], row["kernel"], row["plan"], row["layout"])] += row["count"]
    return found


def count_graphs(graph_class: Any) -> None:
    """Wrap ``capture_begin``, ``capture_end`` and ``replay`` of ``torch.cuda.CUDAGraph``. Idempotent."""
    if getattr(graph_class.replay, "_rl_vllm", False):
        return
    begin, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _before
        _before = _captured_so_far()
        return begin(self, *args, **kwargs)

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = end(self, *args, **kwargs)
        if new := _captured_so_far() - _before:
            record = _captures[self] = Captured(new)
            weakref.finalize(self, _fold, record)
            _totals["captures"] += 1
        return result

    @functools.wraps(replay)
    def counted_replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = _captures.get(self)
        if record is not None:
            record.replays += 1
            _totals["replays"] += 1
        return replay(self, *args, **kwargs)

    counted_replay._rl_vllm = True  # type: ignore[attr-defined]
    graph_class.capture_begin, graph_class.capture_end, graph_class.replay = capture_begin, capture_end, counted_replay


def _fold(record: Captured) -> None:
    for kind, count in record.launches.items():
        _gone[kind] += count * record.replays


def replayed() -> list[dict[str, Any]]:
    """Launches by replays since the last reset, as ``rl_contract.launches`` gives them, phase ``replay``."""
    total = Counter(_gone)
    for record in list(_captures.values()):
        for kind, count in record.launches.items():
            total[kind] += count * record.replays
    return [
        {"boundary": b, "kernel": k, "plan": p, "layout": where, "phase": "replay", "count": n}
        for (b, k, p, where), n in sorted(total.items())
        if n
    ]


def summary() -> dict[str, int]:
    """``captures`` since the process started, ``replays`` since the last reset."""
    return {"captures": _totals["captures"], "replays": _totals["replays"]}


def reset_replays() -> None:
    for record in list(_captures.values()):
        record.replays = 0
    _gone.clear()
    _totals["replays"] = 0
