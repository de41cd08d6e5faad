"""The page of ``tools/two_gpus``: every finding in a table, and one picture of collectives, ratios and layouts."""

import re
from collections.abc import Iterator
from typing import Any

PARTS = ("collectives", "training", "engines", "parity", "decode", "decode36", "bench")
TARGET = re.compile(r"^(.*?)(?: of native| against native)? >= ([\d.]+)$")


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(path, figure) of everything in nested findings; logs and errors as they are, stages left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if str(key).startswith("stages"):
                continue
            yield from flat(inner, f"{name}: {key}" if name else str(key))
    elif value not in ([], ""):
        yield name, value


def table(payload: dict[str, Any]) -> str:
    """Markdown."""
    meta = payload["meta"]
    gpus = meta["gpu"] if isinstance(meta["gpu"], list) else [meta["gpu"]]
    shared = len(gpus) == 1
    lines = [
        "# Two ranks on one GPU" if shared else "# Two GPUs",
        "",
        f"{len(gpus)} x {gpus[0]}, driver {meta['driver']}, PyTorch {meta['torch']}, NCCL {meta['nccl']}, commit "
        f"{meta['commit']}, {meta['date']}; `tools/two_gpus{' --one-gpu' * shared}`.",
    ]
    lines += ["", meta["note"]] if meta.get("note") else []
    for part in PARTS:
        if part not in payload:
            continue
        lines += ["", f"## {part}", "", "| | |", "|---|---|"]
        for name, value in flat(payload[part]):
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            text = text.replace("|", "/").replace("\n", " ")
            lines.append(f"| {name} | {text[:400]} |")
    return "\n".join(lines) + "\n"


def ratios(payload: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, target, measured) of every finding whose name states a target."""
    found = []
    for part in PARTS:
        for name, value in flat(payload.get(part, {})):
            match = TARGET.match(name)
            if match and isinstance(value, int | float):
                found.append((f"{part}: {match[1]}", float(match[2]), float(value)))
    return found


def layouts(payload: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(layout, log-probabilities compared, of which differ) of parity's runs."""
    runs = payload.get("parity", {}).items()
    return [(n, r["valid_count"], r["mismatch_count"]) for n, r in runs if isinstance(r, dict) and "valid_count" in r]


def picture(payload: dict[str, Any], path: str) -> None:
    """Microseconds of collectives, ratios to native beside their targets, mismatches of every layout: what there is."""
    from pictures import panels

    times = payload.get("collectives", {}).get("microseconds", {})
    parts = [(draw, found) for draw, found in (
        (_collectives, times), (_ratios, ratios(payload)), (_layouts, layouts(payload))
    ) if found]  # fmt: skip
    if not parts:
        raise ValueError("no microseconds of collectives, no ratio and no layout: there is nothing to draw")
    made, axes = panels.figure(len(parts), columns=1, height=3.0)
    for axis, (draw, found) in zip(axes, parts):
        draw(axis, found)
    panels.save(made, path)


def _collectives(axis: Any, times: dict[str, dict[str, float]]) -> None:
    from pictures import panels

    panels.style(
        axis, "all-reduce of fp32 partials to bf16 over two GPUs", "elements", "microseconds of a call in a graph"
    )
    for form in dict.fromkeys(form for found in times.values() for form in found):
        label = f"NCCL, {form}" if form.endswith("-shot") else form
        axis.plot(list(times), [found.get(form) for found in times.values()], marker="o", label=label)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    panels.legend(axis, 3)


def _ratios(axis: Any, found: list[tuple[str, float, float]]) -> None:
    from pictures import panels

    panels.style(axis, "strict beside native", "native's time / strict time")
    names = [name.replace(": ", ":\n", 1) for name, _, _ in found]
    axis.barh(names, [value for _, _, value in found], color="C0", height=0.5)
    for i, (_, target, value) in enumerate(found):
        axis.plot(
            [target] * 2, [i - 0.35, i + 0.35], "--", color="crimson", linewidth=1.8, label=None if i else "target"
        )
        axis.text(0, i, f" {value:.2f}, target {target:g}", va="center", fontsize=panels.TEXT, color="white")
    axis.invert_yaxis()
    panels.legend(axis)


def _layouts(axis: Any, runs: list[tuple[str, int, int]]) -> None:
    from pictures import panels

    panels.style(axis, "whole runs, layout of training -> layout of the rollout", "log-probabilities")
    names = [
        f"{name if name.startswith('native') else f'strict {name}'}\n{wrong:,} of {total:,} differ"
        for name, total, wrong in runs
    ]
    axis.barh(names, [total for _, total, _ in runs], color="C7", height=0.6, label="compared")
    axis.barh(names, [wrong for _, _, wrong in runs], color="C3", height=0.3, label="differ")
    axis.invert_yaxis()
    panels.legend(axis)
