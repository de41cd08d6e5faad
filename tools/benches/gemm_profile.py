"""Where the time of the short GEMM cells goes: each kernel's launch and time, what must move, phases within programs on
every multiprocessor, hardware counters, and variants that leave one cause out.

Within a program the phases come from a compiled variant of the same kernel that notes the GPU's clock; production
kernels hold no such code. Variants that leave out the merge compute something else and are timed only.
"""

import argparse
import contextlib
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benches import data, matrix_steps, timing
from benches import gemm_profile_page as page

from rl_gemm import plans, vendor

# (name, N, K, leaves, M): the cells of gemm.json furthest below the library
CELLS = [(f"o tree({g}) M={m}", 4096, 4096, g, m) for g in (2, 8) for m in (64, 128, 256)]
CELLS += [(f"{name} chain M={m}", n, 4096, 1, m) for name, n in (("odd_n", 1000), ("router", 128)) for m in (1, 16)]
HERE = Path(__file__).resolve().parent.parent
LIBRARY, STRICT = "cublas", "strict"
SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats")
COUNTERS = {
    "gpu__time_duration.sum": "us",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "dram__bytes.sum.per_second": "memory GB/s",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "lts__t_sector_hit_rate.pct": "L2 hits %",
    "lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed": "L2 answers %",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 %",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "matrix units %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "launch__cluster_size": "cluster",
}
# to microseconds and GB/s
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "byte/s": 1e-9, "Mbyte/s": 1e-3, "Tbyte/s": 1e3}


def kernel_of(n: int, k: int, leaves: int, m: int) -> plans.Kernel:
    """The Triton kernel of the plan in force: what runs, or what would without a certificate of the library."""
    own = plans.current("sm90")
    return next(own.kernels[u] for u in own.choices("forward", n, k, leaves, m) if u in own.kernels)


def _run(kernel: plans.Kernel, leaves: int, x: Any, weight: Any, stamps: Any = (None, None)) -> Any:
    from rl_gemm import gpu

    return gpu.launcher(kernel, x, weight, leaves, 1, None, torch.bfloat16, stamps)(x, weight, None)


def _without_merge(kernel: plans.Kernel, leaves: int, x: Any, weight: Any) -> None:
    from rl_gemm import gluon_tree, gpu

    if kernel.kind == "hopper":
        gluon_tree.launch(kernel, x, weight, None, gluon_tree.workspace(kernel, x, weight), leaves, 1, 132)
    else:
        parts = torch.empty((leaves, len(x), len(weight)), dtype=torch.float32, device=x.device)
        gpu._triton().launch(kernel, x, weight, None, parts, leaves, 1, 132)


def _has_merge(kernel: plans.Kernel, leaves: int) -> bool:
    return leaves > 1 and (kernel.parts > 1 if kernel.kind == "hopper" else kernel.kind != "tree")


