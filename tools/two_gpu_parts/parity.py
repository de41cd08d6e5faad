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
# where ranks share a GPU, and native's own reductions do not
LANES_IN_TURNS = ("ac", "db")
# how a comparison is called, and what it says where there is nothing to tell
COMPARED, EQUAL = "compared with ", "equal bit for bit"
# letters of the layouts that a call was asked for -> why it did not come to its end
FAILED = "calls that did not end"
FIGURES = ("valid_count", "mismatch_count", "nonfinite_count", "absent_count", "max_abs_diff", "k3_rollout_train")
PROGRAM = (sys.executable, "-W", "ignore", "-m", "rl_parity.cli")
GPU = "--device cuda --placement colocated --gpu-memory-utilization 0.12 --timeout 140"
GPU_IN_TURNS = GPU.replace("0.12", "0.08").replace("140", "400")
OPTIONS = (
    "--launcher local --leaves 2 --prompts random:64-1400 --max-model-len 2048 --batch 8 --group 4 --max-new-tokens 16 "
    "--lr 1e-5 --eager"
)


def chosen(layouts: str, one_gpu: bool = False) -> list[str]:
    """The letters in ``layouts``, "a,b" or "ab"; all where it is empty, or all that can share a GPU.

    Raises:
        ValueError: a letter of no run, or none.
    """
    known = [letter for letter in RUNS if not one_gpu or letter in "".join(LANES_IN_TURNS)]
    letters = list(layouts.replace(",", "")) if layouts else known
    if not letters or not set(letters) <= {*known}:
        raise ValueError(f"{layouts!r} must be letters of {','.join(known)}")
    return letters


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    one_gpu = settings.get("one_gpu", False)
    wanted = chosen(settings.get("layouts", ""), one_gpu)
    root = Path(settings.get("keep") or folder) / "parity"
    root.mkdir(parents=True, exist_ok=True)
    options = [
        *settings.get("options", f"{GPU_IN_TURNS if one_gpu else GPU} {OPTIONS}").split(),
        "--model",
        settings["model"],
    ]
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
    lanes = [[job(x) for x in lane if x in wanted] for lane in (LANES_IN_TURNS if one_gpu else LANES)]
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
        name = RUNS[done.name][0]
        same[name] = EQUAL if status == 0 else done.tail(600)
        if status not in (0, 1):
            same[name] = f"not compared ({_how(status)}) {same[name]}".strip()
        if status != 0:
            # status 1 where bits differ, others where nothing was compared
            how = "differs from" if status == 1 else f"was not compared ({_how(status)}) with"
            errors.append(f"{name} {how} {RUNS[first][0]}")
        yield {f"{COMPARED}{RUNS[first][0]}": same, "errors": errors}


def _how(status: int | None) -> str:
    return "late" if status is None else f"status {status}"


def merged(before: dict[str, Any], answer: dict[str, Any], letters: str, stamp: dict[str, Any]) -> dict[str, Any]:
    """What the file shall say of this part, of which each call may run some of the layouts: each answers for itself.

    A layout that this call was not asked for keeps what an earlier one found, with its errors and comparisons; ``ok``
    is that of all. A call that did not come to its end stands under ``FAILED`` until its layouts are run again.

    Args:
        before: of the file, as earlier calls left it.
        answer: of this call so far.
        letters: that this call was asked for.
        stamp: commit, date and model, which each of its layouts gets.
    """
    asked = {RUNS[letter][0]: letter for letter in chosen(letters)}
    letter_of = {run[0]: letter for letter, run in RUNS.items()}
    # also what another version called otherwise
    kept = {
        name: letter_of.get(name, "")
        for name, found in before.items()
        if isinstance(found, dict) and name not in asked and not name.startswith((COMPARED, FAILED, "stages"))
    }
    # of older files, in which the part alone has a commit
    old = {key: before[key] for key in stamp if key in before}
    out: dict[str, Any] = {name: {**old, **before[name]} for name in kept}
    told = [e for e in before.get("errors") or [] if any(_is_of(e, name) for name in kept)]
    errors = [e for e in told if not any(_is_of(e, name) for name in asked)]
    for name in (kept.keys() & letter_of.keys()) - {name for name in kept for e in told if e.startswith(f"{name}: ")}:
        # earlier versions let the last call speak for all
        found = {"status": 0, "steps": 0, **before[name]}
        if problems := judge(RUNS[letter_of[name]][1], found, found["steps"]):
            errors.append(f"{name}: {'; '.join(problems)}")
    failed = {"".join(x for x in some if x not in asked.values()): why for some, why in before.get(FAILED, {}).items()}
    failed.pop("", None)
    if kept and FAILED not in before and not before.get("ok") and (_trouble(before) or not before.get("errors")):
        failed["".join(kept.values()) or "?"] = _trouble(before) or "did not end"
    for key, same in before.items():
        if key.startswith(COMPARED) and key.removeprefix(COMPARED) in kept:
            left = {name: how for name, how in same.items() if name in kept}
            out |= {key: left} if left else {}
    for key, value in answer.items():
        if key.startswith(COMPARED):
            out[key] = {**out.get(key, {}), **value}
        elif key not in ("ok", "errors"):
            out[key] = {**value, **stamp} if key in asked else value
    errors += answer.get("errors") or []
    if not answer.get("ok") and (_trouble(answer) or not answer.get("errors") or asked.keys() - answer.keys()):
        failed["".join(asked.values())] = _trouble(answer) or "has not ended"
    out |= {FAILED: failed} if failed else {}
    return {"ok": bool(answer.get("ok")) and not errors and not failed, "errors": errors, **out}


def _is_of(error: str, name: str) -> bool:
    """Whether an entry of ``errors`` is of the layout called ``name``, alone or as one of two."""
    return error.startswith((f"{name}: ", f"{name} ")) or error.endswith(f" {name}")


def _trouble(answer: dict[str, Any]) -> str:
    """Why a call of this part did not come to its end."""
    lines = str(answer.get("error") or "").strip().splitlines()
    return str(answer.get("late") or "") or (lines[-1] if lines else "")


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
    problems = [] if found["status"] == 0 else [_how(found["status"])]
    if found["steps"] != steps:
        problems.append(f"{found['steps']} of {steps} steps")
    if not found.get("valid_count"):
        problems.append("nothing was compared")
    if arm == "strict" and found.get("mismatch_count") != 0:
        problems.append(f"{found.get('mismatch_count')} mismatches")
    return problems
