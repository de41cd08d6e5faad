"""Whether the files of a run bear out what it says: each there, whole, and one verdict in all of them."""

import math
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError
from rl_parity import bound, checkpoint, inputs, sittings, unrecorded
from rl_parity.checks import compare_logprobs
from rl_parity.digests import apart
from rl_parity.jsonfile import REPAIR, read_object, read_text
from rl_parity.landed import left_out
from rl_parity.manifest import FILES, WEIGHTS, check_manifest, check_sections, read_config, weight_algorithm
from rl_parity.models import hf_config, spec_of
from rl_parity.rewards import Rewards
from rl_parity.rundir import COUNTS, MANIFEST, SUMMARY, RunDirectory, StepSamples, record_digests, summarize
from rl_parity.vocabulary import check_tokenizer
from vime_sync import Manifest, StepLedger
from vime_sync.layout import ModelShape
from vime_sync.ledger import tokens_digest

# sizes from which reading takes long enough to say so
SLOW_BYTES = 2**30
_TOTALS = ("steps", "tokens", *COUNTS, "forward_mismatch_count", "max_abs_diff", "bitwise_equal")
# sums, which another Python may round otherwise
_MEANS = ("mean_abs_diff", "reward_first", "reward_last")


def whole(run: RunDirectory, *, model: bool = True) -> dict[str, Any]:
    """What nothing in the run bears out; samples of recorded steps are not read.

    ``unproven`` lists, by arm, the steps of whose record and samples the ledger has no digest: an older run's loss,
    reward and other figures may be altered without any file contradicting them. ``unbound`` says whether no digest
    holds evidence, pushes and the ends of the files, as in older runs and in those that have not ended. ``silent``
    says, by arm, which workers did not tell what they had launched, and why; ``unheard`` of which sittings no evidence
    is there at all; ``failed`` which step, beyond its records, failed its checks (``rl_parity.unrecorded``).

    Args:
        model: also read the run's copy of a built-in model.

    Raises:
        ContractError: a file that the run must have is missing or damaged; it is named.
    """
    manifest = run.manifest()
    check_sections(run.root / MANIFEST, manifest)
    read_config(run.root / MANIFEST, manifest)
    every = {arm: _records(run, arm, manifest) for arm in _asked(manifest)}
    unproven: dict[str, list[int]] = {}
    silent: dict[str, list[sittings.Silence]] = {}
    unheard: dict[str, str] = {}
    failed: dict[str, str] = {}
    for arm, records in every.items():
        if records:
            arm_files(run, arm, manifest, records)
            if steps := ledger(run, arm, manifest, ledger_text(run, arm, manifest), records):
                unproven[arm] = steps
            evidence = run.evidence(arm)
            if missing := sittings.silences(manifest, evidence):
                silent[arm] = missing
            if which := sittings.unheard(manifest, arm, len(records), evidence):
                unheard[arm] = sittings.told(sittings.spans(manifest, arm, len(records)), which)
            if model:
                built_in_model(run, manifest, records[0].get("weight_digest"))
        # one that ended by itself has no step beyond its records, which is proved below
        over = manifest["status"] in ("finished", "mismatch")
        if not over and not records:
            none_lost(run, arm, manifest)
        if not over and (what := unrecorded.failed(run, arm, records)) is not None:
            failed[arm] = what
    if manifest["status"] == "finished":
        run.summary()
    bound.check_format(run, manifest)
    bound.check_status(run, manifest, every)
    bound.check_files(run, manifest)
    unbound = any(every.values()) and (FILES not in manifest or manifest["status"] == "running")
    return {"unproven": unproven, "unbound": unbound, "silent": silent, "unheard": unheard, "failed": failed}


