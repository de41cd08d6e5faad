"""Worker processes behind one small interface: plain local processes, or Ray actors."""

from collections.abc import Callable
from pathlib import Path

from rl_contract import ContractError
from rl_parity.launch.base import Launcher, Pending, Worker, WorkerFailure, WorkerGone, wait_all

__all__ = ["Launcher", "Pending", "Worker", "WorkerFailure", "WorkerGone", "make_launcher", "wait_all"]


def make_launcher(kind: str, logs: Path) -> Launcher:
    """A launcher of the given kind, whose workers write their output under ``logs``.

    Raises:
        ContractError: no launcher has that name.
    """
    makers: dict[str, Callable[[Path], Launcher]] = {"local": _local, "ray": _ray}
    if kind not in makers:
        raise ContractError(f"--launcher {kind}: unknown; supported are {', '.join(makers)}")
    return makers[kind](logs)


def _local(logs: Path) -> Launcher:
    from rl_parity.launch.local import LocalLauncher

    return LocalLauncher(logs)


def _ray(logs: Path) -> Launcher:
    from rl_parity.launch.ray_actors import RayLauncher

    return RayLauncher(logs)
