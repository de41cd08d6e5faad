"""For ``tools/two_gpus --one-gpu``: every process of a test takes GPU 0, and what refuses two ranks on one lets them.

Python imports this at its start where this folder is on PYTHONPATH, in workers of vLLM and of rl-parity too. NCCL
refuses a GPU that two ranks of one host have, so each process says that it is a host of its own: bytes then go through
sockets, and kernels of two processes take turns. Bits are those of two GPUs; times mean nothing.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

FLAG = "RL_ONE_GPU"


def host_of_its_own() -> None:
    os.environ.update(
        NCCL_HOSTID=f"process {os.getpid()}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1"
    )


def _workers_on_the_first(module: Any) -> None:
    initialise = module.Worker.init_device

    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.local_rank = 0
        return initialise(self, *args, **kwargs)

    module.Worker.init_device = init_device


def _as_if_two(module: Any) -> None:
    module.CudaPlatform.device_count = classmethod(lambda cls: 2)


def _any_gpu_for_any_rank(module: Any) -> None:
    module._refuse_one_gpu_for_two = lambda place: None


def _listed_twice(module: Any) -> None:
    listed = module.visible

    def visible(*args: Any, **kwargs: Any) -> list[Any]:
        (gpu,) = listed(*args, **kwargs)[:1]
        return [gpu, replace(gpu, uuid=f"{gpu.uuid} again")]

    module.visible = visible


def _engines_see_one(module: Any) -> None:
    module.Placement.engine_devices = lambda self, engine: str(self.gpus[0].index)


def _peers_of_one_gpu(module: Any) -> None:
    """Peer memory goes by the addresses of GPUs, which processes then have of their own."""
    current = module.Driver.current

    def own(self: Any) -> tuple[int, str]:
        device, bus = current(self)
        return device, f"{bus}-{os.getpid()}"

    module.Driver.current = own
    module.Driver.reaches = lambda self, device, peer: True


def _first_again(module: Any) -> None:
    """rl_megatron finds its own modules before anyone else does."""
    install = module.install

    def installed() -> None:
        install()
        sys.meta_path.remove(changing)
        sys.meta_path.insert(0, changing)

    module.install = installed


CHANGES: dict[str, Callable[[Any], None]] = {
    "rl_comm.peer_joining": _peers_of_one_gpu,
    "rl_megatron.imports": _first_again,
    "rl_megatron.topology": _any_gpu_for_any_rank,
    "rl_parity.gpus": _listed_twice,
    "rl_parity.placement": _engines_see_one,
    "vllm.platforms.cuda": _as_if_two,
    "vllm.v1.worker.gpu_worker": _workers_on_the_first,
}


class Changing(importlib.abc.MetaPathFinder):
    """Lets others find a module of CHANGES, and changes it once it is executed."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = CHANGES.get(name)
        if change is None or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


changing = Changing()
if os.environ.get(FLAG):
    host_of_its_own()
    os.register_at_fork(after_in_child=host_of_its_own)
    sys.meta_path.insert(0, changing)
