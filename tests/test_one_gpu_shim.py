"""tools/two_gpus --one-gpu: every process is a host of its own on the first GPU, its workers too."""

import json
import os
import subprocess
import sys
from pathlib import Path

SHIM = Path(__file__).parents[1] / "tools" / "one_gpu"
MODULES = {
    "vllm/__init__.py": "",
    "vllm/platforms/__init__.py": "",
    "vllm/platforms/cuda.py": "class CudaPlatform:\n    @classmethod\n    def device_count(cls):\n        return 1\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_worker.py": (
        "class Worker:\n    local_rank = 1\n    def init_device(self):\n        return self.local_rank\n"
    ),
}
PROGRAM = """
import json, os, sys
import rl_comm.peer_joining, rl_megatron.topology, rl_parity.gpus, rl_parity.placement
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.worker.gpu_worker import Worker

rl_parity.gpus._query = lambda: "0, GPU-a, H200, 143771, 143000, 9.0, 580\\n"
found = rl_parity.gpus.visible()
child = os.fork()
if not child:
    os._exit(os.environ["NCCL_HOSTID"] != f"process {os.getpid()}")
driver = rl_comm.peer_joining.Driver.__new__(rl_comm.peer_joining.Driver)
placed = rl_parity.placement.Placement(kind="x", gpus=tuple(found), trainers=(0, 1), engines=((0, 1),))
print(json.dumps([
    [gpu.uuid for gpu in found], [gpu.index for gpu in found], Worker().init_device(), CudaPlatform.device_count(),
    driver.reaches(0, "any"), rl_megatron.topology._refuse_one_gpu_for_two(None),
    placed.engine_devices(0), placed.trainer_devices(1), placed.backend,
    os.environ["NCCL_HOSTID"] == f"process {os.getpid()}", os.waitpid(child, 0)[1],
]))
"""


def started(tmp_path, **more):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [str(SHIM), str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NCCL_HOSTID": "the parent's", **more}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    return done


def test_two_ranks_take_one_gpu(tmp_path):
    done = started(tmp_path, RL_ONE_GPU="1")
    assert done.returncode == 0, done.stderr[-1500:]
    assert json.loads(done.stdout) == [["GPU-a", "GPU-a again"], [0, 0], 0, 2, True, None, "0", "0", "nccl", True, 0]


def test_nothing_is_changed_unasked(tmp_path):
    done = started(tmp_path, RL_ONE_GPU="")
    assert done.returncode == 1
    # it goes on to ask a driver that is not there
    assert "_call" in done.stderr
