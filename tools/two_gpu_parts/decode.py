"""Tokens a second of vLLM at TP2, strict beside native; Qwen3-8B's dimensions, dummy weights, 8 layers or all 36.

A step of 8 layers is mostly the host's time, of 36 the GPU's.

Both engines start at once, since starting takes longest, and are measured in turns: files in the folder say who is
ready and whose turn it is. Of each, the best of the rounds.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benches import engine_arms
from two_gpu_parts.processes import Job, run_lanes

ARMS = ("native", "strict")
LAYERS = 8
# (prompt, batch, new tokens)
CASES = ((512, 64, 96), (512, 1, 128))
# as an engine of defaults has them, which captures every size up to 512
GRAPHS = (1, 64, 512)
TARGETS = {64: 0.95, 1: 0.85}
ROUNDS = 3
PROGRAM = (sys.executable, "-W", "ignore", str(Path(__file__).resolve()))


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    root = Path(folder)
    layers = settings.get("layers", LAYERS)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(engine_arms.config(layers)))
    given = [folder, str(settings["end"] - 6), str(layers)]
    program = settings.get("program", PROGRAM)
    jobs = [Job(name=arm, command=[*program, arm, *given], log=root / f"{arm}.log", limit=1e9) for arm in ARMS]
    errors: list[str] = []
    for job, status in run_lanes([[job] for job in jobs], settings["end"] - 4):
        if status != 0:
            errors.append(f"{job.name}: " + ("late" if status is None else f"status {status}"))
            yield {f"log of {job.name}": job.tail()}
        yield {**speeds(root), "errors": errors}


def speeds(root: Path) -> dict[str, Any]:
    """Tokens a second of both arms, and their ratio against the target."""
    found: dict[str, Any] = {}
    held = {arm: _lines(root / f"{arm}.jsonl") for arm in ARMS}
    for arm, lines in held.items():
        if ready := [line["ready s"] for line in lines if "ready s" in line]:
            found[f"{arm} ready after s"] = ready[0]
    for prompt, batch, _ in CASES:
        best: dict[str, dict[str, float]] = {}
        for arm, lines in held.items():
            rounds = [line for line in lines if line.get("case") == [prompt, batch]]
            if rounds:
                best[arm] = {phase: round(max(line[phase] for line in rounds), 1) for phase in ("prefill", "decode")}
        found[f"tokens/s, batch {batch}, prompt {prompt}"] = best
        if len(best) == len(ARMS):
            ratio = best["strict"]["decode"] / best["native"]["decode"]
            found[f"strict TP2 decode of native at batch {batch} >= {TARGETS[batch]}"] = round(ratio, 3)
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Turns:
    """Who may measure: every arm says when it stands ready, and after each of its rounds."""

    def __init__(self, root: Path, arm: str, end: float) -> None:
        self.root, self.arm, self.end = root, arm, end

    def say(self, what: str) -> None:
        (self.root / f"{self.arm}.{what}").touch()

    def wait(self, number: int) -> None:
        """Until the other arm stands, and has done the round before this one; without it, once its time is over."""
        other = ARMS[1 - ARMS.index(self.arm)]
        needed = [self.root / f"{other}.ready"]
        if self.arm == ARMS[1]:
            needed.append(self.root / f"{other}.round{number}")
        elif number:
            needed.append(self.root / f"{other}.round{number - 1}")
        # figures of one arm are better than none
        while not all(f.exists() for f in needed) and time.time() < self.end - 15:
            time.sleep(0.02)


def measure(arm: str, folder: str, end: float, layers: int) -> None:
    begin = time.monotonic()
    root = Path(folder)
    turns, out = Turns(root, arm, end), root / f"{arm}.jsonl"
    llm = engine_arms.start(
        arm, layers, str(root / "model"), tensor_parallel_size=2, max_model_len=2048, max_num_seqs=64,
        kv_cache_memory_bytes=engine_arms.cache_bytes(layers, CASES),
        compilation_config={"cudagraph_capture_sizes": list(GRAPHS)},
    )  # fmt: skip

    def note(**line: Any) -> None:
        with out.open("a") as f:
            f.write(json.dumps(line) + "\n")

    steps = engine_arms.Steps(llm)

    def speed(prompt: int, batch: int, new: int) -> dict[str, float]:
        # prompts come again in every round
        llm.reset_prefix_cache()
        return engine_arms.measure(llm, steps, prompt, batch, new, seeded=arm == "strict")

    # what the first requests compile is not measured, and must not fall into the other's turn
    for case in CASES:
        speed(*case)
    note(**{"ready s": round(time.monotonic() - begin, 1)})
    turns.say("ready")
    for number in range(ROUNDS):
        turns.wait(number)
        for prompt, batch, new in CASES:
            note(case=[prompt, batch], **speed(prompt, batch, new))
        turns.say(f"round{number}")
    os._exit(0)


if __name__ == "__main__":
    # this folder's modules have names that others may use too
    sys.path.remove(str(Path(__file__).resolve().parent))
    measure(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
