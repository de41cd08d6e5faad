"""The arms of one or more runs under names that tell them apart."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_contract import ContractError
from rl_parity.rundir import RunDirectory


@dataclass(frozen=True)
class Arm:
    """``totals``: of this arm, as counted from its records. ``not_here``: steps without samples in ``run``."""

    name: str
    kind: str
    run: RunDirectory
    manifest: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    totals: Mapping[str, Any]
    not_here: Sequence[int]

    @property
    def ledger_digest(self) -> str:
        return hashlib.sha256((self.run.root / self.kind / "ledger.jsonl").read_bytes()).hexdigest()


def layout(config: Mapping[str, Any]) -> str:
    train, rollout = config["train"], config["rollout"]
    engines = f" x {rollout['engines']} engines" if rollout["engines"] > 1 else ""
    return f"TP{train['tp']}/CP{train['cp']} -> TP{rollout['tp']}{engines}"


def arms_of(runs: Sequence[tuple[RunDirectory, Mapping[str, Any]]]) -> list[Arm]:
    """Strict ones first; named by arm alone where the layouts are all the same.

    Raises:
        ContractError: no arm has a step, or two of one kind and layout.
    """
    manifests = [run.manifest() for run, _ in runs]
    layouts = {layout(manifest["config"]) for manifest in manifests}
    found: list[Arm] = []
    for kind in ("strict", "native"):
        for (run, totals), manifest in zip(runs, manifests, strict=True):
            if kind not in totals["arms"]:
                continue
            name = kind if len(layouts) == 1 else f"{kind} {layout(manifest['config'])}"
            if any(arm.name == name for arm in found):
                raise ContractError(f"{run.root} holds a second {name} arm; give one run for each kind and layout")
            steps, missing = run.steps(kind), totals["not_here"].get(kind, [])
            found.append(Arm(name, kind, run, manifest, steps, totals["arms"][kind], missing))
    if not found:
        raise ContractError(
            f"{', '.join(str(run.root) for run, _ in runs)}: no arm has a step, there is nothing to show"
        )
    return found


def settings_that_differ(arms: Sequence[Arm]) -> list[str]:
    """What of the configurations is not the same in all, beside arm, layout and how a run is carried out."""
    apart = {"arm", "out", "train", "rollout", "limit", "timeout", "save_every", "launcher", "gpus"}
    configs = [arm.manifest["config"] for arm in arms]
    names = sorted({name for config in configs for name in config} - apart)
    return [
        f"{name}: " + ", ".join(f"{arm.name} {arm.manifest['config'].get(name)!r}" for arm in arms)
        for name in names
        if any(config.get(name) != configs[0].get(name) for config in configs)
    ]


def named_folders(roots: Sequence[Path]) -> list[str]:
    """The last parts of the paths, which name the landed copies of several runs.

    Raises:
        ContractError: two are called the same.
    """
    names = [root.resolve().name for root in roots]
    if len(set(names)) < len(names):
        raise ContractError(f"runs {', '.join(map(str, roots))} have one name; rename a directory")
    return names
