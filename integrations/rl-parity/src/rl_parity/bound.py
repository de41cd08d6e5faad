"""What binds a run's files to each other and to how it says it ended: its steps, evidence, pushes, and their digests.

A run whose manifest has ``FILES`` keeps the digest of every step's record in its ledger, trained or not, and of its
files in the manifest once it has ended. In an older run what has no digest is held against everything else there is.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_contract import ContractError, Profile
from rl_parity import shapes, sittings
from rl_parity.config import RunConfig
from rl_parity.digests import apart
from rl_parity.jsonfile import REPAIR, read_list, read_object, require
from rl_parity.manifest import FILES, FORMAT, TELLS_ALL
from rl_parity.rundir import COUNTS, MANIFEST, SUMMARY, RunDirectory, ends_run

_OF_AN_ARM = ("steps.jsonl", "ledger.jsonl", "evidence.json", "sync.json")
# whose kernels compute each boundary; a communicator of one rank launches nothing
_PACKAGES = {
    "attention": "rl_attn.",
    "rotary": "rl_attn.",
    "gemm.column": "rl_gemm.",
    "gemm.row": "rl_gemm.",
    "swiglu": "rl_gemm.",
    "logprob": "rl_logprob.",
    "norm": "rl_norm.",
    "collective": "rl_comm.",
}
# one kernel may do several boundaries, which it is then counted for
_ALSO = {"norm": ("rl_attn.",)}


def file_digests(run: RunDirectory) -> dict[str, str]:
    """sha256 of the files that say what a run did, by path below its directory, of arms that have steps.

    Those of the samples are in the ledger.
    """
    names = [SUMMARY, *(f"{arm}/{name}" for arm in run.arms() for name in _OF_AN_ARM)]
    paths = {name: run.root / name for name in names}
    return {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in paths.items() if p.is_file()}


def check_format(run: RunDirectory, manifest: Mapping[str, Any]) -> None:
    """Raise ContractError where the summary, if there is one, names another ``FORMAT`` than the manifest."""
    if not (run.root / SUMMARY).is_file():
        return
    held, told = manifest.get(FORMAT), run.summary().get(FORMAT)
    # the summary of a sitting that has not ended names none yet
    if told != held and not (told is None and manifest["status"] == "running"):
        raise ContractError(
            f"{run.root / MANIFEST} says format {held!r}, {run.root / SUMMARY} {told!r}: one was altered; {REPAIR}"
        )


def check_files(run: RunDirectory, manifest: Mapping[str, Any]) -> None:
    """Raise ContractError where a file is not the one that the run ended with; an old run has no digests of them."""
    path = run.root / MANIFEST
    if FILES not in manifest:
        return
    if manifest["status"] == "running":
        return
    reason, finished = manifest.get("reason"), manifest.get("finished")
    if not isinstance(finished, str) or (manifest["status"] == "finished" and reason is not None):
        raise ContractError(
            f"{path} says status {manifest['status']} with finished {finished!r} and reason {reason!r}, which do not "
            f"belong together; {REPAIR}"
        )
    told, found = manifest[FILES], file_digests(run)
    if not isinstance(told, Mapping) or not told:
        raise ContractError(f"{path}: {FILES} is {told!r}, supported is the sha256 of each file; {REPAIR}")
    for name in sorted({*told, *found}):
        if name not in found:
            raise ContractError(f"{run.root / name} is missing; {REPAIR}")
        if told.get(name) != found[name]:
            now, ended = apart(found[name], told.get(name))
            raise ContractError(f"{run.root / name} has sha256 {now}, {path} says {ended}; {REPAIR}")


def check_figures(run: RunDirectory, arm: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ContractError where a record has no counts, seconds or weights."""
    path = run.root / arm / "steps.jsonl"
    for line, record in enumerate(records, start=1):
        for name in (*COUNTS, "forward_mismatch_count"):
            if type(count := record.get(name)) is not int:
                raise ContractError(
                    f"{path}: step {record['step']} says {count!r} of {name} where a count belongs; {REPAIR}"
                )
        require(path, record, {"weight_version": str, "weight_digest": str, "seconds": dict}, line)
        for phase, spent in record["seconds"].items():
            if type(spent) not in (int, float) or not 0 <= spent < math.inf:
                raise ContractError(f"{path}: step {record['step']} says {spent!r} seconds of {phase}; {REPAIR}")