def totals(run: RunDirectory, *, model: bool = True) -> dict[str, Any]:
    """The summary as records and samples have it, which the stored one must agree with.

    Beside its ``arms`` stands what ``whole`` returns. ``not_here`` lists the steps whose samples were left out on
    purpose (``rl_parity.landed``): their records alone are held against the ledger.

    Raises:
        ContractError: a file is missing or damaged, or two of them contradict each other; it is named.
    """
    manifest = run.manifest()
    check_manifest(run.root / MANIFEST, manifest)
    doubted = whole(run, model=model)
    summary = run.summary() if (run.root / SUMMARY).is_file() else {"arms": {}}
    stored = summary["arms"]
    if manifest["status"] != "running" and summary.get("status", manifest["status"]) != manifest["status"]:
        raise ContractError(
            f"{run.root / SUMMARY} says status {summary['status']}, {MANIFEST} {manifest['status']}; {REPAIR}"
        )
    out: dict[str, Any] = {}
    not_here: dict[str, list[int]] = {}
    listed = left_out(run.root, manifest["run_id"])
    for arm in _asked(manifest):
        records = _records(run, arm, manifest)
        if not records:
            continue
        absent = {r["step"] for r in records} & listed.get(arm, frozenset()) - set(run.sample_steps(arm))
        if absent:
            not_here[arm] = sorted(absent)
        samples(run, arm, [r for r in records if r["step"] not in absent])
        text = ledger_text(run, arm, manifest)
        ledger(run, arm, manifest, text, records, deep=True, absent=absent)
        told = stored.get(arm, {})
        found = summed(run.root / arm / "steps.jsonl", records, told)
        if manifest["status"] == "finished" or (manifest["status"] != "running" and told):
            _told(run, arm, manifest, told, found)
        out[arm] = {**told, **found}
    if others := sorted(stored.keys() - out.keys()):
        raise ContractError(f"{run.root / SUMMARY} has totals of {', '.join(others)}, which has no step; {REPAIR}")
    return {"arms": out, "not_here": not_here, **doubted}


