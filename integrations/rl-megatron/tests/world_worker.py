"""A test world: ``world_worker.py FOLDER WORLD [gpu]`` runs FOLDER/job.pkl on WORLD ranks.

Each writes FOLDER/out{rank}.pkl, and says on the way where it stands, in seconds since the start. The ranks are forked
after the imports, which take far longer than a case; on a GPU each starts afresh, and the process that waits for them
imports nothing. A job maps case names to ``{"trainer": TrainerRank arguments, "samples", "advantages", "budgets",
"steps", "step_budget", "export", "keep"}``; ``step_budget`` is that of the last step, default one sample a
micro-batch; ``keep`` names what is large and still wanted: of ``grads``, ``state`` and ``saved``, default all.
"""

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
LARGE = ("grads", "state", "saved")


def run_case(folder: Path, rank: int, name: str, case: dict[str, Any], say: Say) -> dict[str, Any]:
    from rl_megatron import TrainerRank

    trainer = TrainerRank(rank=rank, init_method=f"file://{folder}/init-{name}", **case["trainer"])
    trainer.init()
    say(f"{name}: model built and loaded")
    samples, keep = case["samples"], case.get("keep", LARGE)
    trainer.keep_reference()
    out: dict[str, Any] = {"budgets": {}, "steps": []}
    out["scores"], out["entropies"] = trainer.logprobs(samples, with_entropy=True)
    say(f"{name}: scored")
    out["warm"] = trainer.logprobs(samples, temperature=0.7)
    for budget in case.get("budgets", ()):
        trainer.token_budget = budget
        out["budgets"][budget] = trainer.logprobs(samples)
    say(f"{name}: scored in every way")
    trainer.token_budget = case["trainer"].get("token_budget")
    for number in range(case.get("steps", 0)):
        old = trainer.logprobs(samples)
        ref = trainer.reference_logprobs(samples)
        step = trainer.train_step(samples, case["advantages"], old, ref_logprobs=ref)
        out["steps"].append({**step, "old": old, "ref": ref})
        if "grads" in keep:
            out.setdefault("grads", {n: s.grad.cpu().clone() for n, s in trainer.optimizer._states.items()})
        say(f"{name}: step {number} done")
    if case.get("steps"):
        # of one sample, with CP a rank may hold no scored row at all
        trainer.token_budget = case.get("step_budget", 1)
        old = trainer.logprobs(samples)
        out["micro"] = {
            **trainer.train_step(samples, case["advantages"], old, ref_logprobs=trainer.reference_logprobs(samples)),
            "old": old,
        }
        say(f"{name}: step in micro-batches done")
    if "state" in keep:
        out["state"] = {n: s.master.cpu() for n, s in trainer.optimizer._states.items()}
    if case.get("export"):
        weights = trainer.export_weights()
        out["weights"] = weights and {n: t.cpu() for n, t in weights.items()}
        if "saved" in keep:
            trainer.save(folder / f"saved-{name}")
    out["report"] = trainer.report()
    trainer.close()
    say(f"{name}: closed")
    return out


def run_rank(folder: Path, rank: int, began: float) -> None:
    def say(what: str) -> None:
        print(f"{time.time() - began:6.1f} s rank {rank}: {what}", flush=True)

    import torch

    import rl_contract.shares
    import rl_megatron.trainer  # noqa: F401 - so that its time is told apart

    # a few layers' tokens, so that some gradients are added inside a backward and the last ones by the step
    rl_contract.shares.MOST_BYTES = 1 << 19
    say("imported")
    torch.set_num_threads(1)
    job = pickle.loads((folder / "job.pkl").read_bytes())
    out = {name: run_case(folder, rank, name, case, say) for name, case in job.items()}
    (folder / f"out{rank}.pkl").write_bytes(pickle.dumps(out))
    say("written")


def main() -> int:
    folder, world, began, parent = Path(sys.argv[1]), int(sys.argv[2]), time.time(), os.getppid()
    on_gpu = sys.argv[3:] == ["gpu"]
    if not on_gpu:
        import rl_megatron.trainer  # noqa: F401 - forked with it
    # an import may have asked for GPUs, after which a fork can't use them
    context = multiprocessing.get_context("spawn" if on_gpu else "fork")
    ranks = [context.Process(target=run_rank, args=(folder, rank, began)) for rank in range(world)]
    for process in ranks:
        process.start()
    # peers of a dead rank would wait for it, and so would ranks whose test was killed
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks) and os.getppid() == parent:
        time.sleep(0.05)
    time.sleep(0.2 if any(p.exitcode for p in ranks) else 0)
    for process in ranks:
        process.kill()
        process.join()
    return int(any(p.exitcode for p in ranks))


if __name__ == "__main__":
    sys.exit(main())