def check_records(run: RunDirectory, arm: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ContractError where a step is trained that must not be, or the other way round, or follows a bad one."""
    path = run.root / arm / "steps.jsonl"
    check_figures(run, arm, records)
    for record in records:
        step, trained = record["step"], record.get("loss") is not None
        # a mismatch of the training forward is found when the step is trained already
        fit = not ends_run(arm, {**record, "forward_mismatch_count": 0})
        wrong = ends_run(arm, record)
        if trained != fit:
            why = "was compared and may be trained" if fit else "must not be trained"
            raise ContractError(f"{path}: step {step} {why}, its loss is {record.get('loss')!r}; {REPAIR}")
        if wrong and record is not records[-1]:
            raise ContractError(f"{path}: a run ends with a step such as {step}, {len(records)} are there; {REPAIR}")


def check_status(run: RunDirectory, manifest: Mapping[str, Any], records: Mapping[str, Sequence[Any]]) -> None:
    """Raise ContractError where the run ended otherwise than its status says.

    Args:
        records: of each arm that was asked for, in the order in which they run.
    """
    path, status, steps = run.root / MANIFEST, manifest["status"], manifest["config"]["steps"]
    ended = [arm for arm, mine in records.items() if mine and ends_run(arm, mine[-1])]
    if status == "running" and manifest.get("finished"):
        raise ContractError(f"{path} says status running, and finished {manifest['finished']}; {REPAIR}")
    if status == "mismatch" and not ended:
        raise ContractError(f"{path} says status mismatch, every step in its records is equal; {REPAIR}")
    if status == "finished":
        for arm, mine in records.items():
            if len(mine) != steps:
                raise ContractError(
                    f"{path} says finished after {steps} steps, {run.root / arm / 'steps.jsonl'} has {len(mine)}; "
                    f"{REPAIR}"
                )
        if ended:
            raise ContractError(f"{path} says finished, the last step of the {ended[0]} arm is not equal; {REPAIR}")
    if status in ("finished", "mismatch"):
        for arm, mine in records.items():
            if extra := sorted(set(run.sample_steps(arm)) - {record["step"] for record in mine}):
                where = run.samples_path(arm, extra[0])
                raise ContractError(f"{where} is there, {run.root / arm / 'steps.jsonl'} has no such step; {REPAIR}")


def check_evidence(
    run: RunDirectory,
    arm: str,
    manifest: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Raise ContractError where evidence is missing, or shows no such workers, contracts or kernels as the run had.

    Each sitting's entry stands for its own steps: what one shows says nothing of another.

    Args:
        evidence: what the file would hold; by default what it holds.
    """
    path, status = run.root / arm / "evidence.json", manifest["status"]
    if evidence is None:
        # written when a sitting ends; one that runs or was killed may have none yet
        if status == "running" and not path.is_file():
            return
        read_object(path)
        evidence = run.evidence(arm)
    require(path, evidence, {"train": dict, "rollout": dict})
    for problem in _of_sittings(arm, evidence, manifest, records):
        raise ContractError(f"{path}: {problem}; {REPAIR}")


def _of_sittings(
    arm: str, evidence: Mapping[str, Any], manifest: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """What is wrong with each sitting's entry, and with all of them together."""
    ended = manifest["status"] in ("finished", "mismatch")
    did = sittings.spans(manifest, arm, len(records))
    entries = sittings.entries(evidence)
    numbers = sittings.numbers(manifest, evidence)
    gaps, told = [], False
    # the last entry first, whose words are those of a run of one sitting
    for entry, number in reversed(list(zip(entries, numbers))):
        name = "" if len(did) == 1 or number is None else f"sitting {number + 1}: "
        if number is not None and (number not in range(len(did)) or numbers.count(number) > 1):
            why = f"{MANIFEST} has {len(did)}" if number not in range(len(did)) else "as another one does"
            yield f"an entry says that it is of sitting {number + 1}, {why}"
            return
        last = number is None or number == len(did) - 1
        # what a step was not compared for is its sitting's, and no other follows it
        compared = not (last and any(record.get("not_compared") for record in records))
        yield from (name + problem for problem in _wrong(arm, entry, manifest, compared))
        gaps.append([name + problem for problem in _lacking(arm, entry, manifest)])
        # of a sitting that was killed nobody could tell, of one that ended by itself each worker told or failed to
        quiet = not (last and ended) and not (entry.get("train") or entry.get("rollout")) and entry.get("missing")
        told = told or number is None or not quiet
        over = manifest["status"] != "running" or not last
        if number is not None and did[number] and over and not quiet:
            yield from gaps[-1]
    # older versions did not say which sitting an entry is of, and the last one may have had nothing left to do; where
    # all that did a step were killed, none is there that could show it, which a strict arm can't end with
    if ended and (told or arm == "strict") and all(gaps):
        yield gaps[0][0]
    if manifest.get(FORMAT, 0) < TELLS_ALL:
        return
    if None in numbers:
        yield f"an entry does not say which of {len(did)} sittings it is of, as each of format {manifest[FORMAT]} does"
    missing = sittings.unheard(manifest, arm, len(records), evidence)
    if missing and manifest["status"] != "running":
        yield (
            f"no entry is of sitting {sittings.told(did, missing)}; in a run of format {manifest[FORMAT]} every "
            "sitting has one"
        )


def _wrong(arm: str, evidence: Mapping[str, Any], manifest: Mapping[str, Any], compared: bool) -> Iterator[str]:
    """What no sitting of the run can have said, however it ended."""
    reports = evidence.get("reports") or {}
    profile = Profile.from_dict(manifest["profile"]) if "profile" in manifest else None
    for side in ("train", "rollout"):
        workers = evidence.get(side)
        if not isinstance(workers, Mapping):
            yield f"{side} is {workers!r}, supported is a mapping"
            continue
        for name, rows in workers.items():
            if not isinstance(rows, list) or not all(map(_is_row, rows)):
                yield f"{side}, {name} holds what is no count of launches"
                continue
            report = reports.get(name)
            if report is None and FILES in manifest:
                yield f"{name} has no report"
            elif report is not None and compared and profile is not None:
                yield from _identity(arm, side, name, report, profile)
            if arm == "strict" and profile is not None:
                yield from _foreign(side, name, rows)


def _lacking(arm: str, evidence: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[str]:
    """Workers that neither told nor failed to, and launches that each must have made for a step."""
    config = manifest["config"]
    train, rollout = config["train"], config["rollout"]
    ranks = {"train": train["tp"] * train["cp"], "rollout": rollout["tp"] * rollout["engines"]}
    # prompts go to engines in contiguous shares, of which the last ones may be empty
    batch = config.get("batch", RunConfig.batch)
    share = -(-batch // rollout["engines"])
    shared = {"train": ranks["train"] > 1, "rollout": rollout["tp"] > 1}
    profile = Profile.from_dict(manifest["profile"]) if "profile" in manifest else None
    silent = len(evidence.get("missing") or ())
    for side, asked in ranks.items():
        workers = evidence.get(side) or {}
        # an engine answers for all of its workers, or for none
        answers = 1 if side == "train" else rollout["tp"]
        silent -= -(-(asked - len(workers)) // answers)
        if len(workers) > asked or silent < 0:
            yield f"{side} names {len(workers)} workers, the run had {asked}"
        for name, rows in workers.items():
            if arm == "strict" and profile is not None:
                engine = name.removeprefix("engine-").partition("/")[0]
                idle = side == "rollout" and engine.isdecimal() and int(engine) * share >= batch
                wanted = set() if idle else set(profile.contracts) & _PACKAGES.keys()
                wanted -= set() if shared[side] else {"collective"}
                if missing := sorted(wanted - {row["boundary"] for row in rows}):
                    yield f"{side}, {name} launched no kernel for {', '.join(missing)}"
    if arm == "strict" and manifest["status"] == "finished" and not any(evidence.get(side) for side in ranks):
        yield f"no worker is named, the run had {sum(ranks.values())}"


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, Mapping)
        and isinstance(row.get("boundary"), str)
        and isinstance(row.get("kernel"), str)
        and type(row.get("count")) is int
        and row["count"] > 0
    )


def _identity(arm: str, side: str, name: str, report: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    if (report.get("mode", arm) == "strict") != (arm == "strict"):
        yield f"{name} ran in mode {report['mode']}, which the {arm} arm does not"
    held = report.get("fingerprint" if side == "train" else "profile")
    if arm == "strict" and held != profile.fingerprint:
        theirs, ours = apart(held, profile.fingerprint)
        yield f"{name} held contract {theirs}, the run's is {ours}"
    if arm == "native" and side == "rollout" and held is not None:
        yield f"{name} held contract {str(held)[:12]}, the native arm holds none"


def _foreign(side: str, name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        owner = _PACKAGES.get(row["boundary"])
        if owner is None or not row["kernel"].startswith((owner, *_ALSO.get(row["boundary"], ()))):
            yield f"{side}, {name} launched {row['kernel']} for {row['boundary']}, which is no kernel of that contract"


def check_sync(run: RunDirectory, arm: str, manifest: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ContractError where no push published what a step of the last sitting used."""
    path = run.root / arm / "sync.json"
    if manifest["status"] == "running" and not path.is_file():
        return
    rows = read_list(path)
    shapes.check_sync(path, rows)
    if manifest["status"] == "running":
        return
    # a sitting that was killed has written nothing about its pushes
    first = sittings.spans(manifest, arm, len(records))[-1].start
    published = {row["version"] for row in rows if row["state"] == "published"}
    for record in records[first:]:
        if record.get("weight_version") not in published:
            raise ContractError(
                f"{path} has no published push of {record.get('weight_version')}, which step {record['step']} used; "
                f"{REPAIR}"
            )
