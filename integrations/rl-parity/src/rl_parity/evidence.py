"""What the workers of an arm counted and what its pushes went through, as files of the run directory."""

import time
from collections.abc import Mapping
from typing import Any

from rl_parity import sittings
from rl_parity.fleet import Fleet
from rl_parity.jsonfile import read_list
from rl_parity.launch import WorkerFailure
from rl_parity.rundir import RunDirectory, write_json
from vime_sync import Publisher


def write_evidence(directory: RunDirectory, arm: str, fleet: Fleet, patience: float, **more: Any) -> None:
    """What the workers counted. A worker that does not answer leaves a gap, which is written down as such.

    Counts are those of one sitting, whose place in the manifest's list is ``sitting``; what earlier ones counted is
    kept under ``earlier``. ``more`` is written as it is.
    """
    before = directory.evidence(arm)
    earlier = [*(before.pop("earlier", None) or []), before] if before else []
    sitting = max(0, len(directory.manifest().get("sittings") or ()) - 1)
    evidence: dict[str, Any] = {"sitting": sitting, "train": {}, "rollout": {}, "reports": {}, "missing": [], **more}
    evidence |= {"earlier": earlier} if earlier else {}
    deadline = time.monotonic() + patience
    calls = [(worker, worker.call("report")) for worker in (*fleet.trainers, *fleet.engines)]
    for worker, call in calls:
        try:
            answer = call.result(max(0.1, deadline - time.monotonic()))
        except WorkerFailure as error:
            evidence["missing"].append(str(error).splitlines()[0])
            continue
        if isinstance(answer, list):
            for report in answer:
                _file(evidence, "rollout", f"{worker.name}/worker-{report['rank']}", report)
        else:
            _file(evidence, "train", worker.name, answer)
    write_json(directory.root / arm / "evidence.json", evidence)


def _file(evidence: dict[str, Any], side: str, name: str, report: dict[str, Any]) -> None:
    evidence[side][name] = report["launches"]
    evidence["reports"][name] = {k: v for k, v in report.items() if k != "launches"}


def write_sync(directory: RunDirectory, arm: str, publisher: Publisher) -> None:
    """Every state of every push with its time, after those of earlier sittings."""
    path = directory.root / arm / "sync.json"
    before = read_list(path) if path.is_file() else []
    rows = [{"state": str(t.state), "version": t.version, "at": t.at, "seconds": t.seconds} for t in publisher.history]
    write_json(path, [*before, *rows])


def write_untold(directory: RunDirectory) -> None:
    """Say so where an arm has steps and nothing tells of a sitting's workers or pushes: it was killed."""
    manifest = {**directory.manifest(), "status": "ended"}
    for arm in directory.arms():
        path, evidence = directory.root / arm / "evidence.json", directory.evidence(arm)
        whole = with_untold(evidence, manifest, arm, len(directory.steps(arm, torn=True)))
        if whole != evidence:
            write_json(path, whole)
        if not path.with_name("sync.json").is_file():
            write_json(path.with_name("sync.json"), [])


def with_untold(evidence: Mapping[str, Any], manifest: Mapping[str, Any], arm: str, steps: int) -> dict[str, Any]:
    """``evidence`` with an entry for each sitting that was killed before its workers were asked."""
    untold = [_untold(number) for number in sittings.unheard(manifest, arm, steps, evidence)]
    if not evidence:
        *earlier, last = untold or [_untold(max(0, len(manifest.get("sittings") or ()) - 1))]
        return {**last, **({"earlier": earlier} if earlier else {})}
    if untold and all("sitting" in entry for entry in sittings.entries(evidence)):
        # what the last sitting counted stays where readers look for it
        return {**evidence, "earlier": [*untold, *(evidence.get("earlier") or [])]}
    return dict(evidence)


def _untold(number: int) -> dict[str, Any]:
    missing = [f"all of sitting {number + 1}, which ended before they were asked"]
    return {"sitting": number, "train": {}, "rollout": {}, "reports": {}, "missing": missing}
