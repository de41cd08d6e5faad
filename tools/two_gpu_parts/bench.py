"""A training step on two GPUs, TP2 and CP2, strict beside native; Qwen3-8B's dimensions with 4 layers.

Trees have as many leaves as tensor parallel ranks, which is the default where both engines are cut alike.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS, LAYERS = 8192, 4


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stage = settings.get("stage", print)
    from benches import train

    from rl_megatron import ParallelConfig, topology

    stage("imported")
    # as TrainerRank has it: two ranks' threads on one host would wait for one another
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, tp, cp in (("TP2", 2, 1), ("CP2", 1, 2)):
        parallel = ParallelConfig(tp=tp, cp=cp)
        topology.start(rank, parallel, f"file://{folder}/{name}", device="cuda")
        stage(f"{name}: joined")
        times = {}
        for mode in ("native", "strict"):
            topology.agree({"rounds": 4})
            begin = time.monotonic()
            arm = train.Arm(mode, LAYERS, leaves=tp, parallel=parallel)
            stage(f"{name} {mode}: model built")
            found[f"{name} {mode} is"] = arm.name
            times[mode] = arm.measure(TOKENS, rounds=4, done=lambda n, at=f"{name} {mode}": stage(f"{at}: step {n}"))
            del arm
            train.free()
            found[f"{name}, ms"] = {m: {k: round(v, 2) for k, v in t.items()} for m, t in times.items()}
            found[f"{name} {mode}, seconds in all"] = round(time.monotonic() - begin, 1)
            yield found
        topology.stop()
        found[f"{name} training step against native >= 0.93"] = round(
            times["native"]["step"] / times["strict"]["step"], 3
        )
        yield found
