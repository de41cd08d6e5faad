"""The page of ``tools/two_gpus``: every finding in a table, and one picture of collectives, ratios and layouts."""

import re
from collections.abc import Iterator
from typing import Any

PARTS = ("collectives", "training", "engines", "parity", "decode", "bench")
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
    lines = [
        "# Two GPUs",
        "",
        f"{len(gpus)} x {gpus[0]}, driver {meta['driver']}, PyTorch {meta['torch']}, NCCL {meta['nccl']}, commit "
        f"{meta['commit']}, {meta['date']}; `tools/two_gpus`.",
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
    """Microseconds of collectives, ratios to native beside their targets, mismatches of every layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 4.6))
    times = payload.get("collectives", {}).get("microseconds", {})
    for form in dict.fromkeys(form for found in times.values() for form in found):
        left.plot(list(times), [found.get(form) for found in times.values()], marker="o", label=form)
    if times:
        left.set_yscale("log")
        left.legend(fontsize=8)
    left.set_title("all-reduce of fp32 partials, microseconds", fontsize=10)
    left.tick_params(axis="x", labelsize=7)
    left.grid(alpha=0.3)

    found = ratios(payload)
    middle.set_visible(bool(found))
    names = [name for name, _, _ in found]
    middle.barh(names, [value for _, _, value in found], color="C0", height=0.5)
    for i, (_, target, value) in enumerate(found):
        middle.plot([target, target], [i - 0.35, i + 0.35], color="black", linewidth=1.5)
        middle.text(value, i, f" {value:.2f}", va="center", fontsize=8)
    middle.set_title("native's time / strict time; line: target", fontsize=10)
    middle.tick_params(labelsize=7)

    runs = layouts(payload)
    right.barh([n for n, _, _ in runs], [total for _, total, _ in runs], color="C7", height=0.6, label="compared")
    right.barh([n for n, _, _ in runs], [wrong for _, _, wrong in runs], color="C3", height=0.3, label="differ")
    for i, (_, total, wrong) in enumerate(runs):
        right.text(0, i + 0.32, f" {wrong:,} of {total:,} differ", va="bottom", fontsize=8)
    right.set_title("log-probabilities of rollout and training", fontsize=10)
    right.tick_params(labelsize=7)
    if runs:
        right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
