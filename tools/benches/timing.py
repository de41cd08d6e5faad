"""Device times by CUDA graph replay: no launch gaps, variants in turn, medians."""

import math
from collections.abc import Callable
from statistics import median

import torch

L2_BYTES = 256 << 20  # more than any L2, so that rotating over this many bytes reads device memory


def copies(bytes_each: int) -> int:
    """How many copies of a buffer to rotate over, so that none is still in the L2 when its turn comes."""
    return max(1, min(64, math.ceil(L2_BYTES / max(1, bytes_each))))


def time_calls(
    variants: dict[str, Callable[[int], object]], *, rotate: int = 1, span_ms: float = 1.5, rounds: int = 7
) -> dict[str, float]:
    """Microseconds per call of each variant; ``call(i)`` may use i to pick its buffers.

    Each variant is captured into one graph of about ``span_ms``; then graphs are replayed in turn, so that clocks
    drift alike for all; the median round counts.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    stream = torch.cuda.Stream()
    for name, call in variants.items():
        with torch.cuda.stream(stream):
            call(0)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for i in range(2):
                call(i % rotate)
            end.record()
            end.synchronize()
            once = max(1e-3, start.elapsed_time(end) / 2)
            # a short call is dominated by launch time here, so this may be too few calls, never too many
            reps = max(min(rotate, 64) if once < span_ms else 1, min(100, math.ceil(span_ms / once)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(reps):
                    call(i % rotate)
            graphs[name] = graph, reps
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in variants}
    events = []
    for round_ in range(rounds + 1):
        for name, (graph, reps) in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            if round_:
                events.append((name, reps, start, end))
    torch.cuda.synchronize()
    for name, reps, start, end in events:
        times[name].append(1e3 * start.elapsed_time(end) / reps)
    return {name: median(values) for name, values in times.items()}
