"""The curves of arms of runs: what was learnt, what differed, and where the seconds went."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

# by the name of an arm, the steps that it wrote
Steps = Mapping[str, Sequence[Mapping[str, Any]]]


def of(key: str) -> Callable[[Any], float]:
    return lambda step: math.nan if step.get(key) is None else step[key]


# title, unit, smallest value told from zero where the axis is logarithmic
PANELS = (
    ("reward, mean over the samples of a step", "reward", None, of("reward")),
    ("loss", "loss", None, of("loss")),
    ("norm of the gradient before clipping", "norm", None, of("grad_norm")),
    ("k3 estimate of KL(rollout || training)", "nats a token", 1e-8, lambda step: abs(of("k3")(step))),
    ("largest difference of a log-probability,\nrollout against training", "nats", 1e-8, of("max_abs_diff")),
    (
        "log-probabilities that differ (solid)\nof those compared (dashed), each step",
        "count",
        1.0,
        of("mismatch_count"),
    ),
)


def phases_of(arms: Steps) -> list[str]:
    """Every phase that a step spent time in, the longest first."""
    spent: dict[str, float] = {}
    for steps in arms.values():
        for step in steps:
            for phase, seconds in step["seconds"].items():
                spent[phase] = spent.get(phase, 0.0) + seconds
    return sorted(spent, key=lambda phase: -spent[phase])


def draw(arms: Steps, path: str) -> None:
    from pictures import panels

    made, axes = panels.figure(len(PANELS) + len(arms), height=3.0)
    for axis, (title, unit, smallest, value) in zip(axes, PANELS):
        panels.style(axis, title, "step", unit)
        axis.xaxis.get_major_locator().set_params(integer=True)
        for n, (name, steps) in enumerate(arms.items()):
            x = [step["step"] for step in steps]
            mark = "." if len(x) < 40 else ""
            # the first ones wider, so that equal curves show beside those drawn over them
            wide = 1.3 + (len(arms) - 1 - n)
            axis.plot(x, list(map(value, steps)), marker=mark, linewidth=wide, color=f"C{n}", label=name)
            if unit == "count":
                axis.plot(x, [step["valid_count"] for step in steps], "--", linewidth=1.0, color=f"C{n}")
        if smallest is not None:
            # a zero is drawn, with room for one curve above another
            axis.set_yscale("symlog", linthresh=smallest)
            axis.set_ylim(bottom=-0.4 * smallest, top=max(axis.get_ylim()[1], 100 * smallest))
        panels.legend(axis, 2 if max(map(len, arms)) < 25 else 1)
    seconds(axes[len(PANELS) :], arms)
    panels.save(made, path)


def seconds(axes: Sequence[Any], arms: Steps) -> None:
    """One panel an arm, on one scale; steps that take much longer, as those that compile do, lie above it."""
    from pictures import panels

    phases = phases_of(arms)
    top = 1.8 * max(median(sum(step["seconds"].values()) for step in steps) for steps in arms.values()) or 1.0
    for axis, (name, steps) in zip(axes, arms.items(), strict=True):
        x = [step["step"] for step in steps]
        spent = [[step["seconds"].get(phase, 0.0) for step in steps] for phase in phases]
        used = [(phase, times) for phase, times in zip(phases, spent) if sum(times)]
        below, wide = [0.0] * len(x), 1.0
        for phase, times in used:
            axis.bar(x, times, bottom=below, width=wide, color=f"C{phases.index(phase) % 10}", label=phase)
            below = [b + t for b, t in zip(below, times)]
        over = {step: total for step, total in zip(x, below) if total > top}
        title = "seconds of a step by phase:" + (" " if len(name) < 20 else "\n") + name
        if over:
            longest = max(over, key=lambda step: over[step])
            title += f"\n({len(over)} above the picture, the longest is step {longest}: {over[longest]:.1f} s)"
        panels.style(axis, title, "step", "seconds")
        axis.set_ylim(0, top)
        axis.set_xlim(x[0] - 0.5, x[-1] + 0.5)
        axis.xaxis.get_major_locator().set_params(integer=True)
        panels.legend(axis, 4)
