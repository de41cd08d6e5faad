"""The curves of the arms of a run: what was learnt, what differed, and where the seconds went."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from run_page_parts.arms import Arm

COLOURS = {"strict": "C0", "native": "C1"}


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


def phases_of(arms: Sequence[Arm]) -> list[str]:
    """Every phase that a step spent time in, the longest first."""
    spent: dict[str, float] = {}
    for arm in arms:
        for step in arm.steps:
            for phase, seconds in step["seconds"].items():
                spent[phase] = spent.get(phase, 0.0) + seconds
    return sorted(spent, key=lambda phase: -spent[phase])


def draw(arms: Sequence[Arm], path: str) -> None:
    from pictures import panels

    made, axes = panels.figure(len(PANELS) + len(arms), height=3.0)
    colours = {arm.name: COLOURS[arm.kind] if len(arms) < 3 else f"C{n}" for n, arm in enumerate(arms)}
    for axis, (title, unit, smallest, value) in zip(axes, PANELS):
        panels.style(axis, title, "step", unit)
        axis.xaxis.get_major_locator().set_params(integer=True)
        for arm in arms:
            x = [step["step"] for step in arm.steps]
            mark = "." if len(x) < 40 else ""
            axis.plot(
                x, list(map(value, arm.steps)), marker=mark, linewidth=1.3, color=colours[arm.name], label=arm.name
            )
            if unit == "count":
                compared = [step["valid_count"] for step in arm.steps]
                axis.plot(x, compared, "--", linewidth=1.0, color=colours[arm.name])
        if smallest is not None:
            # a zero is drawn, with room for one curve above another
            axis.set_yscale("symlog", linthresh=smallest)
            axis.set_ylim(bottom=-0.4 * smallest, top=max(axis.get_ylim()[1], 100 * smallest))
        panels.legend(axis, 2 if len(arms) < 3 else 1)
    seconds(axes[len(PANELS) :], arms)
    panels.save(made, path)


def seconds(axes: Sequence[Any], arms: Sequence[Arm]) -> None:
    """One panel an arm, on one scale; steps that take much longer, as those that compile do, lie above it."""
    from pictures import panels

    phases = phases_of(arms)
    top = 1.8 * max(median(sum(step["seconds"].values()) for step in arm.steps) for arm in arms)
    for axis, arm in zip(axes, arms, strict=True):
        x = [step["step"] for step in arm.steps]
        spent = [[step["seconds"].get(phase, 0.0) for step in arm.steps] for phase in phases]
        used = [(phase, times) for phase, times in zip(phases, spent) if sum(times)]
        below, wide = [0.0] * len(x), 1.0
        for phase, times in used:
            axis.bar(x, times, bottom=below, width=wide, color=f"C{phases.index(phase) % 10}", label=phase)
            below = [b + t for b, t in zip(below, times)]
        over = {step: total for step, total in zip(x, below) if total > top}
        title = f"seconds of a step by phase: {arm.name}"
        if over:
            longest = max(over, key=lambda step: over[step])
            title += f"\n({len(over)} above the picture, the longest is step {longest}: {over[longest]:.1f} s)"
        panels.style(axis, title, "step", "seconds")
        axis.set_ylim(0, top)
        axis.set_xlim(x[0] - 0.5, x[-1] + 0.5)
        axis.xaxis.get_major_locator().set_params(integer=True)
        panels.legend(axis, 4)
