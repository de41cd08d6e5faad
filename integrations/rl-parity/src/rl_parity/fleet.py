"""The processes of one arm: trainer ranks and engines started, called together, closed."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from rl_contract import Profile
from rl_parity import checkpoint, placement, preflight
from rl_parity.config import RunConfig
from rl_parity.launch import Launcher, Worker, WorkerFailure, WorkerGone, leftovers, make_launcher, wait_all
from rl_parity.launch.processes import current_mark, end, lives, survivors
from rl_parity.launch.signals import shield
from rl_parity.launch.traces import Watch, mapped, remove_folder, remove_shared, scratch_folder
from rl_parity.placement import Placement
from vime_sync import WEIGHT_DIGEST
from vime_sync.layout import ModelShape

# one thread per process: ranks share the cores, and no bit depends on the count
_LEAN = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_TRAINER = {**_LEAN, "GLOO_SOCKET_IFNAME": "lo"}
# tokens of a cache block in vLLM's CPU build
_KV_BLOCK_CPU = 128
_ENGINE = {**_LEAN, "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


class RemoteEngine:
    """vime-sync's ``EngineClient`` for an engine in another process; ``gone`` says how that ended, once it has."""

    def __init__(self, worker: Worker, tp: int, timeout: float) -> None:
        self._worker, self.tp, self._timeout = worker, tp, timeout
        self.gone: str | None = None

    @property
    def name(self) -> str:
        return self._worker.name

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return self._worker.call("client", method, *args).result(self._timeout)
        except WorkerGone as error:
            self.gone = self.gone or str(error)
            raise

    def pause(self) -> None:
        self._ask("pause")

    def clear_caches(self) -> bool:
        # as it was answered: the publisher refuses everything but True
        cleared: bool = self._ask("clear_caches")
        return cleared

    def begin(self, session: str) -> None:
        self._ask("begin", session)

    def cancel(self, session: str) -> None:
        self._ask("cancel", session)

    def transfer(self, path: Path, version: str) -> None:
        self._ask("transfer", path, version)

    def shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> Mapping[tuple[int, str], str]:
        digests: Mapping[tuple[int, str], str] = self._ask("shard_digests", algorithm)
        return digests

    def finish(self, version: str) -> None:
        self._ask("finish", version)

    def weight_version(self) -> str:
        return str(self._ask("weight_version"))

    def resume(self) -> None:
        self._ask("resume")

    def poison(self, reason: str) -> None:
        self._ask("poison", reason)


def engine_cores(config: RunConfig, index: int, cores: Sequence[int]) -> dict[str, str]:
    """Environment giving each worker of engine ``index`` its share of the cores, or one in turn where they are few."""
    share = max(1, len(cores) // (config.train.world_size + config.rollout.world_size))
    binds = []
    for rank in range(config.rollout.tp):
        first = (index * config.rollout.tp + rank) * share
        binds.append(",".join(str(cores[(first + i) % len(cores)]) for i in range(share)))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(binds), "NUMBA_NUM_THREADS": str(share)}