def _variants(kernel: plans.Kernel, leaves: int, x: Any, weights: list[Any]) -> dict[str, Callable[[int], object]]:
    """Calls that leave one cause out; one that does not build is dropped by ``_timed``."""
    calls: dict[str, Callable[[int], object]] = {
        LIBRARY: lambda i: torch.mm(x, weights[i].t()),
        STRICT: lambda i: _run(kernel, leaves, x, weights[i]),
        "cublas, no split-K": lambda i: vendor.matmul(x, weights[i], None, torch.bfloat16),
        "strict, weight in the L2": lambda i: _run(kernel, leaves, x, weights[0]),
        "cublas, weight in the L2": lambda i: torch.mm(x, weights[0].t()),
        "an empty kernel": lambda i: matrix_steps.nothing(len(x)),
    }
    if _has_merge(kernel, leaves):
        calls["without the merge"] = lambda i: _without_merge(kernel, leaves, x, weights[i])
    if leaves > 1:
        one = replace(kernel, parts=1, held=0, kind="tma" if kernel.kind == "tree" else kernel.kind)
        calls["a chain on the same tile"] = lambda i: _run(one, 1, x, weights[i])
    if kernel.block_n > 32 or (kernel.kind != "hopper" and kernel.block_n > 16 and not kernel.swap):
        half = replace(kernel, block_n=kernel.block_n // 2, warps=4 if kernel.kind == "hopper" else kernel.warps)
        calls["twice the programs"] = lambda i: _run(half, leaves, x, weights[i])
    return calls


def _timed(calls: dict[str, Callable[[int], object]], rotate: int) -> tuple[dict[str, float], dict[str, str]]:
    failed = {}
    for name, call in calls.items():
        try:
            call(0)
            torch.cuda.synchronize()
        except Exception as error:
            if name in (LIBRARY, STRICT):
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
    able = {name: call for name, call in calls.items() if name not in failed}
    return timing.time_calls(able, rotate=rotate, span_ms=1.0, rounds=9), failed


def _launches(call: Callable[[int], object], rotate: int) -> list[dict[str, Any]]:
    """Kernels of one call as CUPTI saw them: medians of their times over twenty calls, and their launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(20):
            call(i % rotate)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return kernels_of_trace(events, 20)


def kernels_of_trace(events: list[dict[str, Any]], calls: int) -> list[dict[str, Any]]:
    """The kernels of one of ``calls`` equal calls, in the order of their launches."""
    seen = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    each = len(seen) // calls
    found = []
    for place in range(each):
        same = seen[place::each]
        about = same[-1]["args"]
        grid, block = about.get("grid", [0]), about.get("block", [0])
        found.append(
            {
                "name": same[-1]["name"][:120],
                "us": round(median(float(e["dur"]) for e in same), 2),
                "programs": _product(grid),
                "threads": _product(block),
                "registers": about.get("registers per thread"),
                "shared": about.get("shared memory"),
                "per_sm": about.get("blocks per SM"),
                "occupancy_percent": about.get("est. achieved occupancy %"),
            }
        )
    return found


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def moved(m: int, n: int, k: int, kernel: plans.Kernel, leaves: int) -> dict[str, float]:
    """MB that a call must move: once from memory, to the multiprocessors tile by tile, and as partial sums."""
    tiles = -(-m // kernel.block_m) * -(-n // kernel.block_n)
    roots = 0
    if _has_merge(kernel, leaves):
        roots = kernel.parts if kernel.kind == "hopper" else leaves
    return {
        "memory_mb": round((n * k + m * k + m * n) * 2 / 1e6, 3),
        "to_sm_mb": round(tiles * k * (min(kernel.block_m, m) + min(kernel.block_n, n)) * 2 / 1e6, 3),
        "partials_mb": round(2 * roots * m * n * 4 / 1e6, 3),
    }


def _stamped(kernel: plans.Kernel, leaves: int, x: Any, weights: list[Any]) -> dict[str, Any]:
    """The phases of every program in the last of some calls, and how much the stamps cost."""
    from rl_gemm import triton_stamps

    tiles = -(-len(x) // kernel.block_m) * -(-len(weights[0]) // kernel.block_n)
    first = triton_stamps.room(max(132 * kernel.per_sm, tiles * leaves), x.device)
    second = triton_stamps.room(-(-len(x) * len(weights[0]) // 1024), x.device)
    for i in range(6):
        first.zero_()
        second.zero_()
        _run(kernel, leaves, x, weights[i % len(weights)], (first, second))
        torch.cuda.synchronize()
    us, _ = _timed({STRICT: lambda i: _run(kernel, leaves, x, weights[i], (first, second)),
                    LIBRARY: lambda i: torch.mm(x, weights[i].t())}, len(weights))  # fmt: skip
    found = phases(first.tolist(), second.tolist(), leaves)
    return {"stamped_us": round(us[STRICT], 2), **found} if found else {}


def phases(first: list[list[int]], second: list[list[int]], leaves: int) -> dict[str, Any]:
    """Microseconds, from the stamps of the kernel and of its merge; zero is the first program's start.

    ``timeline`` holds for each program its multiprocessor, start, first step loaded, end of each leaf, all sub-trees
    joined, end; ``merge`` the merge's: multiprocessor, start, allowed to go on, end.
    """
    ran = [s for s in first if s[4]]
    if not ran:
        return {}
    zero = min(s[1] for s in ran)

    def us(value: int) -> float:
        return round((value - zero) / 1e3, 3)

    timeline = []
    for s in ran:
        ended = [us(v) for v in s[8 : 8 + min(8, leaves)] if v]
        timeline.append([s[0], us(s[1]), us(s[2] or s[1]), ended, us(s[3]), us(s[4])])
    ends = [t[5] for t in timeline]
    found: dict[str, Any] = {
        "last_start": max(t[1] for t in timeline),
        "first_load": round(median(t[2] - t[1] for t in timeline), 3),
        "steps": round(median(t[4] - t[2] for t in timeline), 3),
        "after": round(median(t[5] - t[4] for t in timeline), 3),
        "median_end": round(median(ends), 3),
        "last_end": max(ends),
        "processors": len({t[0] for t in timeline}),
        "timeline": timeline,
    }
    counted = [s for s in ran if s[6]]
    if counted:
        # cycles over microseconds
        found["mhz"] = round(median(s[6] / (s[4] - s[1]) * 1e3 for s in counted))
        found["blocked"] = round(median(s[5] for s in counted) / found["mhz"], 3)
    merged = [s for s in second if s[4]]
    if merged:
        found["merge"] = [[s[0], us(s[1]), us(s[2]), us(s[4])] for s in merged]
        found["merge_goes"] = min(us(s[2]) for s in merged)
        found["merge_end"] = max(us(s[4]) for s in merged)
    return found


def _inputs(n: int, k: int, m: int, most: int = 64) -> tuple[Any, list[Any]]:
    rotate = min(most, timing.copies(2 * n * k))
    return data.matrix(m, k, "normal", 99), [data.matrix(n, k, "normal", i, scale=0.02) for i in range(rotate)]


def run(budget: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows: a cell each, then one of bare matrix steps."""
    started, rows = time.time(), []
    _build(0.4 * budget)
    for cell in CELLS:
        name, n, k, leaves, m = cell
        if time.time() - started > 0.7 * budget:
            print(f"gemm_profile: budget reached before {name}", flush=True)
            break
        kernel = kernel_of(n, k, leaves, m)
        x, weights = _inputs(n, k, m)
        calls = _variants(kernel, leaves, x, weights)
        times, failed = _timed(calls, len(weights))
        row = {"case": name, "shape": [m, n, k], "leaves": leaves, "plan": kernel.name}
        row |= moved(m, n, k, kernel, leaves)
        row |= {"us": {call: round(us, 2) for call, us in times.items()}, "failed": failed}
        us = times[STRICT]
        row |= {"gb_per_s": round(1e3 * row["memory_mb"] / us), "tflops": round(2e-6 * m * n * k / us)}
        # what one machine does not allow costs that part only
        try:
            row["kernels"] = {c: _launches(calls[c], len(weights)) for c in (STRICT, LIBRARY)}
        except Exception as error:
            failed["kernels"] = f"{type(error).__name__}: {str(error)[:200]}"
        try:
            row["phases"] = _stamped(kernel, leaves, x, weights)
        except Exception as error:
            failed["phases"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        if failed:
            print(f"gemm_profile: {name}: without {failed}", flush=True)
    with contextlib.suppress(Exception):
        rows.append({"case": "matrix steps", "cycles": matrix_steps.cycles(), "mhz": _clock(rows)})
    left = budget - (time.time() - started)
    if left > 10:
        _count(rows, left)
    else:
        print("gemm_profile: no time left for hardware counters", flush=True)
    return rows, summary(rows)


def _clock(rows: list[dict[str, Any]]) -> float | None:
    """MHz, as the stamps of the cells told it."""
    seen = [r["phases"]["mhz"] for r in rows if "mhz" in r.get("phases", {})]
    return median(seen) if seen else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{r['case']}: cublas / strict": round(r["us"][LIBRARY] / r["us"][STRICT], 3) for r in rows if "us" in r}


def _build(seconds: float) -> None:
    """Compile every call in processes side by side; what is not ready in time is compiled when it is first called."""
    command = [sys.executable, "-m", "benches.gemm_profile", "--build"]
    children = [
        subprocess.Popen([*command, str(i)], cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(len(CELLS))
    ]
    end = time.time() + seconds
    for child in children:
        try:
            child.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()


def _built(cell: tuple[str, int, int, int, int]) -> None:
    from rl_gemm import triton_stamps

    _, n, k, leaves, m = cell
    kernel = kernel_of(n, k, leaves, m)
    x, weights = _inputs(n, k, m, 1)
    for call in _variants(kernel, leaves, x, weights).values():
        with contextlib.suppress(Exception):
            call(0)
    stamps = triton_stamps.room(4096, x.device)
    _run(kernel, leaves, x, weights[0], (stamps, stamps))


def _count(rows: list[dict[str, Any]], seconds: float) -> None:
    """Hardware counters of one call of each, where the machine lets them be read."""
    tool = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [tool, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += [sys.executable, "-m", "benches.gemm_profile"]
    try:
        done = subprocess.run(
            command,
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        counted = counters(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        counted, done = [], error  # type: ignore[assignment]
    wanted = [(row, call) for row in rows if "us" in row for call in (STRICT, LIBRARY)]
    per_call = [len(row.get("kernels", {}).get(call, ())) for row, call in wanted]
    if not counted or len(counted) != sum(per_call):
        print(f"gemm_profile: {len(counted)} kernels counted of {sum(per_call)}: {str(done)[-600:]}", flush=True)
        return
    for (row, call), kernels in zip(wanted, per_call):
        for kernel in row["kernels"][call]:
            kernel["counters"] = counted.pop(0)
        assert len(row["kernels"][call]) == kernels


def counters(text: str) -> list[dict[str, float]]:
    """The counters wanted of each kernel in ncu's raw page."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        return []
    table = list(csv.reader(io.StringIO("\n".join(lines[head:]))))
    names, units, found = table[0], table[1], []
    for line in table[2:]:
        mine = {}
        for name, unit, value in zip(names, units, line):
            if name in COUNTERS and value:
                mine[COUNTERS[name]] = round(float(value.replace(",", "")) * UNITS.get(unit, 1), 3)
            elif "average_warps_issue_stalled" in name and name.endswith("per_issue_active.ratio") and value:
                reason = name.split("stalled_")[1].removesuffix("_per_issue_active.ratio")
                mine[f"stalled {reason}"] = round(float(value.replace(",", "")), 2)
        found.append(mine)
    return found


def _once() -> None:
    """What ncu watches: one call of each, after one that it does not."""
    for _, n, k, leaves, m in CELLS:
        kernel = kernel_of(n, k, leaves, m)
        x, (weight,) = _inputs(n, k, m, 1)
        for call in (lambda: _run(kernel, leaves, x, weight), lambda: torch.mm(x, weight.t())):  # noqa: B023
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


def table(payload: dict[str, Any]) -> str:
    """The page beside the picture."""
    return page.table(payload, COUNTERS.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=int)
    arguments = parser.parse_args()
    if arguments.build is None:
        _once()
    else:
        _built(CELLS[arguments.build])
