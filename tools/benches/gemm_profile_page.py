"""The page and the picture of ``gemm_profile``."""

from collections.abc import Iterable
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
    lines = ["# gemm_profile", ""]
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
    lines += _kernel_lines(rows, list(counted))
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


def _kernel_lines(rows: list[dict[str, Any]], counted: list[str]) -> list[str]:
    heads = ("us", "programs", "threads", "registers", "shared", "per_sm", "occupancy_percent")
    lines = [
        "",
        "## Kernels",
        "",
        "| cell | call | kernel | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 3) + "|",
    ]
    more = ["", "## Hardware counters", "", "Caches empty at the start of each kernel.", ""]
    more += [
        "| cell | call | kernel | " + " | ".join(counted) + " | warps stall on |",
        "|---" * (len(counted) + 4) + "|",
    ]
    empty = len(more)
    for r in rows:
        for call, kernels in r.get("kernels", {}).items():
            for kernel in kernels:
                short = kernel["name"].replace("|", "/")[:60]
                lines.append(f"| {r['case']} | {call} | {short} | " + " | ".join(str(kernel[h]) for h in heads) + " |")
                if found := kernel.get("counters"):
                    stalls = sorted(((v, s[8:]) for s, v in found.items() if s.startswith("stalled ")), reverse=True)[
                        :3
                    ]
                    cells = [r["case"], call, short, *(found.get(c, "") for c in counted)]
                    cells.append(", ".join(f"{s} {v}" for v, s in stalls))
                    more.append("| " + " | ".join(map(str, cells)) + " |")
    return lines + (more if len(more) > empty else [])


def picture(rows: list[dict[str, Any]], path: str) -> None:
    """Left: phases of each strict call beside cuBLAS. Right: programs over time, a line a multiprocessor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [r for r in rows if r.get("phases")]
    high = (len(timed) + 1) // 2
    figure = plt.figure(figsize=(17, 2.6 * max(2, high)))
    grid = figure.add_gridspec(max(1, high), 3)
    bars = figure.add_subplot(grid[:, 0])
    colours: dict[str, Any] = {}
    for place, row in enumerate(timed):
        at = 0.0
        for name, us in parts_of(row).items():
            new = name not in colours
            colour = colours.setdefault(name, plt.get_cmap("tab10")(len(colours)))
            bars.barh(place, us, left=at, color=colour, label=name if new else None, height=0.6)
            at += us
        bars.plot(
            [row["us"][LIBRARY]] * 2, [place - 0.4, place + 0.4], color="black", label=None if place else "cublas"
        )
    bars.set_yticks(range(len(timed)), [r["case"] for r in timed], fontsize=8)
    bars.invert_yaxis()
    bars.set_xlabel("microseconds")
    bars.legend(fontsize=7)
    for place, row in enumerate(timed):
        axis = figure.add_subplot(grid[place % high, 1 + place // high])
        draw_timeline(axis, row["phases"])
        axis.set_title(f"{row['case']} ({row['plan']})", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def draw_timeline(axis: Any, found: dict[str, Any]) -> None:
    for sm, start, loaded, leaves, joined, end in found["timeline"]:
        spans = [(start, loaded, "tab:gray"), (loaded, joined, "tab:blue"), (joined, end, "tab:red")]
        for left, right, colour in spans:
            axis.plot([left, right], [sm, sm], color=colour, linewidth=0.8, solid_capstyle="butt")
        axis.plot(leaves, [sm] * len(leaves), ".", color="black", markersize=1.2)
    for sm, start, goes, end in found.get("merge", ()):
        axis.plot([start, goes], [sm + 0.5] * 2, color="tab:olive", linewidth=0.4)
        axis.plot([goes, end], [sm + 0.5] * 2, color="tab:green", linewidth=0.8)
    axis.set_ylim(-2, max(132, *(program[0] + 2 for program in found["timeline"])))
    axis.set_ylabel("multiprocessor", fontsize=7)
    axis.set_xlabel(
        "us; gray: first load, blue: steps, red: join and store, olive, green: merge waits, runs", fontsize=6
    )
    axis.tick_params(labelsize=6)
