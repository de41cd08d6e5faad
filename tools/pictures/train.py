"""Milliseconds of a training step by phase, strict under native; the line is what the target lets strict take."""

from typing import Any

from pictures import panels

COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "optimizer": "#b8b8b8"}


def picture(payload: dict[str, Any], path: str) -> None:
    rows = payload["rows"]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    bars = [(shape, arm) for shape in shapes for arm in ("native", "strict")]
    made, (axis,) = panels.figure(1, columns=1, height=1.4 + 0.65 * len(bars))
    names: list[str] = []
    found = {(tuple(row["shape"]), row["op"]): row for row in rows}
    for i, (shape, arm) in enumerate(bars):
        key, left = ("strict_us" if arm == "strict" else "peer_us"), 0.0
        for phase, colour in COLOURS.items():
            width = found[shape, phase][key] / 1e3
            axis.barh(i, width, left=left, color=colour, height=0.7, label=phase if i == 0 else None)
            axis.text(left + width / 2, i, f"{width:.0f}", ha="center", va="center", fontsize=panels.TEXT)
            left += width
        name = arm if arm == "strict" else found[shape, "forward"]["peer"]
        words = f"{name}, {shape[0]} layers,\n{shape[1]:,} tokens: {left:.0f} ms"
        if arm == "strict" and (shape, "step") in found:
            step = found[shape, "step"]
            words += f",\nnative / strict = {step['ratio']:.2f}"
            asked = panels.target(payload["summary"], f"training step, {shape[0]} layers, {shape[1]} tokens")
            if asked:
                most = step["peer_us"] / 1e3 / asked
                label = f"most that the target {asked:g} lets strict take" if i == 1 else None
                axis.plot([most, most], [i - 0.45, i + 0.45], "--", color="crimson", linewidth=1.8, label=label)
        names.append(words)
    longest = max(row[key] for row in rows for key in ("strict_us", "peer_us")) / 1e3
    axis.set_xlim(0, 1.12 * longest)
    panels.style(axis, "one training step", "milliseconds on the GPU")
    axis.set_yticks(range(len(bars)), names)
    axis.invert_yaxis()
    # as far below the axis, whatever its height
    below = -0.7 / (0.65 * len(bars))
    axis.legend(fontsize=panels.TEXT, ncol=4, loc="upper right", bbox_to_anchor=(1.0, below), frameon=False)
    panels.save(made, path)
