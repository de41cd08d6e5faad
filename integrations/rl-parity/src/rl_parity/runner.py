"""A whole run: preflight, manifest, the arms one after the other, summary and report."""

import math
import os
import platform
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rl_contract import ContractError, Profile
from rl_parity import checkpoint, inputs, lock, metrics, native, preflight, resume, sittings
from rl_parity.bound import file_digests
from rl_parity.config import CHANGEABLE, RunConfig
from rl_parity.data import load_prompts
from rl_parity.digests import apart
from rl_parity.evidence import write_untold
from rl_parity.jsonfile import require
from rl_parity.launch import WorkerFailure
from rl_parity.launch.processes import marked, new_mark, sweep_dead
from rl_parity.launch.signals import shield
from rl_parity.loop import Arm, LimitReached, MismatchFound
from rl_parity.manifest import (
    DIGEST,
    FILES,
    FORMAT,
    FORMATS,
    INPUTS,
    WEIGHTS,
    config_digest,
    topology,
    weight_algorithm,
)
from rl_parity.models import spec_of, write_model
from rl_parity.placement import Placement, place
from rl_parity.report import write_report
from rl_parity.resume import Point
from rl_parity.rundir import MANIFEST, PARTIAL_MODEL, REPORT, SUMMARY, RunDirectory, summarize, write_json
from rl_parity.status import EQUAL, FAILURE, INTERRUPTED, MISMATCH, USAGE
from vime_sync import WEIGHT_DIGEST, PublishError


def run(config: RunConfig, command: Sequence[str] = (), *, again: bool = False) -> int:
    """Do the run and return its exit status.

    Args:
        again: go on with the run in ``config.out``, whose configuration ``resume.config_of`` has checked.

    0 strict arm exactly equal, 1 a mismatch, 2 a violated precondition, 3 an engine or sync failure, 130 interrupted.
    The run directory is readable whatever happens after the preflight.
    """
    deadline = time.monotonic() + (config.limit or math.inf)
    directory = RunDirectory(config.out)
    lock.refuse_if_held(directory.root)
    sweep_dead()
    if again:
        # before the checks, which read what another sitting would be writing
        with lock.held(directory.root):
            going_on = native.began(directory) if "native" in config.arms else None
            if _violated(preflight.check(config, new_run=False, going_on=going_on)):
                return USAGE
            points = resume.points(directory, config)
            resume.check(directory, config, points)
            return _marked(config, directory.manifest()["run_id"], directory, command, points, again, deadline)
    if _violated(preflight.check(config)):
        return USAGE
    directory.root.mkdir(parents=True, exist_ok=True)
    with lock.held(directory.root):
        # another run may have come first
        if (refusal := RunDirectory.refusal(directory.root)) is not None:
            raise ContractError(refusal)
        directory.remove_torn()
        points = {arm: Point() for arm in config.arms}
        return _marked(config, f"run-{uuid.uuid4().hex[:8]}", directory, command, points, again, deadline)


def _violated(violations: list[str]) -> bool:
    if violations:
        print(preflight.Preflight(violations), file=sys.stderr)
    return bool(violations)


def _marked(config: RunConfig, run_id: str, *rest: Any) -> int:
    with marked(new_mark(run_id)), _one_thread():
        return _run(config, run_id, *rest)


