"""The page of ``gemm_profile``."""

from collections.abc import Iterable, Iterator
from typing import Any

LIBRARY, STRICT = "cublas", "strict"


def parts_of(row: dict[str, Any]) -> dict[str, float]:
    """The microseconds of a strict call by phase, which add up to its time in a graph."""
    found, total = row["phases"], row["us"][STRICT]
    parts = {"first step loads": found["first_load"]}
    if "blocked" in found:
        parts["steps wait for loads"] = blocked = min(found["blocked"], found["steps"])
        parts["steps multiply"] = found["steps"] - blocked
    else:
        parts["steps load and multiply"] = found["steps"]
    parts |= {
        "join, round, store": found["after"],
        "last program after the median": found["last_end"] - found["median_end"],
    }
    if "merge_end" in found:
        parts["merge kernel"] = max(0.0, found["merge_end"] - found["last_end"])
    parts["between kernels, starts"] = max(0.0, total - sum(parts.values()))
    return {name: round(us, 2) for name, us in parts.items()}


def table(payload: dict[str, Any], counted: Iterable[str]) -> str:
    """The page beside the picture."""
    meta, rows = payload["meta"], [r for r in payload["rows"] if "us" in r]
    lines = ["# gemm_profile", "", "![gemm_profile](gemm_profile.png)", ""]
    lines += [
        f"{meta['gpu']}, driver {meta['driver']}, PyTorch {meta['torch']}, Triton {meta['triton']}, commit "
        f"{meta['commit']}, {meta['date']}. Times in microseconds: medians over graph replays, weights rotated through "
        "more memory than the L2 holds unless a column says otherwise.",
        *(f"\n{note}" for note in meta.get("notes", ())),
        "", "## Variants", "",
    ]  # fmt: skip
    names = list(dict.fromkeys(name for r in rows for name in r["us"]))
    lines += ["| cell | plan | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    lines += [
        f"| {r['case']} | {r['plan']} | " + " | ".join(str(r["us"].get(name, "")) for name in names) + " |"
        for r in rows
    ]
    lines += [
        "",
        "## What moves",
        "",
        "MB: once from memory; to the multiprocessors, tile by tile; fp32 partial sums, ",
    ]
    lines[-1] += "written and read."
    lines += [
        "",
        "| cell | memory | to processors | partials | GB/s of memory | TFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (r["case"], r["memory_mb"], r["to_sm_mb"], r["partials_mb"], r["gb_per_s"], r["tflops"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    timed = [r for r in rows if r.get("phases")]
    if timed:
        lines += [
            "",
            "## Phases of the strict call",
            "",
            "Medians over programs; with stamps: the call that notes them.",
        ]
        heads = list(dict.fromkeys(name for r in timed for name in parts_of(r)))
        lines += ["", "| cell | total | with stamps | " + " | ".join(heads) + " | last start | processors |"]
        lines.append("|---" * (len(heads) + 5) + "|")
        for r in timed:
            parts, found = parts_of(r), r["phases"]
            cells = [r["case"], r["us"][STRICT], found["stamped_us"], *(parts.get(h, "") for h in heads)]
            lines.append("| " + " | ".join(map(str, [*cells, found["last_start"], found["processors"]])) + " |")
    lines += _again_lines(rows)
    lines += _kernel_lines(rows)
    lines += _counter_lines(rows, list(counted), meta.get("counters", meta))
    for r in payload["rows"]:
        if "cycles" in r:
            lines += ["", "## Bare dependent matrix steps", ""]
            lines += [
                "Clock cycles per step of depth 16 on one accumulator, operands at hand: no chain runs faster.",
                "",
            ]
            lines += [f"| instruction | cycles a step | us of K=4096 at {r['mhz']} MHz |", "|---|---|---|"]
            us = {name: f"{256 * c / r['mhz']:.2f}" if r["mhz"] else "" for name, c in r["cycles"].items()}
            lines += [f"| {name} | {c} | {us[name]} |" for name, c in r["cycles"].items()]
    return "\n".join(lines) + "\n"


def _again_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds of the same cells in a later run, which says its commit and date."""
    rows = [r for r in rows if "again" in r]
    lines = []
    for commit, date in dict.fromkeys((r["again"]["commit"], r["again"]["date"]) for r in rows):
        mine = [r for r in rows if (r["again"]["commit"], r["again"]["date"]) == (commit, date)]
        names = list(dict.fromkeys(name for r in mine for name in r["again"]["us"]))
        lines += ["", f"## Once more at {commit}, {date}", "", "| cell | " + " | ".join(names) + " | cublas / strict |"]
        lines.append("|---" * (len(names) + 2) + "|")
        for r in mine:
            us = r["again"]["us"]
            cells = [r["case"], *(us.get(name, "") for name in names), f"{us[LIBRARY] / us[STRICT]:.3f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("us", "programs", "threads", "registers", "shared", "per_sm", "occupancy_percent")
    lines = ["", "## Kernels", "", "| cell | call | kernel | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(heads) + 3) + "|")
    for case, call, kernel in _kernels(rows):
        lines.append(f"| {case} | {call} | {short(kernel)} | " + " | ".join(str(kernel[h]) for h in heads) + " |")
    return lines


def _counter_lines(rows: list[dict[str, Any]], heads: list[str], meta: dict[str, Any]) -> list[str]:
    found = [(case, call, kernel) for case, call, kernel in _kernels(rows) if kernel.get("counters")]
    if not found:
        return []
    lines = [
        "",
        "## Hardware counters",
        "",
        f"Nsight Compute at commit {meta['commit']}, {meta['date']}: each kernel alone, caches emptied before it, "
        "clocks not fixed, so its microseconds are not those of a graph. Percent of what the GPU can, over the whole "
        "kernel; of L1 and warps over the time that a multiprocessor has a program. Warps stall: cycles for each "
        "instruction issued; `barrier` counts the warps without work beside the loading warp too.",
        "",
        "| cell | call | kernel | " + " | ".join(heads) + " | warps stall on |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for case, call, kernel in found:
        counters = kernel["counters"]
        # an instruction that issues is none that waits
        stalls = {name[8:]: v for name, v in counters.items() if name.startswith("stalled ") and "selected" not in name}
        most = sorted(stalls, key=lambda name: -stalls[name])[:3]
        cells = [case, call, short(kernel), *(f"{counters[head]:.4g}" if head in counters else "" for head in heads)]
        lines.append("| " + " | ".join(map(str, [*cells, ", ".join(f"{s} {stalls[s]}" for s in most)])) + " |")
    return lines


def _kernels(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for r in rows:
        for call, kernels in r.get("kernels", {}).items():
            for kernel in kernels:
                yield r["case"], call, kernel


def short(kernel: dict[str, Any]) -> str:
    return str(kernel["name"]).replace("|", "/")[:60]
