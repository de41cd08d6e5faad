"""An arm's evidence sitting by sitting: which steps each did, which entry of the evidence tells of it, if any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Silence:
    """Workers and engines that did not tell what they had launched: ``count`` of ``of``, and why.

    ``sitting`` is the number of theirs; None where an older version did not say, or the run had no other.
    """

    sitting: int | None
    count: int
    of: int
    why: Sequence[str]


def entries(evidence: Entry) -> list[Entry]:
    """What each sitting wrote, the last one's at the end; [] where there is no evidence."""
    return [*(evidence.get("earlier") or []), evidence] if evidence else []


def spans(manifest: Mapping[str, Any], arm: str, total: int) -> list[range]:
    """For each sitting, those of the arm's ``total`` steps that it did and no later one did again."""
    starts = [(sitting.get("from_step") or {}).get(arm, 0) for sitting in manifest.get("sittings") or [{}]]
    return [range(start, max(start, min([total, *starts[i + 1 :]]))) for i, start in enumerate(starts)]


def numbers(manifest: Mapping[str, Any], evidence: Entry) -> list[int | None]:
    """Which sitting each entry is of; None where an older version, which did not say, wrote it and it may be any."""
    held = entries(evidence)
    alone = 0 if len(held) == 1 and len(manifest.get("sittings") or [{}]) == 1 else None
    return [alone if entry.get("sitting") is None else entry["sitting"] for entry in held]


def unheard(manifest: Mapping[str, Any], arm: str, total: int, evidence: Entry) -> list[int]:
    """Sittings whose steps are the arm's and that left no evidence: they were killed, or somebody took it away.

    Of a run that has not ended, the last one has not come to writing it. Where entries do not say which sitting they
    are of, all that may be meant are listed unless there are as many entries.
    """
    did = spans(manifest, arm, total)
    known = numbers(manifest, evidence)
    last = len(did) - 1 if manifest["status"] == "running" else len(did)
    missing = [i for i, steps in enumerate(did[:last]) if steps and i not in known]
    return missing if len(missing) > known.count(None) else []


def silences(manifest: Mapping[str, Any], evidence: Entry) -> list[Silence]:
    """Whose launches are not told, of each sitting in which any are not. An engine counts as one, with its workers."""
    train, rollout = manifest["config"]["train"], manifest["config"]["rollout"]
    asked = train["tp"] * train["cp"] + rollout["engines"]
    alone = len(manifest.get("sittings") or [{}]) == 1
    found = []
    for entry, number in zip(entries(evidence), numbers(manifest, evidence)):
        if why := tuple(entry.get("missing") or ()):
            engines = {name.partition("/")[0] for name in entry.get("rollout") or ()}
            told = len(entry.get("train") or ()) + len(engines)
            found.append(Silence(None if alone else number, asked - told, asked, why))
    return found


def save_every(manifest: Mapping[str, Any]) -> int:
    """After how many steps a state was due in the sitting that did the records which the arms hold, 0: after none.

    A sitting says it once it has taken back what it does again; older versions had one number for all.
    """
    said = [sitting["save_every"] for sitting in manifest.get("sittings") or () if "save_every" in sitting]
    return int(said[-1] if said else manifest["config"].get("save_every", 0))


def told(sittings: Sequence[range], which: Sequence[int]) -> str:
    """``1 (steps 0-3), 2 (steps 4-5)``: sittings counted from 1, as the report counts them."""
    return ", ".join(f"{i + 1} (steps {sittings[i].start}-{sittings[i].stop - 1})" for i in which)
