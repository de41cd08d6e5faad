"""One rank of a test world: ``world_worker.py FOLDER RANK`` reads FOLDER/job.pkl and writes FOLDER/out{RANK}.pkl.

A job maps case names to ``{"trainer": TrainerRank arguments, "samples", "budgets", "steps", "rewards"}``.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from rl_megatron import TrainerRank


def run_case(folder: Path, rank: int, name: str, case: dict[str, Any]) -> dict[str, Any]:
    trainer = TrainerRank(rank=rank, init_method=f"file://{folder}/init-{name}", **case["trainer"])
    out: dict[str, Any] = {"report": trainer.init()}
    samples = case["samples"]
    trainer.keep_reference()
    out["scores"], out["entropies"] = trainer.logprobs(samples, with_entropy=True)
    out["warm"] = trainer.logprobs(samples, temperature=0.7)
    out["budgets"] = {}
    for budget in case.get("budgets", ()):
        trainer.token_budget = budget
        out["budgets"][budget] = trainer.logprobs(samples)
    trainer.token_budget = case["trainer"].get("token_budget")
    out["steps"], out["digests"] = [], []
    for _ in range(case.get("steps", 0)):
        old = trainer.logprobs(samples)
        ref = trainer.reference_logprobs(samples)
        step = trainer.train_step(samples, case["advantages"], old, ref_logprobs=ref)
        out["steps"].append({**step, "old": old, "ref": ref})
    if case.get("export"):
        out["weights"] = trainer.export_weights()
        out["state"] = {n: s.master for n, s in trainer.optimizer._states.items()}
        trainer.save(folder / f"saved-{name}")
    out["report"] = trainer.report()
    trainer.close()
    return out


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    job = pickle.loads((folder / "job.pkl").read_bytes())
    out = {name: run_case(folder, rank, name, case) for name, case in job.items()}
    (folder / f"out{rank}.pkl").write_bytes(pickle.dumps(out))


if __name__ == "__main__":
    main()
