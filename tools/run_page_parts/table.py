"""The page of a run: what was compared, how long a step took, which kernels ran, what is not in the clone."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from run_page_parts.arms import Arm, layout, settings_that_differ
from run_page_parts.picture import phases_of

from rl_parity.landed import spans
from rl_parity.sittings import entries

Row = tuple[str, list[str]]


def page(name: str, arms: Sequence[Arm], unproven: Mapping[str, Sequence[int]], commit: str, place: str) -> str:
    """Markdown.

    Args:
        name: title, and the stem of the picture.
        unproven: arm's name -> steps whose records no digest bears out.
        place: the landed directory, relative to the root of the repository.
    """
    lines = [f"# {name}", "", f"![{name}]({name}.png)", "", made(arms, commit), ""]
    lines += [f"- the arms differ in {line}" for line in settings_that_differ(arms)]
    lines += [
        f"- **planted on purpose** in {arm.name}: {arm.manifest['config']['plant']}"
        for arm in arms
        if arm.manifest["config"].get("plant")
    ]
    lines += [f"- {arm.name}, the first one that differs: {found}" for arm in arms if (found := first_mismatch(arm))]
    # a list ends before the table
    lines += [""] if lines[-1] else []
    lines += grid(["", *(arm.name for arm in arms)], figures(arms))
    lines += ["", "Seconds of a step, medians over the steps after the first:", ""]
    lines += grid(["", *(arm.name for arm in arms)], times(arms))
    for arm in arms:
        if rows := kernels(arm):
            lines += ["", f"## Kernels that ran: {arm.name}", ""]
            lines += ["Launches counted inside the operators of every worker, those of graph replays included.", ""]
            lines += grid(["boundary", "kernel", "training", "rollout"], rows)
    lines += ["", "## What bears this out", "", *proof(arms, unproven, place)]
    return "\n".join(lines) + "\n"


def grid(head: Sequence[str], rows: Sequence[Row]) -> list[str]:
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return out + [f"| {' | '.join([name, *cells])} |" for name, cells in rows]


def made(arms: Sequence[Arm], commit: str) -> str:
    """Where, when and with what, once where all arms agree."""
    sentences = []
    for what in dict.fromkeys(map(machine, arms)):
        mine = [arm.name for arm in arms if machine(arm) == what]
        sentences.append(what if len(mine) == len(arms) else f"{', '.join(mine)}: {what}")
    command = list(dict.fromkeys(str(arm.manifest["command"][0]) for arm in arms))
    return f"{' '.join(sentences)} Commit {commit}. `{'`, `'.join(command)}`."


def first_mismatch(arm: Arm) -> str | None:
    """Where a strict arm's first differing log-probability is; a native one differs everywhere."""
    found = next((step["first_mismatch"] for step in arm.steps if step.get("first_mismatch")), None)
    if found is None or arm.kind != "strict":
        return None
    return (
        f"step {found['step']}, sample {found['sample']}, position {found['position']}, token {found['token']}: "
        f"{found['left_name']} {found['left']!r} ({found['left_bits']}), "
        f"{found['right_name']} {found['right']!r} ({found['right_bits']})"
    )


def machine(arm: Arm) -> str:
    manifest = arm.manifest
    gpus = manifest.get("gpus") or []
    names = sorted({gpu["name"] for gpu in gpus})
    drivers = sorted({str(gpu["driver"]) for gpu in gpus if gpu.get("driver")})
    hardware = manifest.get("hardware") or {}
    where = f"{len(gpus)} x {', '.join(names)}" if gpus else f"{hardware.get('processor', 'CPU')}, no GPU"
    where += f", driver {', '.join(drivers)}" if drivers else ""
    versions = ", ".join(f"{name} {version}" for name, version in (manifest.get("versions") or {}).items() if version)
    return f"{where}; {versions}; started {manifest.get('started')}."


def number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def largest(arm: Arm, key: str) -> float | None:
    return max((abs(step[key]) for step in arm.steps if step.get(key) is not None), default=None)


