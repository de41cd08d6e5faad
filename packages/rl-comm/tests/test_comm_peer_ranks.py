"""Everything that a GPU's call goes through but the GPU: agreement, peer memory in one step and two, NCCL's place."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "rank_peers.py"
PEER, NCCL = (f"rl_comm.{name}.all_reduce" for name in ("peer_memory", "nccl"))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_get_the_trees_bits_and_are_told_of_one_another(tmp_path, world):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter needs a process without a GPU")
    (tmp_path / "memory").write_bytes(bytes(1 << 20))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def rank(number):
        command = [sys.executable, "-W", "ignore", str(PROGRAM), str(number), str(world), str(tmp_path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)

    with ThreadPoolExecutor(world) as pool:
        done = list(pool.map(rank, range(world)))
    assert all(x.returncode == 0 for x in done), [x.stderr[-1500:] for x in done]
    said = done[0].stdout.splitlines()
    assert all(x.stdout.splitlines() == said for x in done)
    assert said == [
        # nothing at all is NCCL's
        f"None {[(NCCL, 'one-shot'), (PEER, 'one-shot'), (PEER, 'two-shot')]}",
        f"0 {[(NCCL, 'two-shot'), (PEER, 'two-shot')]}",
        # what is more than a slot takes two steps, whatever was asked for
        f"{1 << 30} {[(NCCL, 'one-shot'), (PEER, 'one-shot'), (PEER, 'two-shot')]}",
        f"compared {3 * 2 * (1 + 7 + 1024 + 33 * 130 + 1 + 1 + 0 + 4200 + 5000)}",
    ]
