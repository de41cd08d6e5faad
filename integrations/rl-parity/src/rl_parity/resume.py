"""Going on with a run in a later sitting: what may change, what must not, and what a broken-off one leaves behind."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rl_contract import ContractError
from rl_parity import bound, inputs, native, preflight_options, sittings, state, unrecorded, verify
from rl_parity.config import CHANGEABLE, RunConfig
from rl_parity.digests import apart
from rl_parity.evidence import with_untold
from rl_parity.jsonfile import lines, parse, read_text
from rl_parity.manifest import check_manifest, weight_algorithm
from rl_parity.models import spec_of
from rl_parity.rundir import MANIFEST, RunDirectory, ends_run, write_text
from rl_parity.state import Saved


@dataclass
class Point:
    """Where one arm goes on: its saved state and its records so far; ``dropped`` are steps done after the state."""

    saved: Saved | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step(self) -> int:
        return 0 if self.saved is None else self.saved.step


def config_of(directory: RunDirectory, given: Mapping[str, Any]) -> RunConfig:
    """The run's own configuration with what ``given`` may change, and with the native operators that it began with.

    Args:
        given: options of the resuming command, by field of ``RunConfig``.

    Raises:
        ContractError: the directory holds no such run, or an option says something else than the run; all are named.
    """
    manifest = directory.manifest()
    check_manifest(directory.root / MANIFEST, manifest)
    bound.check_format(directory, manifest)
    own = RunConfig.from_dict({**manifest["config"], "out": str(directory.root)})
    problems = [f"its config: {problem}" for problem in preflight_options.options(own)]
    operators, named = _operators(directory, own, given)
    problems += [
        f"--{name.replace('_', '-')} {_shown(value)} differs from the run's {_shown(getattr(own, name))}"
        + (named if name == "native_operators" else "")
        for name, value in given.items()
        if name not in (*CHANGEABLE, "out") and value != getattr(own, name)
        if not (name == "native_operators" and value == operators)
    ]
    if "out" in given and Path(given["out"]).resolve() != directory.root.resolve():
        problems.append(f"--out {given['out']} is another directory than --resume {directory.root}")
    if manifest["status"] == "mismatch":
        problems.append("the run ended with a mismatch; there is nothing to go on from")
    changes = {name: value for name, value in given.items() if name in CHANGEABLE}
    if "steps" not in changes:
        problems.append("--steps is missing; say how many steps the whole run shall have")
    if problems:
        changeable = ", ".join(f"--{name.replace('_', '-')}" for name in CHANGEABLE)
        raise ContractError(
            f"--resume {directory.root}: {'; '.join(problems)}; a run goes on as it began, only {changeable} may change"
        )
    values = {f.name: getattr(own, f.name) for f in fields(RunConfig)}
    return RunConfig(**{**values, **changes, "native_operators": operators})


def _operators(directory: RunDirectory, own: RunConfig, given: Mapping[str, Any]) -> tuple[str, str]:
    """What the native trainer goes on with, and what to add where another one is asked for."""
    if own.native_operators != "auto" or "native" not in own.arms:
        return own.native_operators, ""
    began = native.began(directory)
    asked: str = given.get("native_operators", "auto")
    if asked != "auto" and not began.certain:
        # nothing here knows it better
        return asked, ""
    saved = state.latest(directory.root / "native" / "state")
    if asked == "auto" and saved is not None and saved.step >= given.get("steps", 0):
        # no trainer of this arm will start
        return "auto", ""
    named = f", which its native trainer took for {began.operators}: {began.name}"
    return began.operators or "auto", named if began.certain else ""


def _shown(value: Any) -> str:
    return repr(value) if value in ("", None) else str(value)


def points(directory: RunDirectory, config: RunConfig) -> dict[str, Point]:
    """Where each arm of the run goes on.

    Raises:
        ContractError: an arm has steps and no saved state where one was due, or none was ever to be saved; its files
            contradict each other; or more steps are done than are asked for.
    """
    manifest = directory.manifest()
    run_id, every = manifest["run_id"], sittings.save_every(manifest)
    found: dict[str, Point] = {}
    problems = []
    for arm in config.arms:
        records = directory.steps(arm, torn=True)
        saved = state.latest(directory.root / arm / "state")
        if saved is None:
            # one that broke off before its first state was there, or while it was saved, begins anew
            if records and (len(records) > every or manifest["status"] == "finished"):
                remedy = f"restore {directory.root / arm / 'state'}" if every else "save with --save-every"
                problems.append(f"{arm} arm: {len(records)} steps and no saved state; {remedy}")
            found[arm] = Point(dropped=records)
            continue
        done = [record for record in records if record["step"] < saved.step]
        if saved.run_id != run_id or [r["step"] for r in done] != list(range(saved.step)):
            problems.append(
                f"{arm} arm: the state is of {saved.run_id}, step {saved.step}; the records in "
                f"{directory.root / arm / 'steps.jsonl'} are not"
            )
        if saved.step > config.steps:
            problems.append(f"{arm} arm: {saved.step} steps are done, --steps {config.steps} asks for fewer")
        found[arm] = Point(saved=saved, records=done, dropped=records[len(done) :])
    if problems:
        raise ContractError(f"--resume {directory.root}: {'; '.join(problems)}")
    return found


def check(directory: RunDirectory, config: RunConfig, found: Mapping[str, Point]) -> None:
    """Read every file that the sitting goes on from, before it starts anything.

    Raises:
        ContractError: one is missing, damaged, or contradicts another; it is named, and nothing was changed.
    """
    manifest = directory.manifest()
    _writable(directory.root)
    inputs.check(directory, config, manifest)
    records = {arm: [*point.records, *point.dropped] for arm, point in found.items()}
    for arm, mine in records.items():
        bound.check_figures(directory, arm, mine)
    bound.check_status(directory, manifest, records)
    if ended := [arm for arm, mine in records.items() if any(ends_run(arm, record) for record in mine)]:
        raise ContractError(f"--resume {directory.root}: the {ended[0]} arm ended with a mismatch; start the run again")
    for arm, mine in records.items():
        if not mine:
            verify.none_lost(directory, arm, manifest)
        if (what := unrecorded.failed(directory, arm, mine)) is not None:
            raise ContractError(f"--resume {directory.root}: {what}; start the run again")
    for arm, point in found.items():
        if point.saved is None:
            if point.dropped:
                _first_weights(directory, config, manifest, point.dropped[0]["weight_digest"])
            continue
        verify.arm_files(directory, arm, manifest, [*point.records, *point.dropped])
        verify.samples(directory, arm, point.records)
        verify.summed(directory.root / arm / "steps.jsonl", point.records, {})
        path = directory.root / arm / "ledger.jsonl"
        _weights(directory, arm, path, point)
        verify.ledger_text(directory, arm, manifest)
        kept = "".join(_kept(path, point.step))
        verify.ledger(directory, arm, manifest, kept, point.records, deep=True)
        _first_weights(directory, config, manifest, point.records[0]["weight_digest"])
        _state(point.saved, config)
        if point.step == config.steps:
            _bears_out(directory, arm, manifest, point)
    bound.check_files(directory, manifest)


def _first_weights(directory: RunDirectory, config: RunConfig, manifest: Mapping[str, Any], digest: str) -> None:
    """Raise where the model is not the one that an arm began with."""
    verify.built_in_model(directory, manifest, digest)
    if spec_of(config.model) is None:
        verify.weights(Path(config.model), digest, weight_algorithm(directory.root / MANIFEST, manifest))


def _weights(directory: RunDirectory, arm: str, path: Path, point: Point) -> None:
    """Raise where anything says that the run had other weights at the state's step than the state's description."""
    assert point.saved is not None
    said: list[tuple[Path, Any]] = []
    text = read_text(path)
    for _, event in lines(path, text[: text.rfind("\n") + 1]):
        if event.get("event") in ("version", "resume") and event.get("step") == point.step:
            said.append((path, event.get("digest")))
    for sitting in sittings.entries(directory.evidence(arm)):
        saves = sitting.get("saves") or []
        said += [(directory.root / arm / "evidence.json", s["digest"]) for s in saves if s["step"] == point.step]
    said += [(path.with_name("steps.jsonl"), r.get("weight_digest")) for r in point.dropped if r["step"] == point.step]
    for where, digest in said:
        if digest != point.saved.digest:
            said_there, saved = apart(digest, point.saved.digest)
            raise ContractError(
                f"{where} has weights {said_there} at step {point.step}, "
                f"{point.saved.folder / state.DESCRIPTION} {saved}; restore the file, "
                "or resume from another copy of the run directory"
            )


def _bears_out(directory: RunDirectory, arm: str, manifest: Mapping[str, Any], point: Point) -> None:
    """Raise where an arm has nothing left to do, and would finish with evidence that contradicts its steps, or a strict
    one with none.

    Sittings that were killed are told of when this one, which does no step of the arm, ends.
    """
    held = directory.evidence(arm)
    if arm == "strict" and not any(entry.get("train") or entry.get("rollout") for entry in sittings.entries(held)):
        raise ContractError(
            f"--resume {directory.root}: all {point.step} steps of the strict arm are done, and no sitting of it lived "
            "to tell what launched them; ask for more --steps, whose workers will be asked"
        )
    sitting = {"from_step": {arm: point.step}}
    finished = {**manifest, "status": "finished", "sittings": [*(manifest.get("sittings") or [{}]), sitting]}
    try:
        whole = with_untold(held, finished, arm, len(point.records))
        bound.check_evidence(directory, arm, finished, point.records, whole)
    except ContractError as error:
        raise ContractError(
            f"--resume {directory.root}: all {point.step} steps of the {arm} arm are done, and its evidence does not "
            f"fit them ({error}); resume from another copy of the run directory, or start the run again"
        ) from error


def _state(saved: Saved, config: RunConfig) -> None:
    if len(saved.ranks) != config.train.world_size:
        raise ContractError(
            f"{saved.folder / state.DESCRIPTION} names {len(saved.ranks)} ranks, --train {config.train} has "
            f"{config.train.world_size}; restore the file"
        )
    size = sum(path.stat().st_size for path in saved.folder.iterdir())
    if size > verify.SLOW_BYTES:
        print(f"rl-parity: reading {saved.folder} ({size / 2**30:.1f} GiB)", file=sys.stderr)
    for rank, digest in enumerate(saved.ranks):
        state.read_rank(saved.folder, rank, digest)


def _writable(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if (path.is_dir() or path.suffix in (".log", ".jsonl", ".html")) and not os.access(path, os.W_OK):
            raise ContractError(f"{path} cannot be written; make it writable, or resume a copy of the run directory")


def take_back(directory: RunDirectory, found: Mapping[str, Point]) -> None:
    """Take back, in every arm, what was done after its saved state and will be done again: records, samples, ledger
    lines. Whichever arm the sitting ends in, the files of all then agree. An arm that saved no state begins anew.

    Samples go while the ledger still says that their steps were consumed: ``rl_parity.unrecorded`` reads both.
    """
    directory.remove_torn()
    for arm, point in found.items():
        root = directory.root / arm
        if point.saved is None:
            directory.remove_arm(arm)
            continue
        write_text(root / "steps.jsonl", "".join(json.dumps(record) + "\n" for record in point.records), sync=True)
        for step in directory.sample_steps(arm):
            if step >= point.step:
                directory.samples_path(arm, step).unlink()
        ledger = root / "ledger.jsonl"
        write_text(ledger, "".join(_kept(ledger, point.step)), sync=True)


def _kept(path: Path, step: int) -> list[str]:
    """Ledger lines up to the one with which ``step - 1`` consumed its samples."""
    all_lines = read_text(path).splitlines(keepends=True)
    for number, line in enumerate(all_lines):
        # the last line may be cut off, and comes after
        if line.startswith('{"event":"step"') and parse(path, line, number + 1).get("step") == step - 1:
            # what the step was recorded as follows it
            after = all_lines[number + 1 : number + 2]
            return all_lines[: number + 1 + (bool(after) and after[0].startswith('{"event":"record"'))]
    raise ContractError(f"{path} does not hold step {step - 1}; restore it, or start the run again")
