"""A rollout engine in memory that follows ``EngineClient``, and that can be told to fail or to lie, for tests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vime_sync.digest import WEIGHT_DIGEST, digests, tensor_digest
from vime_sync.shape import ModelShape
from vime_sync.transfer import read_weights
from vime_sync.vllm_layout import vllm_shards

FAILURES = (
    "begin",
    "cancel",
    "pause",
    "clear_caches",
    "transfer",
    "shard_digests",
    "finish",
    "resume",
    "poison",
)
LIES = ("caches_held", "half_transfer", "skip_tensor", "flip_bit", "label_early", "label_lost", "silent")


@dataclass(frozen=True)
class Generated:
    """One answer: the label stamped on it, and the digests of the weights and of the cached prefix it really used."""

    version: str
    weights: str
    prefix: str


class FakeEngine:
    """Holds real shards of every rank; ``faults`` (of FAILURES and LIES) break it, ``calls`` records the order."""

    def __init__(self, name: str, shape: ModelShape, tp: int = 1, faults: Iterable[str] = ()) -> None:
        self.name, self.shape, self.tp = name, shape, tp
        self.faults = set(faults)
        unknown = self.faults - {*FAILURES, *LIES}
        if unknown:
            raise ValueError(f"unknown faults {sorted(unknown)}; known are {(*FAILURES, *LIES)}")
        self.calls: list[str] = []
        self.restart()

    def restart(self) -> None:
        """As a new process: checkpoint-less dummy weights, the engine's own label, empty caches, serving."""
        zeros = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in self.shape.hf_shapes()}
        self.shards = [dict(vllm_shards(zeros, self.shape, rank, self.tp)) for rank in range(self.tp)]
        self.label = "default"
        self.session: str | None = None
        self.paused = False
        self.poisoned: str | None = None
        self.prefixes: dict[str, str] = {}

    def begin(self, session: str) -> None:
        if self.session is not None:
            raise RuntimeError(f"session {self.session} is open")
        self._enter("begin")
        self.session = session

    def cancel(self, session: str) -> None:
        self._enter("cancel")
        if self.session == session:
            self.session = None

    def pause(self) -> None:
        self._enter("pause")
        self.paused = True

    def clear_caches(self) -> bool:
        self._enter("clear_caches")
        if "caches_held" in self.faults:
            return False
        self.prefixes.clear()
        return True

    def transfer(self, path: Path, version: str) -> None:
        self._enter("transfer")
        if not self.paused or self.session is None:
            raise RuntimeError("transfer needs a paused engine and an open session")
        if "label_early" in self.faults:
            self.label = version
        with read_weights(path, check_bytes=False) as weights:
            for rank in range(self.tp):
                for i, (name, shard) in enumerate(vllm_shards(weights, self.shape, rank, self.tp)):
                    if "half_transfer" in self.faults and i == len(weights) // 2:
                        raise ConnectionError("the sender went away")
                    if "skip_tensor" in self.faults and name == "model.norm.weight":
                        continue
                    self.shards[rank][name] = shard.clone()
        if "flip_bit" in self.faults:
            self.shards[-1]["model.norm.weight"].view(torch.uint8)[0] ^= 1

    def shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> Mapping[tuple[int, str], str]:
        self._enter("shard_digests")
        held = [((rank, name), t) for rank, shards in enumerate(self.shards) for name, t in shards.items()]
        return digests(algorithm, held)

    def finish(self, version: str) -> None:
        self._enter("finish")
        if "label_lost" not in self.faults:
            self.label = version
        self.session = self.poisoned = None

    def weight_version(self) -> str:
        if "silent" in self.faults:
            raise ConnectionError("no answer")
        return self.label

    def resume(self) -> None:
        self._enter("resume")
        if self.session is not None or self.poisoned:
            raise RuntimeError(f"cannot resume: session {self.session}, poisoned {self.poisoned}")
        self.paused = False

    def poison(self, reason: str) -> None:
        self._enter("poison")
        self.poisoned, self.session = reason, None

    def generate(self, prompt: str) -> Generated:
        """Answer a prompt, reading its prefix from the cache when it is there."""
        if self.paused or self.poisoned:
            raise RuntimeError(f"not serving: paused {self.paused}, poisoned {self.poisoned}")
        digest = self.held_digest()
        return Generated(self.label, digest, self.prefixes.setdefault(prompt, digest))

    def held_digest(self) -> str:
        """One digest over everything held by all ranks."""
        parts = [tensor_digest(tensor) for held in self.shards for tensor in held.values()]
        return tensor_digest(torch.frombuffer(bytearray("".join(parts).encode()), dtype=torch.uint8))

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if method in self.faults:
            raise ConnectionError(f"{method} failed")
