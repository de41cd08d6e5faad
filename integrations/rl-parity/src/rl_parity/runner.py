"""A whole run: preflight, manifest, the arms one after the other, summary and report."""

import os
import platform
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rl_contract import Profile
from rl_parity import checkpoint, metrics, preflight
from rl_parity.config import RunConfig
from rl_parity.launch import WorkerFailure
from rl_parity.launch.processes import marked
from rl_parity.launch.signals import shield
from rl_parity.loop import Arm, MismatchFound, load_prompts
from rl_parity.models import TINY, write_model
from rl_parity.report import write_report
from rl_parity.rundir import SUMMARY, RunDirectory, summarize, write_json
from rl_parity.status import EQUAL, FAILURE, INTERRUPTED, MISMATCH, USAGE
from vime_sync import PublishError


def run(config: RunConfig, command: Sequence[str] = ()) -> int:
    """Do the run and return its exit status.

    0 strict arm exactly equal, 1 a mismatch, 2 a violated precondition, 3 an engine or sync failure, 130 interrupted.
    The run directory is readable whatever happens after the preflight.
    """
    violations = preflight.check(config)
    if violations:
        print(preflight.Preflight(violations), file=sys.stderr)
        return USAGE
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    directory = RunDirectory(config.out)
    directory.root.mkdir(parents=True, exist_ok=True)
    with marked(run_id):
        return _run(config, run_id, directory, command)


def _run(config: RunConfig, run_id: str, directory: RunDirectory, command: Sequence[str]) -> int:
    model_config = preflight.model_config(config)
    profile = preflight.profile(config, model_config)
    manifest = _manifest(config, run_id, profile, command)
    status, reason, code = "failed", "", FAILURE
    summary: dict[str, Any] = {"arms": {}}
    try:
        with shield():
            directory.write_manifest(manifest)
        model = Path(config.model).resolve()
        if config.model in TINY:
            model = write_model(config.model, directory.root / "model", seed=config.seed)
        longest = preflight.context(config, model_config)
        tokenizer, prompts = load_prompts(config, model, checkpoint.read_config(model), longest)
        for name in config.arms:
            arm = Arm(name, config, run_id, directory, model, model_config, profile, prompts, tokenizer, longest)
            started = time.monotonic()
            try:
                arm.run()
            finally:
                if arm.records:
                    summary["arms"][name] = {
                        **summarize(arm.records, round(time.monotonic() - started, 2)),
                        "plant": config.plant if name == "strict" else None,
                    }
                    write_json(directory.root / SUMMARY, summary)
        status, reason, code = "finished", "", EQUAL
    except MismatchFound as error:
        status, reason, code = "mismatch", str(error), MISMATCH
    except (WorkerFailure, PublishError) as error:
        status, reason, code = "failed", str(error), FAILURE
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


def _finish(directory: RunDirectory, summary: dict[str, Any], status: str, reason: str) -> None:
    write_json(directory.root / SUMMARY, {**summary, "status": status})
    manifest = directory.manifest()
    notes = [*manifest["notes"], *_native_notes(directory)]
    directory.write_manifest(
        {**manifest, "notes": notes, "status": status, "reason": reason or None, "finished": _now()}
    )
    write_report(directory)


def _native_notes(directory: RunDirectory) -> list[str]:
    """What the native arm could not run of the engines' own operators, as its trainer ranks reported."""
    reports = directory.evidence("native").get("reports", {})
    found = [s for report in reports.values() for s in report.get("substitutions", [])]
    return list(dict.fromkeys(f"native arm runs {s['used']} instead of {s['stock']}: {s['why']}" for s in found))


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


def _manifest(config: RunConfig, run_id: str, profile: Profile, command: Sequence[str]) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "status": "running",
        "reason": None,
        "started": _now(),
        "command": list(command) or [shlex.join(sys.argv)],
        "config": config.to_dict(),
        "seeds": {"run": config.seed, "sampling": "sha256(run seed, step, prompt place, sample), first 31 bits"},
        "sampling": metrics.semantics(config).to_dict(),
        "topology": {
            "train": {"tp": config.train.tp, "cp": config.train.cp, "ranks": config.train.world_size},
            "rollout": {
                "tp": config.rollout.tp,
                "engines": config.rollout.engines,
                "workers": config.rollout.world_size,
            },
            "launcher": config.launcher,
        },
        "profile": profile.to_dict(),
        "fingerprints": {
            "profile": profile.fingerprint,
            **{name: contract.fingerprint for name, contract in sorted(profile.contracts.items())},
        },
        "plant": config.plant,
        "versions": {"python": platform.python_version(), **preflight.versions()},
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / preflight.GIB, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "notes": [],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
