"""Whole steps at equal tokens, strict beside native, by phase; read from run directories, so it needs no GPU itself.

    tools/bench step --runs DIR [DIR] --json docs/results/h200/step.json

One directory with both arms (``rl-parity run --arm both``), or two with one arm each of the same configuration. Medians
over steps; the first step of each sitting, which warms everything up, is left out. A phase's time is that of the
slowest process, as the driver sees it. Steps are compared by number; those that sampled other numbers of tokens in the
two arms are left out and counted, and may not be more than half. The page names every native trainer whose steps the
run holds, as its sittings reported it; of a sitting that did not it says "native (not reported)".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rl_contract import ContractError
from rl_parity import doubts, verify
from rl_parity.config import RunConfig
from rl_parity.native import names
from rl_parity.report_run import PHASES
from rl_parity.rundir import RunDirectory

# settings that two runs of one arm each must share
_SAME = (
    *("model", "device", "train", "rollout", "prompts", "batch", "group", "max_new_tokens", "max_model_len", "seed"),
    *("eager", "attention", "token_budget", "weights", "sleep"),
)
ARMS = ("strict", "native")
# proofs are made at the first and last step only; saving is in no step
_RARE = {"prove"}


def from_runs(paths: Sequence[Path], commit: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float]]:
    """(meta, rows, summary) as ``tools/bench`` writes them.

    Raises:
        ContractError: an arm is missing or there twice, the runs differ in more than the arm, or most steps in tokens;
            or the files of a run do not bear each other out.
    """
    runs = [RunDirectory(path) for path in paths]
    manifests = [run.manifest() for run in runs]
    doubted = [line for run in runs for line in _borne_out(run)]
    defaults = RunConfig().to_dict()
    for name in _SAME:
        # an older run lacks settings, which then had their defaults
        values = [{**defaults, **manifest["config"]}[name] for manifest in manifests]
        if any(value != values[0] for value in values):
            raise ContractError(f"the runs differ in {name}: {values}; compare runs of one configuration")
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run, manifest in zip(runs, manifests):
        for arm in run.arms():
            if arm in found:
                raise ContractError(f"{run.root}: a second {arm} arm; give each arm once")
            found[arm] = _settled(arm, manifest, run.steps(arm))
    if missing := [arm for arm in ARMS if not found.get(arm)]:
        raise ContractError(f"{[str(p) for p in paths]}: no settled steps of {missing}; give runs of both arms")
    steps = sorted(found["strict"].keys() & found["native"].keys())
    uneven = [n for n in steps if found["strict"][n]["tokens"] != found["native"][n]["tokens"]]
    if 2 * len(uneven) > len(steps) or not steps:
        raise ContractError(
            f"{len(uneven)} of {len(steps)} steps sampled other numbers of tokens (first: {uneven[:1]}); compare steps "
            "of equal tokens, e.g. of a random model, which seldom stops by itself"
        )
    strict, native = ([found[arm][n] for n in steps if n not in uneven] for arm in ARMS)
    spent = {phase for step in strict + native for phase, seconds in step["seconds"].items() if seconds}
    rows = [_row(phase, strict, native) for phase in PHASES if phase in spent - _RARE]
    rows.append(_row("whole step", strict, native))
    if not rows[-1]["strict_us"] or not rows[-1]["peer_us"]:
        raise ContractError(f"{[str(p) for p in paths]}: steps that took no time; give runs as rl-parity wrote them")
    # of every sitting: steps of all are in the medians
    ran = ", then ".join(name for run in runs if "native" in run.arms() for name in names(run))
    about = _meta(manifests[0], commit, len(strict), len(uneven), ran)
    about["notes"] += doubted
    return about, rows, _summary(rows, strict, native)


def _borne_out(run: RunDirectory) -> list[str]:
    """How the run ended, unless it finished, and what nothing bears out.

    Raises:
        ContractError: its files contradict each other, or a record is not the one that the ledger has the digest of.
    """
    found, manifest = verify.whole(run, model=False), run.manifest()
    for arm in run.arms():
        records = run.recorded(arm, manifest)
        text = verify.ledger_text(run, arm, manifest)
        known = {record["step"] for record in records} - set(found["unproven"].get(arm, ()))
        # times stand in records alone, so samples need not be read
        verify.ledger(run, arm, manifest, text, records, deep=True, absent=known)
    status = manifest["status"]
    ended = [] if status == "finished" else [f"status {status}: {manifest.get('reason') or 'no reason recorded'}"]
    return [f"{run.root.name}: {line}" for line in (*ended, *doubts.lines(found))]


def _settled(arm: str, manifest: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    first = {0} | {(sitting.get("from_step") or {}).get(arm, 0) for sitting in manifest.get("sittings") or []}
    return {step["step"]: step for step in steps if step["step"] not in first}


def _seconds(step: Mapping[str, Any], phase: str) -> float:
    spent = step["seconds"]
    return sum(s for p, s in spent.items() if p not in _RARE) if phase == "whole step" else float(spent.get(phase, 0.0))


def _row(phase: str, strict: Sequence[Mapping[str, Any]], native: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine, theirs = (median(_seconds(s, phase) for s in steps) for steps in (strict, native))
    return {
        "case": phase,
        "shape": [int(median(s["tokens"] for s in strict))],
        "peer": "native",
        "strict_us": round(1e6 * mine, 1),
        "peer_us": round(1e6 * theirs, 1),
        "ratio": round(theirs / mine, 3) if mine else 1.0,
    }


def _meta(manifest: Mapping[str, Any], commit: str, steps: int, uneven: int, trainer: str) -> dict[str, Any]:
    gpus, versions, c = manifest.get("gpus") or [], manifest.get("versions") or {}, manifest["config"]
    names = [gpu["name"] for gpu in gpus]
    return {
        "method": "Seconds of whole steps as rl-parity's driver measured them; native trains with Megatron-core, "
        f"{trainer}",
        "gpu": ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
        or (manifest.get("hardware") or {}).get("processor", "-"),
        "driver": ", ".join(sorted({gpu["driver"] for gpu in gpus})) or "-",
        "torch": versions.get("torch"),
        "triton": versions.get("triton") or "-",
        "vllm": versions.get("vllm"),
        "megatron-core": versions.get("megatron-core"),
        "commit": commit,
        "date": str(manifest.get("started", ""))[:10],
        "notes": [
            f"{c['model']}, {c['batch']} prompts ({c['prompts']}) of {c['group']} samples, {c['max_new_tokens']} new "
            f"tokens, train {c['train']}, rollout {c['rollout']}, placement "
            f"{(manifest.get('placement') or {}).get('kind', 'cpu')}, {steps} steps at equal tokens, {uneven} of other "
            "numbers of tokens left out. Times are medians over steps."
        ],
    }


def _summary(
    rows: Sequence[Mapping[str, Any]], strict: Sequence[Mapping[str, Any]], native: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    by_case = {row["case"]: row for row in rows}
    whole = by_case["whole step"]
    out = {
        "whole step at equal tokens, strict / native (target <= 1.04)": round(whole["strict_us"] / whole["peer_us"], 3),
        "steps compared": len(strict),
        "seconds a strict step": round(whole["strict_us"] / 1e6, 3),
        "seconds a native step": round(whole["peer_us"] / 1e6, 3),
    }
    for arm, steps in zip(ARMS, (strict, native)):
        if spent := [(s["tokens"], s["seconds"]["rollout"]) for s in steps if s["seconds"].get("rollout")]:
            out[f"sampled tokens/s in rollouts, {arm}"] = round(median(n / seconds for n, seconds in spent))
    return out


def table(payload: Mapping[str, Any]) -> str:
    """The page of ``tools/results``: a line a phase, and what the targets say."""
    meta = payload["meta"]
    lines = [
        f"# {payload['name']}", "", f"![{payload['name']}]({payload['name']}.png)", "",
        f"{meta['gpu']}, driver {meta['driver']}, PyTorch {meta['torch']}, Triton {meta['triton']}, "
        f"vLLM {meta['vllm']}, megatron-core {meta['megatron-core']}, "
        f"commit {meta['commit']}, {meta['date']}. {meta['method']}.",
        *(f"\n{note}" for note in meta["notes"]), "", "| target | measured |", "|---|---|",
        *(f"| {target} | {value} |" for target, value in payload["summary"].items()), "",
        "| phase | strict, s | native, s | native / strict |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in payload["rows"]:
        lines.append(
            f"| {row['case']} | {row['strict_us'] / 1e6:.3f} | {row['peer_us'] / 1e6:.3f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"