def _told(
    run: RunDirectory, arm: str, manifest: Mapping[str, Any], told: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Raise ContractError where the summary says of an arm what its steps and samples do not."""
    expected = {key: found[key] for key in (*_TOTALS, *_MEANS)}
    # what older versions did not write
    expected |= {"warnings": found["warnings"]} if "warnings" in told else {}
    expected |= {"plant": manifest["config"].get("plant") if arm == "strict" else None} if "plant" in told else {}
    for key, value in expected.items():
        given = told.get(key, "nothing")
        close = key in _MEANS and isinstance(given, float) and isinstance(value, float)
        # a figure that is no number says so twice
        if repr(given) != repr(value) and not (close and math.isclose(given, value, rel_tol=1e-12)):
            raise ContractError(
                f"{run.root / SUMMARY} says {key} {given} of the {arm} arm, its steps and samples say {value}; {REPAIR}"
            )
    if unknown := sorted(told.keys() - found.keys() - {"plant"}):
        raise ContractError(
            f"{run.root / SUMMARY} says {unknown[0]} of the {arm} arm, which no step bears out; {REPAIR}"
        )
    if "seconds" not in told:
        raise ContractError(f"{run.root / SUMMARY} says no seconds of the {arm} arm; {REPAIR}")


def summed(path: Path, records: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> dict[str, Any]:
    """``rundir.summarize``; ContractError where a record in the file at ``path`` lacks or misstates a figure."""
    try:
        return summarize(records, float(told.get("seconds", sum(sum(r["seconds"].values()) for r in records))))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ContractError(
            f"{path} lacks or misstates a figure ({type(error).__name__}: {error}); {REPAIR}"
        ) from error


def _asked(manifest: Mapping[str, Any]) -> list[str]:
    arm = manifest["config"]["arm"]
    return ["native", "strict"] if arm == "both" else [arm]


def _records(run: RunDirectory, arm: str, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arm's records; that a run has them is known from its end, or from its summary."""
    path = run.root / arm / "steps.jsonl"
    if not path.is_file():
        done = run.summary()["arms"].get(arm, {}).get("steps") if (run.root / SUMMARY).is_file() else 0
        if manifest["status"] == "finished" or done:
            raise ContractError(f"{path} is missing; {REPAIR}")
    return run.recorded(arm, manifest)


def arm_files(run: RunDirectory, arm: str, manifest: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ContractError where an arm's steps, evidence or pushes are not those of a run such as its manifest's."""
    bound.check_records(run, arm, records)
    bound.check_evidence(run, arm, manifest, records)
    bound.check_sync(run, arm, manifest, records)


def ledger_text(run: RunDirectory, arm: str, manifest: Mapping[str, Any]) -> str:
    """The arm's ledger; ContractError where its last line is cut off, which only a killed run may leave."""
    path = run.root / arm / "ledger.jsonl"
    text = read_text(path)
    if manifest["status"] != "running" and not text.endswith("\n"):
        raise ContractError(f"{path} is {'cut off in its last line' if text else 'empty'}; {REPAIR}")
    return text


def none_lost(run: RunDirectory, arm: str, manifest: Mapping[str, Any]) -> None:
    """Raise ContractError where an arm without a record has more than the one step in which it may have been killed.

    More in the ledger or among the samples tells of records that were lost.
    """
    path, kept = run.root / arm / "ledger.jsonl", run.sample_steps(arm)
    if path.is_file():
        ledger(run, arm, manifest, ledger_text(run, arm, manifest), ())
    elif kept:
        raise ContractError(f"{path} is missing, {run.samples_path(arm, kept[0])} is there; {REPAIR}")
    if kept and kept[-1] > 0:
        steps = path.with_name("steps.jsonl")
        raise ContractError(f"{run.samples_path(arm, kept[-1])} is there, {steps} has no step 0; {REPAIR}")


def samples(run: RunDirectory, arm: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ContractError where the samples of a step are missing, damaged, or not those that its record tells of."""
    rewards = Rewards(run)
    for record in records:
        step = record["step"]
        path = run.samples_path(arm, step)
        held = StepSamples.load(path)
        counts: dict[str, Any] = {"tokens": int(held.tokens.size), "absent_count": int(held.absent.sum())}
        if not record.get("not_compared"):
            one, _ = compare_logprobs(held, held.rollout, held.train, step, ("rollout", "train"))
            counts |= {
                "valid_count": one.valid_count,
                "mismatch_count": one.mismatch_count,
                "nonfinite_count": one.nonfinite_count,
                "max_abs_diff": one.max_abs_diff,
            }
            if record.get("loss") is not None:
                two, _ = compare_logprobs(held, held.train, held.forward, step, ("scoring", "training forward"))
                counts["forward_mismatch_count"] = two.mismatch_count
        rewards.check(path, held, record, run.root / arm / "steps.jsonl")
        for key, count in counts.items():
            # a largest difference that is no number says so twice
            if record.get(key) != count and repr(record.get(key)) != repr(count):
                raise ContractError(
                    f"{path} has {key} {count}, the record of step {step} in {run.root / arm / 'steps.jsonl'} "
                    f"says {record.get(key)}; {REPAIR}"
                )


def ledger(
    run: RunDirectory,
    arm: str,
    manifest: Mapping[str, Any],
    text: str,
    records: Sequence[Mapping[str, Any]],
    deep: bool = False,
    absent: Collection[int] = (),
) -> list[int]:
    """Replay ``text`` of the arm's ledger; returns the steps whose records it has no digests of.

    Args:
        records: steps that it must hold, those of them that were trained, and no other.
        deep: also compare the digests of weights with the records, of tokens with the samples, and those of
            both as they were written.
        absent: steps whose samples are not there; the ledger must have the digests of their records.

    Raises:
        ContractError: it is of another run, breaks a rule, lacks a step or has another, or lacks the digests of one
            although the run keeps them: its manifest says so, or its ledger has those of earlier steps.
    """
    path = run.root / arm / "ledger.jsonl"
    held = _replayed(path, text, manifest["run_id"])
    # an older run has no digests, and nothing but its manifest tells of its sittings
    told = [(sitting.get("from_step") or {}).get(arm) for sitting in manifest.get("sittings") or []]
    if FILES in manifest and (unknown := [step for step, _ in held.sittings if step not in told]):
        raise ContractError(
            f"{run.root / MANIFEST} has no sitting that went on from step {unknown[0]} of the {arm} arm, which {path} "
            f"holds; {REPAIR}"
        )
    trained = [record for record in records if record.get("loss") is not None]
    if len(held.steps) < len(trained):
        raise ContractError(f"{path} does not hold step {trained[len(held.steps)]['step']}; {REPAIR}")
    ended = manifest["status"] in ("finished", "mismatch")
    # a run that broke off may have been training the step after its last record
    ahead = {step.step for step in held.steps[len(trained) :]} | {s for s in held.recorded if s >= len(records)}
    if others := sorted(ahead - (set() if ended else {len(records)})):
        raise ContractError(
            f"{path} holds step {others[0]}, {path.with_name('steps.jsonl')} has none there that was trained; {REPAIR}"
        )
    if deep:
        _digests(run, arm, manifest, held, records, absent)
    return [record["step"] for record in records if record["step"] not in held.recorded]


def _replayed(path: Path, text: str, run_id: str) -> StepLedger:
    """The closed ledger that ``text``, of the file at ``path``, tells."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger.jsonl"
        copy.write_text(text, encoding="utf-8")
        try:
            with StepLedger(copy, run_id=run_id) as held:
                return held
        except ContractError as error:
            raise ContractError(f"{str(error).replace(str(copy), str(path))}; {REPAIR}") from error


def _digests(
    run: RunDirectory,
    arm: str,
    manifest: Mapping[str, Any],
    held: StepLedger,
    records: Sequence[Mapping[str, Any]],
    absent: Collection[int],
) -> None:
    """Raise ContractError where the ledger has other digests of records and samples, or lost those of some."""
    path = run.root / arm / "ledger.jsonl"
    if bare := sorted(set(absent) - held.recorded.keys()):
        raise ContractError(
            f"{path} has no digests of step {bare[0]}, whose samples were left out: nothing bears its record out; "
            "give a directory with these samples"
        )
    published = {version.step: version.digest for version in held.versions.values()}
    for record in records:
        step, digest, consumed = record["step"], record.get("weight_digest"), record.get("loss") is not None
        if consumed and published.get(step) != digest:
            named, told = apart(published.get(step), digest)
            raise ContractError(
                f"{path} has weights {named} at step {step}, the record in {path.with_name('steps.jsonl')} {told}; "
                f"{REPAIR}"
            )
        where = run.samples_path(arm, step)
        if consumed and step not in absent:
            _tokens(path, held, step, where)
        if step in held.recorded:
            found = record_digests(record, None if step in absent else StepSamples.load(where))
            for name, file in (("record", path.with_name("steps.jsonl")), ("samples", where)):
                if name in found and held.recorded[step].get(name) != found[name]:
                    raise ContractError(f"{file} has another {name} of step {step} than {path} says; {REPAIR}")
        else:
            kept = FILES in manifest or WEIGHTS in manifest or (held.recorded and min(held.recorded) < step)
            # earlier versions kept none of a step that was not trained
            kept = kept and (consumed or FILES in manifest)
            # the last one does not wait for the disk, where only a killed run may have lost it
            if kept and (record is not records[-1] or manifest["status"] != "running"):
                raise ContractError(f"{path} lacks the digests of step {step}, which this run keeps; {REPAIR}")


def _tokens(path: Path, held: StepLedger, step: int, where: Path) -> None:
    found, prompt, start = StepSamples.load(where), 0, 0
    for index, (before, length) in enumerate(zip(found.prompt_length, found.length)):
        ids = [*found.prompt_tokens[prompt : prompt + before].tolist(), *found.tokens[start : start + length].tolist()]
        prompt, start = prompt + int(before), start + int(length)
        sample = held.samples.get(f"{step}-{index}")
        if sample is None or sample.tokens_sha256 != tokens_digest(ids):
            raise ContractError(f"{where} has other tokens in sample {index} than {path} recorded; {REPAIR}")


def built_in_model(run: RunDirectory, manifest: Mapping[str, Any], digest: str | None) -> None:
    """Raise ContractError where the run's own copy of a built-in model lacks a file or has a damaged or another one; a
    copy that is gone as a whole is made again.
    """
    config = manifest["config"]
    spec, folder = spec_of(config.get("model", "")), run.root / "model"
    if spec is None or not inputs.has_copy(run.root):
        return
    path, remedy = folder / "config.json", f"remove {folder}, it is made again"
    if read_object(path, remedy) != hf_config(spec):
        raise ContractError(f"{path} is not that of {config['model']}; {remedy}")
    check_tokenizer(folder, remedy)
    inputs.check_copy(run, manifest)
    weights(folder, digest, weight_algorithm(run.root / MANIFEST, manifest))


def weights(folder: Path, digest: str | None, algorithm: str) -> None:
    """Raise ContractError where a checkpoint does not hold the weights that a run began with."""
    from safetensors import SafetensorError, safe_open

    names = dict(ModelShape.from_hf_config(checkpoint.read_config(folder)).hf_shapes()).keys()
    if checkpoint.size_in_bytes(folder) > SLOW_BYTES:
        print(f"rl-parity: reading {folder} ({checkpoint.size_in_bytes(folder) / 2**30:.1f} GiB)", file=sys.stderr)
    files = checkpoint.weight_files(folder)
    where = str(files[0]) if len(files) == 1 else str(folder)
    remedy = "give the same checkpoint, undamaged"
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            with safe_open(str(file), framework="pt") as held:
                tensors |= {name: held.get_tensor(name) for name in held.keys() if name in names}  # noqa: SIM118
        if missing := sorted(names - tensors.keys()):
            raise ContractError(f"{folder / 'model.safetensors'} lacks {', '.join(missing[:3])}; {remedy}")
        found = Manifest.from_tensors(tensors, algorithm=algorithm).digest
    except (SafetensorError, OSError) as error:
        raise ContractError(f"{where} cannot be read ({type(error).__name__}: {error}); {remedy}") from error
    if found != digest:
        now, began = apart(found, digest)
        raise ContractError(f"{where} has weights {now}, the run began with {began}; {remedy}")
