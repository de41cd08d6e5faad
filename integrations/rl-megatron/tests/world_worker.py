"""A test world: ``world_worker.py FOLDER WORLD [gpu]`` runs FOLDER/job.pkl on WORLD ranks.

Each writes FOLDER/out{rank}.pkl. The ranks are forked after the imports, which take far longer than a case; on a GPU
each starts afresh, and the process that waits for them imports nothing. A job maps case names to
``{"trainer": TrainerRank arguments, "samples", "advantages", "budgets", "steps", "export"}``.
"""

import multiprocessing
import pickle
import sys
import time
from pathlib import Path
from typing import Any


def run_case(folder: Path, rank: int, name: str, case: dict[str, Any]) -> dict[str, Any]:
    from rl_megatron import TrainerRank

    trainer = TrainerRank(rank=rank, init_method=f"file://{folder}/init-{name}", **case["trainer"])
    trainer.init()
    samples = case["samples"]
    trainer.keep_reference()
    out: dict[str, Any] = {"budgets": {}, "steps": []}
    out["scores"], out["entropies"] = trainer.logprobs(samples, with_entropy=True)
    out["warm"] = trainer.logprobs(samples, temperature=0.7)
    for budget in case.get("budgets", ()):
        trainer.token_budget = budget
        out["budgets"][budget] = trainer.logprobs(samples)
    trainer.token_budget = case["trainer"].get("token_budget")
    for _ in range(case.get("steps", 0)):
        old = trainer.logprobs(samples)
        ref = trainer.reference_logprobs(samples)
        step = trainer.train_step(samples, case["advantages"], old, ref_logprobs=ref)
        out["steps"].append({**step, "old": old, "ref": ref})
        out.setdefault("grads", {n: s.grad.cpu().clone() for n, s in trainer.optimizer._states.items()})
    if case.get("steps"):
        # one sample a micro-batch: with CP a rank may then hold no scored row at all
        trainer.token_budget = 1
        old = trainer.logprobs(samples)
        out["micro"] = {
            **trainer.train_step(samples, case["advantages"], old, ref_logprobs=trainer.reference_logprobs(samples)),
            "old": old,
        }
    out["state"] = {n: s.master.cpu() for n, s in trainer.optimizer._states.items()}
    if case.get("export"):
        weights = trainer.export_weights()
        out["weights"] = weights and {n: t.cpu() for n, t in weights.items()}
        trainer.save(folder / f"saved-{name}")
    out["report"] = trainer.report()
    trainer.close()
    return out


def run_rank(folder: Path, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    job = pickle.loads((folder / "job.pkl").read_bytes())
    out = {name: run_case(folder, rank, name, case) for name, case in job.items()}
    (folder / f"out{rank}.pkl").write_bytes(pickle.dumps(out))


def main() -> int:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    on_gpu = sys.argv[3:] == ["gpu"]
    if not on_gpu:
        import rl_megatron.trainer  # noqa: F401 - forked with it
    # an import may have asked for GPUs, after which a fork can't use them
    context = multiprocessing.get_context("spawn" if on_gpu else "fork")
    ranks = [context.Process(target=run_rank, args=(folder, rank)) for rank in range(world)]
    for process in ranks:
        process.start()
    # peers of a dead rank would wait for it
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
        time.sleep(0.05)
    time.sleep(0.2 if any(p.exitcode for p in ranks) else 0)
    for process in ranks:
        process.kill()
        process.join()
    return int(any(p.exitcode for p in ranks))


if __name__ == "__main__":
    sys.exit(main())
