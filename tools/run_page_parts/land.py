"""What of a run's directory goes into the repository: everything small, and the samples of the first and last step."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from rl_contract import ContractError
from rl_parity import verify
from rl_parity.landed import LANDED
from rl_parity.rundir import MANIFEST, SUMMARY, RunDirectory, write_json

ARM_FILES = ("steps.jsonl", "ledger.jsonl", "evidence.json", "sync.json")
PATHS = re.compile(r"(?<![\w/.:])/(?:home|root|tmp|work|mnt|data|scratch|workspace|opt|var)/[\w./-]+")


def land(run: RunDirectory, totals: dict[str, Any], out: Path, commit: str) -> None:
    """Copy ``run``, which ``totals`` were read from, to ``out``, and prove that the copy can be read.

    A copy from an earlier call is replaced.

    Raises:
        ContractError: ``out`` is something else, or the copy does not bear itself out.
    """
    if out.exists() and not (out.is_dir() and ((out / LANDED).is_file() or not any(out.iterdir()))):
        raise ContractError(f"{out} is there and was not written by this tool; name another place or remove it")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        left_out = {arm: copy_arm(run, arm, part) for arm in totals["arms"]}
        write_json(part / MANIFEST, without_paths(run.manifest(), out.name))
        if (run.root / SUMMARY).is_file():
            shutil.copyfile(run.root / SUMMARY, part / SUMMARY)
        held = {"run_id": run.manifest()["run_id"], "commit": commit, "left_out": left_out}
        # a run with all its samples lists none
        write_json(part / LANDED, held)
        again = verify.totals(RunDirectory(part))
        if json.dumps(again["arms"]) != json.dumps(totals["arms"]):
            raise ContractError(f"{part} gives other totals than {run.root}; this is a fault of tools/run_page")
        if out.exists():
            shutil.rmtree(out)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def copy_arm(run: RunDirectory, arm: str, to: Path) -> list[int]:
    """Copy an arm's files, its samples of the first and last step; returns the steps without samples there."""
    (to / arm / "samples").mkdir(parents=True)
    for name in ARM_FILES:
        if (run.root / arm / name).is_file():
            shutil.copyfile(run.root / arm / name, to / arm / name)
    steps = [record["step"] for record in run.steps(arm)]
    kept = {steps[0], steps[-1]} & set(run.sample_steps(arm))
    for step in kept:
        path = run.samples_path(arm, step)
        shutil.copyfile(path, to / arm / "samples" / path.name)
    return [step for step in steps if step not in kept]


def without_paths(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest with the program and ``--out`` by name alone, which neither its digest nor its checks look at."""
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    for part in (found, *(s for s in found.get("sittings") or [] if isinstance(s, dict))):
        command = part.get("command")
        if isinstance(command, list) and len(command) == 1 and isinstance(command[0], str):
            words = shlex.split(command[0])
            words[0] = Path(words[0]).name
            for i, word in enumerate(words):
                if word == "--out" and i + 1 < len(words):
                    words[i + 1] = name
                elif word.startswith("--out="):
                    words[i] = f"--out={name}"
            part["command"] = [shlex.join(words)]
        if isinstance(part.get("config"), dict) and "out" in part["config"]:
            part["config"]["out"] = name
    return found


def paths_in(folder: Path) -> dict[str, list[str]]:
    """File -> what looks like a path of the machine that the run was made on."""
    found = {}
    for path in sorted(folder.rglob("*.json*")):
        if names := sorted(set(PATHS.findall(path.read_text(encoding="utf-8")))):
            found[str(path.relative_to(folder))] = names
    return found


def commit_of(root: Path) -> str | None:
    """The commit that a landed copy was made by."""
    path = root / LANDED
    return json.loads(path.read_text()).get("commit") if path.is_file() else None


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
