"""vLLM with the strict operators beside vLLM at its best and beside its own batch-invariant mode: tokens a second.

    tools/bench engine --json FILE [--layers 8 36] [--gpus 0 1] [--engines strict native] [--logs DIR]

Qwen3-8B's dimensions, dummy weights. Strict and the first peer of one model start side by side on one GPU and are then
measured in turn, case by case, alone on it, so that what is there when the time is up can be compared; every further
peer has the GPU to itself. With several GPUs each takes the next pair or peer, on cores of its own. Prefill is the time
to the last first token of a batch of unseen prompts; decode is the time between steps that give every request of a
batch a token, once all prompts are in the prefix cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benches import engine_arms
from benches.engine_arms import ARMS, CASES
from command_line import count

METHOD = (
    "Best round of a case (prefill: 3, or 1 where a prompt batch has over 300,000 tokens; decode: 4, or 2), vLLM's own "
    "engine process, engines of one GPU measured in turn, of several GPUs beside one another on equal shares of cores, "
    "logprobs=0, decode timed between steps in which all requests get a token, their prompts in the prefix cache, at "
    "the engine's core or where its outputs are read, whichever is slower; "
    "compiled, full and piecewise CUDA graphs of 1, 8, 64, 256 and 512 tokens unless the engine's name says eager"
)
ENGINES = ("strict", "native", "batch-invariant")
LAYERS = (8, 36)
TARGETS = {1: 0.92, 64: 0.97, 256: 0.97}

Keep = Callable[[list[dict[str, Any]], dict[str, Any]], None]


def options(rest: list[str]) -> dict[str, Any]:
    """This bench's own part of the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench engine")
    parser.add_argument("--layers", nargs="+", type=count, default=list(LAYERS), help="models, the most wanted first")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ARMS)
    parser.add_argument("--logs", type=Path, default=None, help="new folder that keeps every engine's log")
    found = vars(parser.parse_args(rest))
    # each has files of its own name
    for name in ("layers", "gpus", "engines"):
        if len(set(found[name])) < len(found[name]):
            parser.error(f"--{name} {' '.join(map(str, found[name]))}: give each once")
    if found["logs"] and any(found["logs"].glob("results-*.jsonl")):
        parser.error(f"--logs {found['logs']} holds the results of another run; give a new folder")
    return found


def run(
    budget: float,
    layers: tuple[int, ...] | list[int] = LAYERS,
    gpus: tuple[str, ...] | list[str] = ("0",),
    engines: tuple[str, ...] | list[str] = ENGINES,
    logs: Path | None = None,
    keep: Keep | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets. ``budget``: seconds for everything, starting included; ``keep`` is given each new case."""
    end = time.monotonic() + budget
    logs = Path(tempfile.mkdtemp(prefix="engine-bench-")) if logs is None else logs.absolute()
    logs.mkdir(parents=True, exist_ok=True)
    if len(engines) < 2 or "strict" not in engines:
        print(f"engines {', '.join(engines)}: ratios need strict and another one", flush=True)
    conductors = []
    cores = sorted(os.sched_getaffinity(0))
    jobs = jobs_of(layers, engines)
    lanes = [(gpu, jobs[i :: len(gpus)]) for i, gpu in enumerate(gpus) if jobs[i :: len(gpus)]]
    for i, (gpu, mine) in enumerate(lanes):
        share = len(cores) // len(lanes)
        own = cores[i * share : (i + 1) * share] or cores
        plan = {"gpu": gpu, "jobs": mine, "cores": own, "end": time.time() + budget, "logs": str(logs)}
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu)
        log = open(logs / f"conductor-{gpu}.txt", "w")  # noqa: SIM115
        conductors.append(
            subprocess.Popen(
                [sys.executable, engine_arms.__file__, json.dumps(plan)],
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )
        )  # fmt: skip
    seen: list[dict[str, Any]] = []
    while any(c.poll() is None for c in conductors) and time.monotonic() < end + 20:
        time.sleep(0.5)
        found = results(logs)
        for x in found[len(seen) :]:
            print(json.dumps(x), flush=True)
        if len(found) > len(seen) and keep is not None:
            keep(*tabled(found))
        seen = found
    for c in conductors:
        if c.poll() is None:
            c.terminate()
            try:
                c.wait(15)
            except subprocess.TimeoutExpired:
                engine_arms.end_group(c.pid)
        c.wait()
        if c.returncode:
            print(f"conductor ended with {c.returncode}; see {logs}", flush=True)
    found = results(logs)
    for x in found:
        if "error" in x:
            print(f"engine {x['engine']}, {x['layers']} layers: {x['error']}; its log is in {logs}", flush=True)
    return tabled(found)


def jobs_of(layers: Sequence[int], engines: Sequence[str]) -> list[tuple[int, list[str]]]:
    """(layers, engines that are on a GPU at once), the most wanted first: strict beside its first peer."""
    groups = [list(engines[:2]), *([name] for name in engines[2:])]
    return [(n, group) for group in groups for n in layers]


def results(logs: Path) -> list[dict[str, Any]]:
    """What the conductors have written so far, in the order of writing within each."""
    lines = [line for f in sorted(logs.glob("results-*.jsonl")) for line in f.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda x: x["at"])


def tabled(found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets from the conductors' lines."""
    speeds = {(x["layers"], x["engine"], x["prompt"], x["batch"]): x for x in found if "decode" in x}
    rows = []
    for layers, peer, prompt, batch in speeds:
        ours, theirs = speeds.get((layers, "strict", prompt, batch)), speeds[layers, peer, prompt, batch]
        if ours is None or peer == "strict":
            continue
        for phase in ("prefill", "decode"):
            rows.append(
                {
                    "case": f"{phase} layers={layers} prompt={prompt} M={batch}",
                    "op": phase,
                    "shape": [batch, prompt, layers],
                    "strict_us": round(1e6 / ours[phase], 3),
                    "strict_tokens_s": round(ours[phase], 1),
                    "peer": peer,
                    "peer_us": round(1e6 / theirs[phase], 3),
                    "peer_tokens_s": round(theirs[phase], 1),
                    "ratio": round(ours[phase] / theirs[phase], 3),
                }
            )
    order = {(p, b): i for i, (p, b, _) in enumerate(CASES)}
    rows.sort(key=lambda r: (r["peer"], r["shape"][2], order[r["shape"][1], r["shape"][0]], r["op"]))
    return rows, summary(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst ratios to native by batch and phase; the ratio to batch-invariant vLLM at batch 64."""
    found: dict[str, Any] = {}
    native = [r for r in rows if r["peer"] == "native"]
    for batch, target in TARGETS.items():
        ratios = [r["ratio"] for r in native if r["op"] == "decode" and r["shape"][0] == batch]
        if ratios:
            found[f"decode of native at batch {batch}, worst >= {target}"] = min(ratios)
    prefill = [r["ratio"] for r in native if r["op"] == "prefill"]
    if prefill:
        found["prefill of native, worst >= 0.95"] = min(prefill)
    for peer in ("batch-invariant", "batch-invariant-eager"):
        at_64 = [r["ratio"] for r in rows if r["peer"] == peer and r["shape"][0] == 64 and r["op"] == "decode"]
        if at_64:
            found[f"decode of {peer} vLLM at batch 64, worst >= 1.50"] = min(at_64)
    return found
