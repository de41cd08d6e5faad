"""How weights get from the trainer to the engines: lent, or written to files; and the proof of what arrived."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_parity.fleet import Fleet, RemoteEngine
from rl_parity.launch import WorkerGone, traces
from rl_parity.launch.processes import current_mark
from vime_sync import PolicyVersion, Publisher, PublishError, State
from vime_sync.publisher import differing_shards


class Pushes:
    """The pushes of one arm. ``transport`` is how they travel now, ``reason`` why it is not what was asked for.

    Args:
        algorithm: the digest that names the run's weights.
    """

    def __init__(self, fleet: Fleet, publisher: Publisher, folder: Path, run_id: str, algorithm: str) -> None:
        self._fleet, self._publisher, self._folder, self._run_id = fleet, publisher, folder, run_id
        self._algorithm = algorithm
        asked = fleet.config.weights
        self._may_change = asked == "auto"
        self.transport = ("ipc" if fleet.placed.gpus else "file") if asked == "auto" else asked
        self.reason: str | None = None
        self.proofs: list[dict[str, Any]] = []
        self._begun: list[Any] = []

    def begin(self, step: int) -> None:
        """Have the trainer make the weights of the next ``push`` ready, without waiting for it."""
        self._begun = self._fleet.begin(self._fleet.trainers, "export", *self._export(step, self.transport))

    def push(self, step: int) -> dict[str, str]:
        """Publish the trainer's weights on every engine, verified; returns version and digest. ``begin`` may precede.

        A GPU's memory that engines cannot open (CUDA IPC may be forbidden where this runs) gives way to the host's,
        once, at the first push, and only where nobody asked for it.

        Raises:
            WorkerGone: the process of an engine has ended; every such engine is named first.
            PublishError: a push failed for another reason.
        """
        try:
            out = self._publish(step, self.transport)
        except PublishError as error:
            engines = [engine for engine in self._publisher.engines.values() if isinstance(engine, RemoteEngine)]
            if gone := [engine.gone for engine in engines if engine.gone]:
                raise WorkerGone("\n".join([*gone, f"--- so step {step} was not pushed ---", str(error)])) from error
            if not (self._may_change and self.transport == "ipc" and error.reached is State.CACHES_CLEARED):
                raise
            first = str(next(iter(error.failures.values()), error)).splitlines()[0]
            self.transport, self.reason = "host", f"CUDA IPC failed: {first}"
            # a full push heals the engines that the failed one has poisoned
            out = self._publish(step, self.transport)
        self._may_change = False
        return out

    def _publish(self, step: int, transport: str) -> dict[str, str]:
        export = self._export(step, transport)
        begun, self._begun = self._begun, []
        exporting = begun or self._fleet.begin(self._fleet.trainers, "export", *export)
        folder = Path(export[0])
        exported: dict[str, str] = self._fleet.wait(exporting)[0]
        try:
            self._publisher.publish(folder, PolicyVersion(self._run_id, step, exported["digest"]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return exported

    def _export(self, step: int, transport: str) -> tuple[Any, ...]:
        where = str(self._folder / f"{step}-{transport}")
        return where, self._run_id, step, transport, self._fleet.sizes, self._algorithm

    def prove(self, step: int) -> None:
        """Compare every shard that the engines hold with the trainer's weights, not with what the push stated of them.

        Raises:
            PublishError: an engine holds other bytes.
        """
        failures, shards = {}, 0
        for engine in self._publisher.engines.values():
            expected = self._fleet.all(self._fleet.trainers, "shard_digests", engine.tp, self._algorithm)[0]
            shards += len(expected)
            if wrong := differing_shards(expected, engine.shard_digests(self._algorithm)):
                failures[engine.name] = f"{len(wrong)} shards have another {self._algorithm}: {', '.join(wrong[:8])}"
        version = str(self._publisher.version)
        proof = {"step": step, "version": version, "shards": shards, "different": len(failures)}
        self.proofs.append(proof | {"algorithm": self._algorithm})
        if failures:
            raise PublishError(f"engines do not hold the bytes of {version}:", failures, None)

    def describe(self) -> dict[str, Any]:
        return {
            "asked": self._fleet.config.weights,
            "transport": self.transport,
            "reason": self.reason,
            "sha256_proofs": self.proofs,
        }


@contextmanager
def weights_folder(root: Path) -> Iterator[Path]:
    """Where pushes travel: shared memory where there is any, else the run directory; removed afterwards."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else root
    folder = Path(tempfile.mkdtemp(prefix=traces.weights_prefix(current_mark()), dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
