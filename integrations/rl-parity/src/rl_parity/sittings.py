"""An arm's evidence sitting by sitting: which steps each did, which entry of the evidence tells of it, if any."""

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]


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


def silences(evidence: Entry) -> list[str]:
    """What every sitting's workers did not tell, as it was written down when they were asked."""
    return [text for entry in entries(evidence) for text in entry.get("missing") or ()]


def told(sittings: Sequence[range], which: Sequence[int]) -> str:
    """``1 (steps 0-3), 2 (steps 4-5)``: sittings counted from 1, as the report counts them."""
    return ", ".join(f"{i + 1} (steps {sittings[i].start}-{sittings[i].stop - 1})" for i in which)