class Fleet:
    """Start with ``with``: on the way out every worker is closed, and what does not close is ended."""

    def __init__(
        self,
        config: RunConfig,
        arm: str,
        model: Path,
        profile: Profile,
        logs: Path,
        *,
        max_model_len: int,
        longest_sequence: int,
        placed: Placement | None = None,
    ) -> None:
        self.config, self.arm, self._longest_sequence = config, arm, longest_sequence
        self.placed = placed or Placement(kind="cpu")
        self._model, self._profile, self._logs, self._max_model_len = model, profile, logs, max_model_len
        self.trainers: list[Worker] = []
        self.engines: list[Worker] = []
        self._launcher: Launcher | None = None
        self._processes: list[psutil.Process] = []
        self._segments: set[int] = set()
        self._scratch: Path | None = None

    def __enter__(self) -> "Fleet":
        # an engine that dies while it starts leaves shared memory that only its maps could name
        watch = Watch(lambda: [p.pid for p in survivors(current_mark())])
        self._segments = watch.inodes
        try:
            with watch:
                self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        c = self.config
        self._scratch = scratch_folder()
        self._launcher = make_launcher(c.launcher, self._logs)
        for rank in range(c.train.world_size):
            self.trainers.append(self._start_trainer(rank, f"file://{self._scratch}/rendezvous"))
        # an engine measures what is free on its GPU while it starts, so nobody else may come or go meanwhile
        begun = [] if self.placed.takes_turns else [worker.call("start") for worker in self.trainers]
        one_by_one = self._starts_one_by_one()
        for index in range(c.rollout.engines):
            self.engines.append(self._start_engine(index))
            if one_by_one:
                self.all(self.engines[-1:], "report")
        wait_all(self._launcher, begun, c.timeout)
        # a report is answered only by a worker that stands
        self.all(self.engines, "report")
        if self.placed.takes_turns:
            self.sleep()
            self.all(self.trainers, "start")
        # known now: a process that dies later no longer tells what it had mapped, nor whose its children are
        self._processes = survivors(current_mark())
        self.look()

    def look(self) -> None:
        """Note the shared memory that the workers have mapped now, for whoever must remove it."""
        self._segments |= mapped(p.pid for p in self._processes if lives(p))
        leftovers.note_inodes(self._segments)

    def _start_trainer(self, rank: int, init_method: str) -> Worker:
        c = self.config
        assert self._launcher is not None
        return self._launcher.start(
            f"trainer-{rank}",
            "rl_parity.trainer_worker:TrainerWorker",
            env={**_TRAINER, **self._cuda(self.placed.trainer_devices(rank) if self._on_gpus else "")},
            kwargs={
                "rank": rank,
                "device": c.device,
                "backend": self.placed.backend,
                "tp": c.train.tp,
                "cp": c.train.cp,
                "init_method": init_method,
                "arm": self.arm,
                "model": str(self._model),
                "profile": self._profile.to_dict(),
                "hyper": {k: getattr(c, k) for k in ("lr", "kl", "clip", "max_grad_norm", "weight_decay")},
                "token_budget": c.token_budget or None,
                "native_operators": c.native_operators if self.arm == "native" else "auto",
                "plant": c.plant if self.arm == "strict" else None,
            },
        )

    def _start_engine(self, index: int) -> Worker:
        c = self.config
        assert self._launcher is not None
        assert self._scratch is not None
        # vLLM leaves its sockets behind
        scratch = self._scratch / f"e{index}"
        scratch.mkdir()
        return self._launcher.start(
            f"engine-{index}",
            "rl_parity.engine_worker:EngineWorker",
            env={
                **_ENGINE,
                **(
                    self._cuda(self.placed.engine_devices(index))
                    if self._on_gpus
                    else engine_cores(c, index, sorted(os.sched_getaffinity(0)))
                ),
                "TMPDIR": str(scratch),
                "VLLM_RPC_BASE_PATH": str(scratch),
            },
            kwargs={
                "name": f"engine-{index}",
                "arm": self.arm,
                "model": str(self._model),
                "profile": self._profile.to_dict(),
                "tp": c.rollout.tp,
                "max_model_len": self._max_model_len,
                "max_num_seqs": self._sequences_per_engine(),
                "kv_blocks": (self._cache(index) or (None,))[0],
                "gpu": self._gpu_options(index) if self._on_gpus else None,
            },
        )

    @property
    def _on_gpus(self) -> bool:
        return bool(self.placed.gpus)

    @staticmethod
    def _cuda(devices: str) -> dict[str, str]:
        # indices, in nvidia-smi's order: vLLM reads them as numbers
        return {"CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if devices else {}

    def _gpu_options(self, index: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "gpu_memory_utilization": placement.engine_share(self.config, self._model_bytes(), self.placed, index),
            "enable_sleep_mode": self.sleep_level > 0,
            "enforce_eager": self.config.eager,
            "block_size": placement.KV_BLOCK,
        }
        if not self.config.eager:
            # a step's requests start together and end together: vLLM's own list has a graph for every eighth size
            sizes = [1 << i for i in range((self._sequences_per_engine() - 1).bit_length() + 1)]
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if (cache := self._cache(index)) is not None:
            # said, not measured: vLLM's measuring fails where another run on the GPU gives memory back meanwhile
            options["kv_cache_memory_bytes"] = cache[1]
        return options

    @property
    def sleep_level(self) -> int:
        """0: colocated or not, the engines stay awake."""
        if self.config.sleep != "auto":
            return int(self.config.sleep) if self.placed.takes_turns else 0
        return 1 if self.placed.takes_turns else 0

    def sleep(self) -> None:
        """Have colocated engines give up their GPU memory; nothing happens where each side has its own GPUs."""
        if self.sleep_level:
            self.all(self.engines, "sleep", self.sleep_level)

    def rest(self) -> None:
        """Have trainers give up what they need not keep while engines sample."""
        if self.sleep_level:
            self.all(self.trainers, "rest", self._waking_bytes)

    @cached_property
    def _waking_bytes(self) -> int:
        """What engines take of a GPU when they wake, and as much again; 0 where a cache takes all there is."""
        caches = [self._cache(index) for index in range(self.config.rollout.engines)]
        known = [cache[1] for cache in caches if cache is not None]
        if len(known) < len(caches):
            return 0
        each = self._model_bytes() // self.config.rollout.tp + max(known) + preflight.GIB
        return 2 * each * max(self.placed.engines_beside(spot) for engine in self.placed.engines for spot in engine)

    def wake(self, what: str) -> None:
        """Give it back to them: first ``weights``, to be pushed to, then ``kv_cache``."""
        if self.sleep_level:
            self.all(self.engines, "wake", what)

    @property
    def sizes(self) -> list[int]:
        """Tensor-parallel sizes of the engines."""
        return [self.config.rollout.tp]

    def _sequences_per_engine(self) -> int:
        return min(256, -(-self.config.batch // self.config.rollout.engines) * self.config.group)

    def _cache(self, index: int) -> tuple[int, int] | None:
        """Cache blocks that hold every sequence of a step, and their bytes on a worker, at most: caches are dropped at
        every push, so more would idle.

        None, which is all the memory that vLLM has, where that is too little.
        """
        shape = ModelShape.from_hf_config(checkpoint.read_config(self._model))
        size = placement.KV_BLOCK if self._on_gpus else _KV_BLOCK_CPU
        sequences = self._sequences_per_engine() * -(-self._longest_sequence // size)
        blocks = max(sequences, -(-self._max_model_len // size)) + 2
        heads = max(1, shape.kv_heads // self.config.rollout.tp)
        room = preflight.GIB
        if self._on_gpus:
            share = placement.engine_share(self.config, self._model_bytes(), self.placed, index)
            memory = min(self.placed.gpus[spot].memory for spot in self.placed.engines[index])
            # half of it may be needed by weights, graphs and activations
            room = int(share * memory - self._model_bytes() // self.config.rollout.tp) // 2
        # two bytes a value on GPUs, up to four on a CPU; keys and values
        worst_bytes = blocks * shape.layers * heads * size * shape.head_dim * 2 * (2 if self._on_gpus else 4)
        return (blocks, worst_bytes) if worst_bytes < room else None

    def _starts_one_by_one(self) -> bool:
        if self._on_gpus:
            # two that measure the same GPU would count each other's weights
            return any(self.placed.engines_beside(spot) > 1 for engine in self.placed.engines for spot in engine)
        needed = preflight.memory_estimate(self.config, self._model_bytes())
        return needed * 1.5 > psutil.virtual_memory().available

    def _model_bytes(self) -> int:
        return checkpoint.size_in_bytes(self._model)

    def all(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        """The same call on every worker, together; the first failure ends it."""
        return self.wait(self.begin(workers, method, *args))

    def gather(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make several calls, then wait for all of them."""
        return self.wait([call() for call in calls])

    def begin(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        """As ``all``, without waiting: what ``wait`` takes. A worker answers its calls in the order they were made."""
        return [worker.call(method, *args) for worker in workers]

    def wait(self, begun: Sequence[Any]) -> list[Any]:
        """The answers to calls; the first failure ends it."""
        assert self._launcher is not None
        return wait_all(self._launcher, begun, self.config.timeout)

    def remote_engines(self) -> list[RemoteEngine]:
        return [RemoteEngine(w, self.config.rollout.tp, self.config.timeout) for w in self.engines]

    def shutdown(self) -> None:
        """Ask every worker to close by itself; only a run that went well gets here."""
        with suppress(WorkerFailure):
            self.all(self.engines, "close")
        with suppress(WorkerFailure):
            self.all(self.trainers, "close")

    def close(self) -> None:
        """End every process of this arm, whatever state it is in; safe to call twice."""
        with shield():
            if self._launcher is not None:
                # looked up while parents live: an orphan can no longer be told from a stranger
                ours = [*self._processes, *survivors(current_mark())]
                segments = self._segments | mapped(p.pid for p in ours if lives(p))
                try:
                    self._launcher.close()
                finally:
                    self._launcher = None
                    end(ours)
                    remove_shared(segments)
            if self._scratch is not None:
                remove_folder(self._scratch)
                self._scratch = None