@contextmanager
def _one_thread() -> Iterator[None]:
    """This process counts a few thousand tokens a step: threads would wait for cores that workers have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(
    config: RunConfig,
    run_id: str,
    directory: RunDirectory,
    command: Sequence[str],
    points: dict[str, Point],
    again: bool,
    deadline: float,
) -> int:
    # before anything is read: what is read and then still has these digests is what they are of
    read = inputs.digests(directory.root, config)
    model_config = preflight.model_config(config)
    profile = preflight.profile(config, model_config)
    placed = place(config, preflight.gpus_of(config))
    manifest = _manifest(config, run_id, profile, placed, command) | {INPUTS: read}
    earlier = _earlier(directory, manifest, points) if again else {}
    if again:
        # weights keep the digest that they were first named by, and a run without digests of its files gets none:
        # what an earlier sitting left unsaid is not said for it
        del manifest[WEIGHTS], manifest[FILES], manifest[FORMAT], manifest[INPUTS]
        # nor is what the run was asked for: only how it is carried out may be said anew
        given = config.to_dict()
        manifest["config"] = {**earlier["config"], **{name: given[name] for name in (*CHANGEABLE, "out")}}
        manifest[DIGEST] = config_digest(manifest["config"])
    manifest |= {key: earlier[key] for key in ("started", "sittings", WEIGHTS, FILES, FORMAT, INPUTS) if key in earlier}
    algorithm = weight_algorithm(directory.root / MANIFEST, manifest)
    status, reason, code = "failed", "", FAILURE
    before = {name: _before(point, earlier.get("arms", {}).get(name)) for name, point in points.items()}
    # a sitting may end before it comes to an arm, whose saved steps and seconds stay as they are
    summary: dict[str, Any] = {
        "status": "running",
        "arms": {
            name: _totals(config, name, point.records, before[name]) for name, point in points.items() if point.records
        },
    }
    try:
        with shield():
            if again:
                _begin_again(config, directory, manifest, summary, points)
            else:
                directory.write_manifest(manifest)
        model = Path(config.model).resolve()
        if spec_of(config.model) is not None:
            model = directory.root / "model"
            if not (model / "config.json").is_file():
                _make_model(config, directory)
        longest = preflight.context(config, model_config)
        tokenizer, prompts = load_prompts(config, model, checkpoint.read_config(model), longest)
        inputs.check(directory, config, manifest)
        for name in config.arms:
            # an arm's workers read the folder when the arm begins
            inputs.check(directory, config, manifest, prompts=False)
            arm = Arm(
                name, config, run_id, directory, model, model_config, profile, prompts, tokenizer, longest, placed,
                algorithm=algorithm, deadline=deadline,
            )  # fmt: skip
            point = points[name]
            if point.saved is not None:
                arm.saved, arm.records = point.saved, list(point.records)
            started = time.monotonic()
            try:
                if point.step < config.steps:
                    arm.run()
            finally:
                if arm.records:
                    seconds = before[name] + time.monotonic() - started
                    summary["arms"][name] = _totals(config, name, arm.records, seconds)
                    write_json(directory.root / SUMMARY, summary)
        status, reason, code = "finished", "", EQUAL
    except MismatchFound as error:
        status, reason, code = "mismatch", str(error), MISMATCH
    except (WorkerFailure, PublishError) as error:
        status, reason, code = "failed", str(error), FAILURE
    except LimitReached as error:
        status, reason, code = "interrupted", str(error), INTERRUPTED
    except KeyboardInterrupt:
        status, reason, code = "interrupted", "interrupted by a signal", INTERRUPTED
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        with shield():
            _finish(directory, summary, status, reason)
    _say(directory, summary, status, reason)
    return code


def _make_model(config: RunConfig, directory: RunDirectory) -> None:
    """All of the run's copy of a built-in model at once: a killed sitting leaves it whole or not at all."""
    if inputs.has_copy(directory.root):
        # half of one, as older versions could leave it
        write_model(config.model, directory.root / "model", seed=config.seed)
        return
    partial = directory.root / PARTIAL_MODEL
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_model(config.model, partial, seed=config.seed).replace(directory.root / "model")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _begin_again(
    config: RunConfig,
    directory: RunDirectory,
    manifest: dict[str, Any],
    summary: Mapping[str, Any],
    points: Mapping[str, Point],
) -> None:
    """Withdraw the verdict of earlier sittings and what is done again; killed anywhere here, it can be repeated."""
    # the page first: nothing is bound to it, and it is made again from the other files
    (directory.root / REPORT).unlink(missing_ok=True)
    directory.write_manifest(manifest)
    write_json(directory.root / SUMMARY, summary)
    resume.take_back(directory, points)
    # from here on the records are those of this sitting
    manifest["sittings"][-1]["save_every"] = config.save_every
    directory.write_manifest(manifest)


def _before(point: Point, told: Mapping[str, Any] | None) -> float:
    """Seconds of an arm's earlier sittings; of one that was killed, those of its steps are known."""
    of_steps = sum(sum(record["seconds"].values()) for record in (*point.records, *point.dropped))
    return max(told.get("seconds", 0.0) if told else 0.0, of_steps)