def figures(arms: Sequence[Arm]) -> list[Row]:
    def row(name: str, value: Any) -> Row:
        return name, [value(arm) for arm in arms]

    def total(key: str) -> Any:
        return lambda arm: number(arm.totals.get(key))

    def setting(*keys: str) -> Any:
        return lambda arm: ", ".join(f"{arm.manifest['config'].get(key)}" for key in keys)

    return [
        row("model", setting("model")),
        row("layout, training -> rollout", lambda arm: layout(arm.manifest["config"])),
        row("prompts, reward", setting("prompts", "reward")),
        row("prompts a step x samples a prompt", setting("batch", "group")),
        row("steps, of those asked for", lambda arm: f"{len(arm.steps)} of {arm.manifest['config']['steps']}"),
        row("how the run ended", lambda arm: str(arm.manifest["status"])),
        row("log-probabilities compared, rollout with training", total("valid_count")),
        row("of these differ", total("mismatch_count")),
        row("differ between scoring and training forward", total("forward_mismatch_count")),
        row("absent or not finite", lambda arm: number(arm.totals["absent_count"] + arm.totals["nonfinite_count"])),
        row("largest difference (max_abs_diff), nats", total("max_abs_diff")),
        row("mean difference, nats", total("mean_abs_diff")),
        row("largest k3 of a step, nats a token", lambda arm: number(largest(arm, "k3"))),
        row("largest gradient norm", lambda arm: number(largest(arm, "grad_norm"))),
        row("different weights pushed", lambda arm: number(len({step["weight_digest"] for step in arm.steps}))),
        row("mean reward, first tenth of the steps", total("reward_first")),
        row("mean reward, last tenth of the steps", total("reward_last")),
        row("seconds in all", total("seconds")),
    ]


def times(arms: Sequence[Arm]) -> list[Row]:
    """Medians; the first step, in which kernels compile, is given apart."""
    rows: list[Row] = []
    whole = [[sum(step["seconds"].values()) for step in arm.steps] for arm in arms]
    rows.append(("first step", [f"{spent[0]:.3g}" for spent in whole]))
    later = [arm.steps[1:] or arm.steps for arm in arms]
    rows.append(("whole step", [f"{median(spent[1:] or spent):.3g}" for spent in whole]))
    for phase in phases_of({arm.name: arm.steps for arm in arms}):
        rows.append((phase, [f"{median(s['seconds'].get(phase, 0.0) for s in steps):.3g}" for steps in later]))
    return rows


def kernels(arm: Arm) -> list[Row]:
    """Launches by boundary and kernel, summed over sittings, workers, plans and phases."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    told = [(side, entry) for entry in entries(arm.run.evidence(arm.kind)) for side in ("train", "rollout")]
    for side, entry in told:
        for launches in (entry.get(side) or {}).values():
            for launch in launches:
                counts = found.setdefault((launch["boundary"], launch["kernel"]), {})
                counts[side] = counts.get(side, 0) + launch["count"]
    return [
        (boundary, [f"`{kernel}`", *(number(counts.get(side, 0)) for side in ("train", "rollout"))])
        for (boundary, kernel), counts in sorted(found.items())
    ]


def proof(arms: Sequence[Arm], unproven: Mapping[str, Sequence[int]], place: str) -> list[str]:
    """The digests of the ledgers, and which samples are not there."""
    roots = dict.fromkeys(arm.run.root for arm in arms)
    inner = [place] if len(roots) == 1 else [f"{place}/{root.name}" for root in roots]
    commands = " and ".join(f"`rl-parity report {path}`" for path in inner)
    lines = [
        f"{commands} reads the landed directory again: every record must have the sha256 that the ledger keeps of it, "
        "the samples that are there are compared bit for bit and must give the counts of their records, and the totals "
        "above are counted from the records. Before it was landed the whole run, every sample of every step, was read "
        "so.",
        "",
    ]
    lines += grid(
        ["arm", "run", "ledger, sha256", "samples landed of steps"],
        [(arm.name, [arm.manifest["run_id"], f"`{arm.ledger_digest}`", landed(arm)]) for arm in arms],
    )
    lines += [
        "",
        "Samples of the other steps, the workers' logs and the model's weights are not landed. Of each step's samples "
        "the ledger holds the sha256, and of each completion that of its token ids; the weights are named by their "
        "digests.",
    ]
    for name, steps in unproven.items():
        lines += ["", f"Unproven: the ledger has no digests of steps {spans(steps)} of {name}."]
    return lines


def landed(arm: Arm) -> str:
    here = sorted({step["step"] for step in arm.steps} - set(arm.not_here))
    return spans(here) if here else "none"
