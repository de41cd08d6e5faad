"""Workers as Ray actors on a private, small Ray instance: no dashboard, no reserved CPUs, a tiny object store."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rl_parity.launch.base import Gone, Pending, WorkerFailure, build, failure, redirect_output, tail
from rl_parity.launch.signals import ENDING, interrupt, shield
from rl_parity.launch.traces import remove_folder, scratch_folder


class _Actor:
    """Lives in the actor process; imports nothing heavy before its environment is set."""

    def __init__(self, factory: str, kwargs: dict[str, Any], env: dict[str, str], log: str) -> None:
        os.environ.update(env)
        # Ray has asked for the folder already, and it is remembered
        tempfile.tempdir = None
        redirect_output(Path(log))
        self._target = build(factory, kwargs)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self._target, method)(*args, **kwargs)


class _Call:
    def __init__(self, worker: "RayWorker", reference: Any) -> None:
        self.worker, self.reference = worker, reference

    def result(self, timeout: float | None = None) -> Any:
        try:
            return ray.get(self.reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise WorkerFailure(self.worker.describe(f"no answer within {timeout} s")) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            raise WorkerFailure(self.worker.describe(f"{type(cause).__name__}: {cause}")) from None
        except ray.exceptions.RayActorError as error:
            raise failure(self.worker, Gone(f"the process ended ({type(error).__name__}: {error})")) from None
        except ray.exceptions.RayError as error:
            raise WorkerFailure(self.worker.describe(f"{type(error).__name__}: {error}")) from None


class RayWorker:
    def __init__(self, name: str, actor: Any, log: Path) -> None:
        self.name, self.actor, self.log = name, actor, log

    def call(self, method: str, *args: Any, **kwargs: Any) -> _Call:
        return _Call(self, self.actor.call.remote(method, args, kwargs))

    def describe(self, what: str) -> str:
        return f"{self.name}: {what}\n--- last lines of {self.log} ---\n{tail(self.log)}"


class RayLauncher:
    """Starts Ray on this machine and ends it with the run."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs.resolve()
        self._workers: list[RayWorker] = []
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # a private instance that ends with the run needs no token
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        handlers = {number: signal.getsignal(number) for number in ENDING}
        self._session = scratch_folder()
        try:
            # RAY_ADDRESS must not draw the run into a cluster that someone else owns
            ray.init(
                address="local",
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=96 * 2**20,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self._session),
            )
        except BaseException as error:
            _restore(handlers)
            self.close()
            if isinstance(error, SystemExit):
                # Ray's own answer to SIGTERM
                interrupt()
            raise
        # Ray puts its own in place, which end the driver before it can end its workers
        _restore(handlers)

    def start(self, name: str, factory: str, *, env: Mapping[str, str], kwargs: Mapping[str, Any]) -> RayWorker:
        log = self._logs / f"{name}.log"
        actor = ray.remote(num_cpus=0, max_restarts=0)(_Actor).remote(factory, dict(kwargs), dict(env), str(log))
        worker = RayWorker(name, actor, log)
        self._workers.append(worker)
        return worker

    def wait(self, calls: Sequence[Pending], timeout: float | None) -> list[Any]:
        mine: list[_Call] = [c for c in calls if isinstance(c, _Call)]
        deadline = None if timeout is None else time.monotonic() + timeout
        by_reference = {c.reference: c for c in mine}
        left = list(by_reference)
        while left:
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, left = ray.wait(left, num_returns=1, timeout=patience)
            if not ready:
                names = ", ".join(sorted({by_reference[r].worker.name for r in left}))
                first = by_reference[left[0]].worker
                raise WorkerFailure(first.describe(f"no answer within {timeout} s (waiting for {names})"))
            for reference in ready:
                by_reference[reference].result()
        return [c.result() for c in mine]

    def close(self) -> None:
        with shield():
            try:
                for worker in self._workers:
                    ray.kill(worker.actor)
                self._workers.clear()
            finally:
                try:
                    ray.shutdown()
                finally:
                    remove_folder(self._session)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)
