"""Where the seconds of a step go, strict above native."""

from typing import Any

ARMS = (("strict", "strict_us"), ("native", "peer_us"))


def picture(payload: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    phases = [row for row in payload["rows"] if row["case"] != "whole step"]
    phases.sort(key=lambda row: -max(row["strict_us"], row["peer_us"]))
    figure, axes = plt.subplots(figsize=(9, 2.8))
    for place, (_, key) in enumerate(ARMS):
        start = 0.0
        for number, row in enumerate(phases):
            seconds = row[key] / 1e6
            label = row["case"] if not place else None
            axes.barh(place, seconds, left=start, color=f"C{number}", edgecolor="white", linewidth=0.5, label=label)
            if seconds > 0.12:
                axes.text(
                    start + seconds / 2, place, f"{seconds:.2f}", ha="center", va="center", color="white", fontsize=9
                )
            start += seconds
        axes.text(start, place, f"  {start:.2f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(ARMS)), [arm for arm, _ in ARMS])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("seconds of a step by phase, sums of medians")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(phases), loc="upper center", bbox_to_anchor=(0.5, 1.22), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
