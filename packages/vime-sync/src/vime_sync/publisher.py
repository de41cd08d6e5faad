"""Push one version of weights to all engines: either all serve verified bytes under its label, or none serves.

In-place weights cannot be rolled back, so recovery is fail-stop: whatever goes wrong after the engines were claimed
poisons them all, and only a later full push makes them serve again. Nothing is resumed on the way out of an error.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError
from vime_sync.client import EngineClient
from vime_sync.digest import WEIGHT_DIGEST
from vime_sync.files import path_of
from vime_sync.shape import ModelShape
from vime_sync.transfer import read_weights
from vime_sync.version import PolicyVersion, check_version
from vime_sync.vllm_layout import shard_digests


class State(StrEnum):
    PREPARED = "prepared"
    PAUSED = "paused"
    CACHES_CLEARED = "caches_cleared"
    TRANSFERRED = "transferred"
    VERIFIED = "verified"
    PUBLISHED = "published"
    RESUMED = "resumed"
    FAILED = "failed"


@dataclass(frozen=True)
class Transition:
    """A state that all engines have reached: ``at`` in Unix seconds, ``seconds`` since the state before."""

    state: State
    version: str
    at: float
    seconds: float


class PublishError(RuntimeError):
    """A push or a check failed. ``failures`` maps engine names to what went wrong, ``reached`` is the last state."""

    def __init__(self, message: str, failures: Mapping[str, str], reached: State | None) -> None:
        super().__init__(message + "".join(f"\n  {name}: {what}" for name, what in failures.items()))
        self.failures, self.reached = dict(failures), reached


class Publisher:
    """Owns the weights of a group of engines. ``version`` is what they serve, ``history`` every state with its time.

    Args:
        engines: distinct names; sizes of tensor parallelism may differ. None of them serves before its first push.
        shape: the model that all of them run.
        parallel: call the engines from one thread each; sequential calls otherwise.
    """

    def __init__(self, engines: Iterable[EngineClient], shape: ModelShape, *, parallel: bool = False) -> None:
        if not isinstance(shape, ModelShape) or not isinstance(parallel, bool):
            raise ContractError(f"shape={shape!r:.80}, parallel={parallel!r}; supported: a ModelShape, True or False")
        if not isinstance(engines, Iterable):
            raise ContractError(f"engines={engines!r:.80}; supported: some EngineClients")
        self.engines: dict[str, EngineClient] = {}
        self.shape = shape
        self.parallel = parallel
        self.version: PolicyVersion | None = None
        self.history: list[Transition] = []
        self._unfit: dict[str, str] = {}
        self._expected: dict[int, dict[tuple[int, str], str]] = {}
        self._algorithm = WEIGHT_DIGEST
        self._busy = threading.Lock()
        for engine in engines:
            _check_engine(engine)
            if engine.name in self.engines:
                raise ContractError(f"two engines are called {engine.name!r}; give each its own name")
            self.replace(engine)
        if not self.engines:
            raise ContractError("a publisher needs at least one engine; none was given")

    def replace(self, engine: EngineClient) -> None:
        """Add an engine, or put a restarted one in the place of its namesake. It may not serve before a full push."""
        _check_engine(engine)
        self.shape.check_tp(engine.tp)
        self.engines[engine.name] = engine
        self._unfit[engine.name] = "has had no full push since it started"

    def publish(self, directory: str | os.PathLike[str], version: PolicyVersion) -> None:
        """Bring all engines, poisoned and restarted ones included, to the weights in ``directory``, and let them serve.

        Raises:
            ContractError: ``version`` is no PolicyVersion, the directory does not hold it, of this model, intact, it is
                older than what is served, or a push is under way. No engine was touched.
            PublishError: an engine failed. Either none was paused and all go on as before (another publisher holds one
                of them), or all are poisoned and ``version`` stands where it was.
        """
        check_version("Publisher.publish", version)
        self._push(list(self.engines.values()), directory, version)
        self.version = version

    def heal(self, directory: str | os.PathLike[str]) -> list[str]:
        """Push the version being served to the engines that may not serve, leaving the others alone; their names."""
        if self.version is None:
            raise ContractError("nothing is published yet; publish a version to all engines first")
        lost = [engine for engine in self.engines.values() if self._why_not(engine)]
        if lost:
            self._push(lost, directory, self.version)
        return [engine.name for engine in lost]

    def serving(self) -> list[EngineClient]:
        """The engines that requests may go to: pushed, verified, unpoisoned, and still reporting the version."""
        return [engine for engine in self.engines.values() if not self._why_not(engine)]

    def check_serving(self) -> None:
        """Raise PublishError that names every engine requests must not go to."""
        failures = {name: why for name, engine in self.engines.items() if (why := self._why_not(engine))}
        if failures:
            raise PublishError("engines that need a full push before they may serve:", failures, self._reached())

    def verify(self) -> None:
        """Read the digests back from every serving engine and compare them with the version's.

        To be called after anything that may have replaced weights behind the label: sleep and wake, a reload.

        Raises:
            PublishError: an engine holds other bytes; those engines are poisoned.
        """
        if self.version is None:
            raise ContractError("nothing is published yet; there is no version to verify against")
        with self._exclusive():
            engines = self.serving()
            failures = self._attempt(engines, lambda engine: self._check_digests(engine, self._expected))
            if failures:
                wrong = [engine for engine in engines if engine.name in failures]
                self._poison(wrong, f"verification of {self.version} failed", failures)
                raise PublishError(f"engines do not hold the bytes of {self.version}:", failures, self._reached())
            self.check_serving()

    def _push(self, engines: Sequence[EngineClient], folder: str | os.PathLike[str], version: PolicyVersion) -> None:
        directory = path_of("Publisher", folder)
        with self._exclusive():
            self._check_order(version)
            started = time.monotonic()
            with read_weights(directory, version) as weights:
                if problems := self.shape.problems({e.name: e.shape for e in weights.manifest.entries}):
                    raise ContractError(f"{weights.path} is no {self.shape.architecture}: " + "; ".join(problems))
                expected = {tp: weights.shard_digests(self.shape, tp) for tp in sorted({e.tp for e in engines})}
                if self._expected and weights.algorithm != self._algorithm and len(engines) < len(self.engines):
                    raise ContractError(
                        f"this push is compared by {weights.algorithm}, the other engines by {self._algorithm}; "
                        "push the same way to all engines"
                    )
                self._algorithm = weights.algorithm
            started = self._record(State.PREPARED, version, started)
            self._claim(engines, f"{version}/{uuid.uuid4().hex}")
            try:
                self._steps(engines, directory, version, expected, started)
            except BaseException as error:
                reached = self._reached()
                self._record(State.FAILED, version, started)
                failures = error.failures if isinstance(error, PublishError) else {}
                self._poison(engines, f"push of {version} failed after {reached}: {error}", failures)
                if isinstance(error, PublishError):
                    raise PublishError(f"push of {version} failed after {reached}:", failures, reached) from error
                raise
            same = self.version is not None and version.matches(self.version)
            self._expected = {**self._expected, **expected} if same else expected
            for engine in engines:
                self._unfit.pop(engine.name, None)

    def _steps(
        self,
        engines: Sequence[EngineClient],
        directory: Path,
        version: PolicyVersion,
        expected: Mapping[int, Mapping[tuple[int, str], str]],
        started: float,
    ) -> None:
        label = str(version)
        before: dict[str, str] = {}

        def pause(engine: EngineClient) -> None:
            before[engine.name] = engine.weight_version()
            # from here on the engine may be half-written: it is fit again only when all of this has succeeded
            self._unfit[engine.name] = f"is in the middle of a push of {label}"
            engine.pause()

        def clear(engine: EngineClient) -> None:
            cleared = engine.clear_caches()
            if cleared is not True:
                raise RuntimeError(
                    f"caches were not cleared (clear_caches returned {cleared!r}); blocks are still held"
                )

        def check(engine: EngineClient) -> None:
            self._check_digests(engine, expected)
            if (now := engine.weight_version()) != before[engine.name]:
                raise RuntimeError(f"reports version {now!r} before it was published (was {before[engine.name]!r})")

        def finish(engine: EngineClient) -> None:
            engine.finish(label)
            if (now := engine.weight_version()) != label:
                raise RuntimeError(f"reports version {now!r} after finish({label!r})")

        for state, action in (
            (State.PAUSED, pause),
            (State.CACHES_CLEARED, clear),
            (State.TRANSFERRED, lambda engine: engine.transfer(directory, label)),
            (State.VERIFIED, check),
            (State.PUBLISHED, finish),
            (State.RESUMED, lambda engine: engine.resume()),
        ):
            failures = self._attempt(engines, action)
            if failures:
                raise PublishError(f"not every engine is {state}", failures, self._reached())
            started = self._record(state, version, started)

    def _claim(self, engines: Sequence[EngineClient], session: str) -> None:
        failures = self._attempt(engines, lambda engine: engine.begin(session))
        if failures:
            # an engine whose begin failed may still have taken the claim: its answer can be what was lost
            stuck = self._attempt(engines, lambda engine: engine.cancel(session))
            for name, what in stuck.items():
                failures[name] = f"{failures.get(name, '')} and could not be released ({what}); restart it".lstrip()
                self._unfit[name] = "could not be released after a failed claim; restart it"
            raise PublishError("engines could not be claimed, all go on as before:", failures, self._reached())

    def _attempt(self, engines: Sequence[EngineClient], action: Callable[[EngineClient], Any]) -> dict[str, str]:
        # every engine is tried, so that the error lists all that failed
        def one(engine: EngineClient) -> str | None:
            try:
                action(engine)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return None

        if self.parallel and len(engines) > 1:
            with ThreadPoolExecutor(max_workers=len(engines)) as pool:
                results = list(pool.map(one, engines))
        else:
            results = [one(engine) for engine in engines]
        return {engine.name: result for engine, result in zip(engines, results) if result is not None}

    def _poison(self, engines: Sequence[EngineClient], reason: str, failures: dict[str, str]) -> None:
        for engine in engines:
            self._unfit[engine.name] = f"is poisoned: {failures.get(engine.name) or reason}"
        for name, what in self._attempt(engines, lambda engine: engine.poison(reason)).items():
            failures[name] = f"{failures.get(name, '')} and could not be poisoned ({what}); stop it".lstrip()
            self._unfit[name] = "could not be poisoned; stop it and start another"

    def _why_not(self, engine: EngineClient) -> str | None:
        if engine.name in self._unfit:
            return self._unfit[engine.name]
        try:
            now = engine.weight_version()
        except Exception as error:
            return f"does not answer ({type(error).__name__}: {error})"
        return None if now == str(self.version) else f"reports version {now!r}, served is {self.version}"

    def _check_order(self, version: PolicyVersion) -> None:
        current = self.version
        if current is None or version.matches(current):
            return
        if version.run_id != current.run_id or version.step <= current.step:
            raise ContractError(
                f"version {version} does not follow {current}; publish a later step of the same run, or the same "
                "version again to heal engines"
            )

    def _record(self, state: State, version: PolicyVersion, started: float) -> float:
        now = time.monotonic()
        self.history.append(Transition(state, str(version), time.time(), now - started))
        return now

    def _reached(self) -> State | None:
        return self.history[-1].state if self.history else None

    def _check_digests(self, engine: EngineClient, expected: Mapping[int, Mapping[tuple[int, str], str]]) -> None:
        wrong = differing_shards(expected[engine.tp], engine.shard_digests(self._algorithm))
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise RuntimeError(f"{len(wrong)} shards do not hold the published bytes: {shown}")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ContractError("a push is under way in this publisher; wait for it")
        try:
            yield
        finally:
            self._busy.release()


def _check_engine(engine: object) -> None:
    # not isinstance, which from Python 3.12 on passes over what a proxy forwards
    if lacks := [name for name in vars(EngineClient) if not name.startswith("_") and not hasattr(engine, name)]:
        raise ContractError(
            f"{engine!r:.80} is no engine: it lacks {', '.join(lacks)}; supported: any vime_sync.EngineClient"
        )


def differing_shards(expected: Mapping[tuple[int, str], str], reported: Mapping[tuple[int, str], str]) -> list[str]:
    """``rank R name (missing | extra | other bytes)`` for every shard in which an engine's report differs."""
    found = [f"rank {rank} {name} (missing)" for rank, name in expected if (rank, name) not in reported]
    found += [f"rank {rank} {name} (extra)" for rank, name in reported if (rank, name) not in expected]
    found += [
        f"rank {rank} {name} (other bytes)"
        for (rank, name), digest in expected.items()
        if reported.get((rank, name), digest) != digest
    ]
    return found


def verify(
    engines: Iterable[EngineClient], hf_tensors: Mapping[str, torch.Tensor], shape: ModelShape
) -> dict[str, list[str]]:
    """Differing shards by engine name: what engines hold against ``hf_tensors`` (in memory, or from ``read_weights``).

    An engine that is bitwise right has an empty list. Nothing is poisoned; ``Publisher.verify`` does that.
    """
    engines = list(engines)
    for engine in engines:
        _check_engine(engine)
    expected: dict[int, dict[tuple[int, str], str]] = {}
    found: dict[str, list[str]] = {}
    for engine in engines:
        if engine.tp not in expected:
            expected[engine.tp] = shard_digests(hf_tensors, shape, engine.tp)
        found[engine.name] = differing_shards(expected[engine.tp], engine.shard_digests())
    return found