def _totals(config: RunConfig, arm: str, records: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    return {**summarize(records, round(seconds, 2)), "plant": config.plant if arm == "strict" else None}


def _earlier(directory: RunDirectory, manifest: dict[str, Any], points: dict[str, Point]) -> dict[str, Any]:
    """What earlier sittings left: start, settings, what names weights, their list with this one's, each arm's totals.

    Raises:
        ContractError: the run holds other contracts than these packages build.
    """
    old = directory.manifest()
    require(directory.root / MANIFEST, old, {"fingerprints": dict})
    require(directory.root / MANIFEST, old["fingerprints"], {"profile": str})
    if old["fingerprints"]["profile"] != manifest["fingerprints"]["profile"]:
        held, built = apart(old["fingerprints"]["profile"], manifest["fingerprints"]["profile"])
        raise ContractError(
            f"{directory.root} holds contracts {held}, these packages build {built}; "
            "resume with the packages that the run began with"
        )
    about = ("command", "versions", "hardware", "gpus", "placement", "started")
    first = old.get("sittings") or [{key: old.get(key) for key in about}]
    if not any("save_every" in sitting for sitting in first):
        first = [*first[:-1], {**first[-1], "save_every": sittings.save_every(old)}]
    sitting = {
        **{key: manifest[key] for key in about},
        "from_step": {arm: point.step for arm, point in points.items()},
        "done_again": {
            arm: [{"step": r["step"], "weight_digest": r["weight_digest"]} for r in point.dropped]
            for arm, point in points.items()
            if point.dropped
        },
    }
    totals = directory.summary()["arms"] if (directory.root / SUMMARY).is_file() else {}
    kept = {key: old[key] for key in (WEIGHTS, FORMAT, INPUTS) if key in old}
    kept |= {FILES: {}} if FILES in old else {}
    told = {"started": old.get("started"), "config": old["config"], "sittings": [*first, sitting]}
    return {**told, "arms": totals, **kept}


def _finish(directory: RunDirectory, summary: dict[str, Any], status: str, reason: str) -> None:
    write_untold(directory)
    manifest = directory.manifest()
    named = {FORMAT: manifest[FORMAT]} if FORMAT in manifest else {}
    write_json(directory.root / SUMMARY, {**summary, **named, "status": status})
    notes = [*manifest["notes"], *_native_notes(directory)]
    bound_files = {FILES: file_digests(directory)} if FILES in manifest else {}
    directory.write_manifest(
        {**manifest, "notes": notes, "status": status, "reason": reason or None, "finished": _now(), **bound_files}
    )
    try:
        # the model has just been pushed, digest by digest
        write_report(directory, model=False)
    except ContractError as error:
        # why the run ended is worth more than why its page is missing
        if status == "finished":
            raise
        print(f"rl-parity: no report: {error}", file=sys.stderr)


def _native_notes(directory: RunDirectory) -> list[str]:
    """What the native arm ran, and could not run, of the engines' own operators, as reported in all sittings."""
    if not (directory.root / "native").is_dir():
        return []
    notes = [
        f"the native arm's trainer is {ran['name']}"
        + "".join(f", attention {kind} {how}" for kind in ("asked", "ran") if (how := ran.get(f"attention_{kind}")))
        for ran in native.reports(directory)
    ]
    notes += [
        f"native arm runs {s.get('used')} instead of {s.get('stock')}: {s.get('why')}"
        for s in native.substitutions(directory)
    ]
    return list(dict.fromkeys(notes))


def _say(directory: RunDirectory, summary: dict[str, Any], status: str, reason: str) -> None:
    for arm, totals in summary["arms"].items():
        worst = "not compared" if totals["max_abs_diff"] is None else f"max |diff| {totals['max_abs_diff']:.6g}"
        print(
            f"{arm:<7} {totals['valid_count']:>8,} tokens compared, {totals['mismatch_count']:,} differ, {worst}, "
            f"{totals['steps']} steps, {totals['seconds']:.0f} s"
        )
    if status == "finished" and "strict" in summary["arms"]:
        print("verdict: EQUAL, bit for bit")
    elif status != "finished":
        print(f"verdict: {status.upper()}\n{reason}", file=sys.stderr)
    print(f"report: {directory.root / 'report.html'}")


def _manifest(
    config: RunConfig, run_id: str, profile: Profile, placed: Placement, command: Sequence[str]
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "status": "running",
        "reason": None,
        "started": _now(),
        "command": list(command) or [shlex.join(sys.argv)],
        "config": config.to_dict(),
        DIGEST: config_digest(config.to_dict()),
        FORMAT: FORMATS[-1],
        FILES: {},
        WEIGHTS: WEIGHT_DIGEST,
        "seeds": {"run": config.seed, "sampling": "sha256(run seed, step, prompt place, sample), first 31 bits"},
        "sampling": metrics.semantics(config).to_dict(),
        "topology": topology(config),
        "gpus": [gpu.to_dict() for gpu in placed.gpus],
        "placement": placed.to_dict(),
        "profile": profile.to_dict(),
        "fingerprints": {
            "profile": profile.fingerprint,
            **{name: contract.fingerprint for name, contract in sorted(profile.contracts.items())},
        },
        "plant": config.plant,
        "versions": {"python": platform.python_version(), **preflight.versions(), **_gpu_versions(placed)},
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / preflight.GIB, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "notes": preflight.notes(config),
    }


def _gpu_versions(placed: Placement) -> dict[str, str]:
    if not placed.gpus:
        return {}
    import torch

    found = {"cuda": str(torch.version.cuda), "driver": placed.gpus[0].driver}
    with suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
