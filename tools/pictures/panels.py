"""What all pictures share: panels to be read where a page shows them 900 pixels wide, and ratios beside targets."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 9.0  # inches; a page shows it in 900 pixels or so
DPI = 150
TITLE, TEXT = 10.5, 9
RATIO = "peer's time / strict time"


@dataclass
class Panel:
    """Ratios over a size. ``targets``: (from, to, ratio), drawn between two sizes."""

    title: str
    xlabel: str
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    targets: list[tuple[float, float, float]] = field(default_factory=list)
    ylabel: str = RATIO
    joined: bool = True  # or cases that have nothing but the axis in common

    def add(self, label: str, x: float, ratio: float) -> None:
        self.curves.setdefault(label, []).append((x, ratio))


def figure(count: int, columns: int = 2, height: float = 3.1) -> tuple[Any, list[Any]]:
    """A figure of so many panels, the places behind the last one left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = -(-count // columns)
    made, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.remove()
    return made, list(axes.flat[:count])


def save(made: Any, path: str) -> None:
    from matplotlib import pyplot as plt

    made.savefig(path, dpi=DPI)
    plt.close(made)


def plain(value: float, _: object = None) -> str:
    """1, 64, 4k, 128k."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def style(axis: Any, title: str, xlabel: str = "", ylabel: str = "") -> None:
    axis.set_title(title, fontsize=TITLE)
    axis.set_xlabel(xlabel, fontsize=TEXT)
    axis.set_ylabel(ylabel, fontsize=TEXT)
    axis.tick_params(labelsize=TEXT)
    axis.grid(alpha=0.3)


def legend(axis: Any, columns: int = 2) -> None:
    """Below the panel, where it hides nothing."""
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(
            fontsize=TEXT, ncol=columns, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False,
            handlelength=1.6, columnspacing=1.2, labelspacing=0.25,
        )  # fmt: skip


def ratios(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    style(axis, panel.title, panel.xlabel, panel.ylabel)
    values = [ratio for points in panel.curves.values() for _, ratio in points]
    values += [ratio for _, _, ratio in panel.targets]
    for n, (label, points) in enumerate(panel.curves.items()):
        form = {"marker": "osD^vPX<>*"[n % 10], "color": f"C{n}", "label": label}
        # hollow where nothing joins them, so that equal ones show through one another
        form |= (
            {"markersize": 4, "linewidth": 1.4}
            if panel.joined
            else {"markersize": 5 + n, "linewidth": 0, "mfc": "none"}
        )
        axis.plot(*zip(*sorted(points)), **form)
    axis.axhline(1.0, color="black", linewidth=0.9)
    axis.set_xscale("log", base=2)
    sizes = sorted({x for points in panel.curves.values() for x, _ in points})
    # at least two doublings, so that a single size is no needle, and a target at one size has a width
    low, high = sizes[0] / 2**0.5, sizes[-1] * 2**0.5
    axis.set_xlim(low, high)
    axis.set_xticks(
        [2**e for e in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)][:: step_of(sizes)]
    )
    axis.xaxis.set_major_formatter(FuncFormatter(plain))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()
    for n, (begin, end, ratio) in enumerate(panel.targets):
        label = f"target {', '.join(f'{r:g}' for r in dict.fromkeys(t[2] for t in panel.targets))}" if n == 0 else None
        axis.plot(
            [max(low, begin / 2**0.4), min(high, end * 2**0.4)], [ratio, ratio], "--", color="crimson", linewidth=1.5,
            label=label,
        )  # fmt: skip
    if max(values) > 2.5:
        axis.set_yscale("log", base=2)
        axis.set_ylim(min(0.45, 0.9 * min(values)), 1.15 * max(values))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        margin = 0.06 * (max(values) - min(values))
        axis.set_ylim(min(0.7, min(values) - margin), max(1.3, max(values) + margin))
    legend(axis, 2 if max(map(len, panel.curves)) < 30 else 1)


def step_of(sizes: Sequence[float]) -> int:
    """Every so many doublings have a number, at most eight of them."""
    return max(1, math.ceil(math.log2(sizes[-1] / sizes[0]) / 8)) if sizes else 1


def draw(panels: Iterable[Panel], path: str) -> None:
    found = [panel for panel in panels if panel.curves]
    made, axes = figure(len(found))
    for axis, panel in zip(axes, found):
        ratios(axis, panel)
    save(made, path)


def target(summary: dict[str, Any], start: str) -> float | None:
    """What the first target whose name begins so asks for, as the file itself says it."""
    for name in summary:
        if name.startswith(start) and (asked := re.search(r"[<>]=? ([\d.]+)$", name)):
            return float(asked[1])
    return None


def timed(payload: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in payload["rows"] if "ratio" in row]
