"""``rl-parity run`` over two GPUs: layouts crossed, native beside the first, and every run with the bits of the first.

All runs have one seed and one tree (leaves=2), so beside ``0 mismatches`` inside each, ``rl-parity compare`` must find
the strict ones equal to one another: samples, log-probabilities, losses and gradient norms.
"""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from two_gpu_parts.processes import Job, run_lanes

# letter -> (name, arm, --train, --rollout)
RUNS = {
    "a": ("TP2/CP1 -> TP2", "strict", "tp=2,cp=1", "tp=2,engines=1"),
    "n": ("native TP2/CP1 -> TP2", "native", "tp=2,cp=1", "tp=2,engines=1"),
    "b": ("TP1/CP2 -> TP1 x 2 engines", "strict", "tp=1,cp=2", "tp=1,engines=2"),
    "c": ("TP2/CP1 -> TP1", "strict", "tp=2,cp=1", "tp=1,engines=1"),
    "d": ("TP1/CP1 -> TP2", "strict", "tp=1,cp=1", "tp=2,engines=1"),
}
# all beside one another: most of a run's time is its start, when it also looks at what memory is free
LANES = ("a", "n", "b", "c", "d")
FIGURES = ("valid_count", "mismatch_count", "nonfinite_count", "absent_count", "max_abs_diff", "k3_rollout_train")
PROGRAM = (sys.executable, "-W", "ignore", "-m", "rl_parity.cli")
GPU = "--device cuda --placement colocated --gpu-memory-utilization 0.12 --timeout 140"
OPTIONS = (
    "--launcher local --leaves 2 --prompts random:64-1400 --max-model-len 2048 --batch 8 --group 4 --max-new-tokens 16 "
    "--lr 1e-5 --eager"
)


def chosen(layouts: str) -> list[str]:
    """The letters in ``layouts``, "a,b" or "ab"; all where it is empty.

    Raises:
        ValueError: a letter of no run, or none.
    """
    letters = list(layouts.replace(",", "")) if layouts else list(LANES)
    if not letters or not set(letters) <= RUNS.keys():
        raise ValueError(f"{layouts!r} must be letters of {','.join(RUNS)}")
    return letters


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    wanted = chosen(settings.get("layouts", ""))
    root = Path(settings.get("keep") or folder) / "parity"
    root.mkdir(parents=True, exist_ok=True)
    options = [*settings.get("options", f"{GPU} {OPTIONS}").split(), "--model", settings["model"]]
    program = settings.get("program", PROGRAM)

    def job(letter: str) -> Job:
        _, arm, train, rollout = RUNS[letter]
        command = [*program, "run", *options, "--arm", arm, "--train", train, "--rollout", rollout]
        command += ["--steps", str(settings["steps"]), "--out", str(root / letter)]
        # SIGINT, as from a keyboard: the run closes its workers and leaves a directory that can be read
        return Job(
            name=letter, command=command, log=root / f"{letter}.log", limit=1e9, stop=signal.SIGINT, grace=12.0
        )  # fmt: skip

    errors: list[str] = []
    equal: list[str] = []
    lanes = [[job(x) for x in lane if x in wanted] for lane in LANES]
    for done, status in run_lanes(lanes, settings["end"] - 12):
        name, arm, *_ = RUNS[done.name]
        found = figures(root / done.name / arm, root / done.name / "summary.json", arm)
        found["status"] = status
        problems = judge(arm, found, settings["steps"])
        if problems:
            errors.append(f"{name}: {'; '.join(problems)}")
            found["log"] = done.tail()
        elif arm == "strict":
            equal.append(done.name)
        yield {name: found, "errors": errors}
    first, *others = sorted(equal) or [""]
    comparisons = [
        Job(
            name=x, command=[*program, "compare", str(root / first), str(root / x)], log=root / f"{first}{x}.log",
            limit=30.0,
        )
        for x in others
    ]  # fmt: skip
    same = {}
    for done, status in run_lanes([[j] for j in comparisons], settings["end"] + 4):
        same[RUNS[done.name][0]] = "equal bit for bit" if status == 0 else done.tail(600)
        if status is not None and status != 0:
            errors.append(f"{RUNS[done.name][0]} differs from {RUNS[first][0]}")
        yield {f"compared with {RUNS[first][0]}": same, "errors": errors}


def figures(arm_folder: Path, summary: Path, name: str) -> dict[str, Any]:
    """What the run counted: from its summary, or, of one that was cut off, the steps it has written."""
    if summary.exists():
        whole = json.loads(summary.read_text())["arms"].get(name, {})
        return {"steps": whole.get("steps", 0), **{k: whole[k] for k in FIGURES if k in whole}}
    lines = arm_folder / "steps.jsonl"
    steps = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError:
            break
    found: dict[str, Any] = {"steps": len(steps), "cut off": True}
    for key in ("valid_count", "mismatch_count"):
        found[key] = sum(int(step.get(key, 0)) for step in steps)
    return found


def judge(arm: str, found: dict[str, Any], steps: int) -> list[str]:
    """What keeps a run from being the proof that it is meant to be."""
    problems = [] if found["status"] == 0 else [f"status {found['status']}"]
    if found["steps"] != steps:
        problems.append(f"{found['steps']} of {steps} steps")
    if not found.get("valid_count"):
        problems.append("nothing was compared")
    if arm == "strict" and found.get("mismatch_count") != 0:
        problems.append(f"{found.get('mismatch_count')} mismatches")
    return problems
