"""Where the short cells' time goes: phases of a strict call beside cuBLAS, how busy both keep the GPU, and the programs
of those calls that fill it, a line a multiprocessor."""

from typing import Any

from benches.gemm_profile_page import LIBRARY, STRICT, parts_of
from pictures import panels

FULL = 64  # multiprocessors with a program, from which on a call is drawn program by program
SPANS = {"first load": "tab:gray", "steps": "tab:blue", "join, store": "tab:red"}
MERGE = {"merge waits": "tab:olive", "merge runs": "tab:green"}
BUSY = {"memory %": "memory", "L2 %": "L2", "L2 answers %": "L2, answers sent", "matrix units %": "matrix units"}


def picture(payload: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [r for r in payload["rows"] if r.get("phases")]
    counted = [r for r in timed if counters_of(r, STRICT) and counters_of(r, LIBRARY)]
    full = [r for r in timed if r["phases"]["processors"] >= FULL]
    # parts lay themselves out, so that a legend beside one leaves the others their width
    heights = [1.3 + 0.32 * len(timed), (1.5 + 0.32 * len(counted)) if counted else 0.1, 0.4 + 2.3 * -(-len(full) // 2)]
    whole = plt.figure(figsize=(panels.WIDTH, sum(heights)), layout="constrained")
    phases, busy, programs = whole.subfigures(3, 1, height_ratios=heights)
    draw_phases(phases.subplots(), timed)
    if counted:
        draw_counters(busy.subplots(), counted)
    if full:
        axes = programs.subplots(-(-len(full) // 2), 2, squeeze=False).flat
        for axis, row in zip(axes, full):
            draw_programs(axis, row["phases"])
            panels.style(axis, f"{row['case']}, {row['plan']}", "microseconds", "multiprocessor")
        for axis in list(axes)[len(full) :]:
            axis.remove()
        merged = any("merge" in row["phases"] for row in full)
        programs.legend(
            *names_of_spans(merged), fontsize=panels.TEXT, ncol=6, loc="outside lower center", frameon=False
        )
    panels.save(whole, path)


def draw_phases(axis: Any, rows: list[dict[str, Any]]) -> None:
    colours: dict[str, Any] = {}
    for place, row in enumerate(rows):
        at = 0.0
        for name, us in parts_of(row).items():
            label = name if name not in colours else None
            colour = colours.setdefault(name, f"C{len(colours)}")
            axis.barh(place, us, left=at, color=colour, label=label, height=0.65)
            at += us
        label = None if place else "cuBLAS, whole call"
        axis.plot([row["us"][LIBRARY]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2, label=label)
    panels.style(axis, "phases of the strict call, of the median program", "microseconds")
    _cells(axis, rows)
    axis.legend(fontsize=panels.TEXT, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_counters(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Filled: strict, hollow: cuBLAS."""
    for colour, (counter, name) in enumerate(BUSY.items()):
        for call, up, fill in ((STRICT, -0.12, f"C{colour}"), (LIBRARY, 0.12, "none")):
            found = [counters_of(row, call) for row in rows]
            known = [(c[counter], place + up) for place, c in enumerate(found) if counter in c]
            label = f"{name}: {'strict' if call == STRICT else 'cuBLAS'}"
            if known:
                form = {"marker": "osD^"[colour], "markersize": 6, "linewidth": 0, "color": f"C{colour}", "mfc": fill}
                axis.plot(*zip(*known), label=label, **form)
    panels.style(
        axis, "busy, each kernel alone with empty caches", "percent of what the GPU can, over the kernel's time"
    )
    axis.set_xlim(0, 100)
    _cells(axis, rows)
    axis.legend(fontsize=panels.TEXT, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def counters_of(row: dict[str, Any], call: str) -> dict[str, float]:
    """Of the longest kernel of the call, none where they were not read."""
    kernels = row.get("kernels", {}).get(call, ())
    return max((k.get("counters", {}) for k in kernels), key=lambda counters: counters.get("us", 0), default={})


def draw_programs(axis: Any, found: dict[str, Any]) -> None:
    for sm, start, loaded, leaves, joined, end in found["timeline"]:
        for (left, right), colour in zip(((start, loaded), (loaded, joined), (joined, end)), SPANS.values()):
            axis.plot([left, right], [sm, sm], color=colour, linewidth=0.8, solid_capstyle="butt")
        axis.plot(leaves, [sm] * len(leaves), ".", color="black", markersize=1.5)
    for sm, start, goes, end in found.get("merge", ()):
        for (left, right), colour in zip(((start, goes), (goes, end)), MERGE.values()):
            axis.plot([left, right], [sm + 0.5] * 2, color=colour, linewidth=0.6)
    axis.set_ylim(-2, max(132, *(program[0] + 2 for program in found["timeline"])))


def names_of_spans(merged: bool) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    spans = SPANS | (MERGE if merged else {})
    lines = [Line2D([], [], color=colour) for colour in spans.values()]
    return [*lines, Line2D([], [], color="black", marker=".", linewidth=0)], [*spans, "a leaf ends"]


def _cells(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.set_axisbelow(True)
    axis.set_yticks(range(len(rows)), [r["case"] for r in rows])
    axis.invert_yaxis()
