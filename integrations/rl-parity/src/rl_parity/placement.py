"""Which process runs on which GPU, and how much of it: arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_contract import ContractError
from rl_parity.config import RunConfig
from rl_parity.gpus import Gpu

GIB = 2**30
# bytes a parameter that stay with a trainer rank between steps: bf16 weight and frozen reference, fp32 master, gradient
# and two moments
TRAINER_BYTES_PER_PARAMETER = 20
# a CUDA context with its libraries, and room for what the allocator keeps in pieces
CONTEXT_BYTES = 3 * GIB
# an engine alone leaves this share free, for graphs and for what is not torch's
MOST = 0.9
# tokens of a page of an engine's cache
KV_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Places in ``gpus``: one per trainer rank, and per worker of each engine; ``kind`` is ``cpu`` without GPUs."""

    kind: str
    gpus: tuple[Gpu, ...] = ()
    trainers: tuple[int, ...] = ()
    engines: tuple[tuple[int, ...], ...] = ()

    @property
    def backend(self) -> str:
        """What moves trainer bytes: NCCL refuses two ranks on one GPU."""
        if self.kind == "cpu" or len(set(self.trainers)) < len(self.trainers):
            return "gloo"
        return "nccl"

    @property
    def takes_turns(self) -> bool:
        """Whether engines must make room while the trainer works."""
        return bool(set(self.trainers) & {place for engine in self.engines for place in engine})

    def trainer_devices(self, rank: int) -> str:
        """``CUDA_VISIBLE_DEVICES`` of a trainer rank."""
        return str(self.gpus[self.trainers[rank]].index)

    def engine_devices(self, engine: int) -> str:
        """``CUDA_VISIBLE_DEVICES`` of an engine: its workers' GPUs, then trainer rank 0's, which lends weights."""
        places = dict.fromkeys((*self.engines[engine], self.trainers[0]))
        return ",".join(str(self.gpus[place].index) for place in places)

    def engines_beside(self, place: int) -> int:
        return sum(place in engine for engine in self.engines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "backend": self.backend,
            "trainers": [self.gpus[p].uuid for p in self.trainers],
            "engines": [[self.gpus[p].uuid for p in engine] for engine in self.engines],
        }


def place(config: RunConfig, gpus: Sequence[Gpu]) -> Placement:
    """Where every rank and worker of ``config`` runs.

    ``split`` gives trainer ranks the first GPUs and engines those that follow; ``colocated`` gives both the same ones,
    one rank and one worker a GPU; ``shared`` goes round, so that any number of GPUs holds any number of ranks.

    Raises:
        ContractError: too few GPUs for what was asked.
    """
    if config.device == "cpu":
        return Placement(kind="cpu")
    ranks, workers, tp, count = config.train.world_size, config.rollout.world_size, config.rollout.tp, len(gpus)
    asked = f"--train {config.train} --rollout {config.rollout} on {count} GPU(s)"
    kind = config.placement
    if kind == "auto":
        kind = "split" if count >= ranks + workers else "colocated"
    needed = {"split": ranks + workers, "colocated": max(ranks, workers), "shared": tp}[kind]
    if count < needed or not count:
        others = "; use fewer ranks or engines, or --placement shared for a test" if kind != "shared" else ""
        raise ContractError(f"{asked}: placement {kind} needs {needed} GPU(s){others}")
    first = ranks if kind == "split" else 0
    return Placement(
        kind=kind,
        gpus=tuple(gpus),
        trainers=tuple(rank % count for rank in range(ranks)),
        engines=tuple(
            tuple((first + engine * tp + worker) % count for worker in range(tp))
            for engine in range(config.rollout.engines)
        ),
    )


def trainer_bytes(config: RunConfig, weight_bytes: int, placement: Placement, spot: int) -> int:
    """Bytes of GPU ``spot`` that trainer ranks hold while engines sample. ``weight_bytes`` is the model in bf16."""
    ranks = [rank for rank, at in enumerate(placement.trainers) if at == spot]
    if not ranks:
        return 0
    each = weight_bytes // 2 * TRAINER_BYTES_PER_PARAMETER // config.train.tp + CONTEXT_BYTES
    # rank 0 lends a whole copy, which it gathers into another one first
    return len(ranks) * each + (2 * weight_bytes if 0 in ranks else 0)


def engine_share(config: RunConfig, weight_bytes: int, placement: Placement, engine: int) -> float:
    """``gpu_memory_utilization`` of an engine: as asked, or its part of what the trainer leaves, rounded down to 1 %.

    Raises:
        ContractError: too little is left for its weights and a cache.
    """
    shares = []
    for spot in placement.engines[engine]:
        gpu, beside = placement.gpus[spot], placement.engines_beside(spot)
        left = gpu.memory - trainer_bytes(config, weight_bytes, placement, spot)
        share = config.gpu_memory_utilization or int(100 * min(MOST, left / gpu.memory) / beside) / 100
        needed = (weight_bytes // config.rollout.tp + 2 * GIB) / gpu.memory
        if share < needed or (config.gpu_memory_utilization and share * beside * gpu.memory > left):
            raise ContractError(
                f"GPU {gpu.index} ({gpu.memory / GIB:.0f} GiB): trainer ranks hold "
                f"{(gpu.memory - left) / GIB:.1f} GiB between steps, {beside} engine(s) beside them take "
                f"{share * gpu.memory / GIB:.1f} GiB each and need {needed * gpu.memory / GIB:.1f}; "
                "use more GPUs, a smaller model, or another --gpu-memory-utilization"
            )
        shares.append(share)
    return min(shares)


def spread(placement: Placement) -> dict[int, list[str]]:
    """By place, who runs there, for people: ``{0: ["trainer-0", "engine-0/worker-0"]}``."""
    out: dict[int, list[str]] = {}
    for rank, at in enumerate(placement.trainers):
        out.setdefault(at, []).append(f"trainer-{rank}")
    for index, engine in enumerate(placement.engines):
        for worker, at in enumerate(engine):
            out.setdefault(at, []).append(f"engine-{index}/worker-{worker}")
    return out
