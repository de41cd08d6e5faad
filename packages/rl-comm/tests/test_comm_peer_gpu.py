"""Peer memory on a GPU, as compiled: processes that share one take turns on it, and map one another's memory."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "rank_one_gpu.py"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]


def on_one_gpu(folder, world, timeout_s):
    def rank(number):
        command = [sys.executable, "-W", "ignore", str(PROGRAM), str(number), str(world), str(folder), str(timeout_s)]
        return subprocess.run(command, capture_output=True, text=True, timeout=180)

    with ThreadPoolExecutor(world) as pool:
        done = list(pool.map(rank, range(world)))
    assert all(x.returncode == 0 for x in done), [x.stderr[-1500:] for x in done]
    return done


@pytest.mark.parametrize(("world", "replays"), [(2, 20), (4, 4)])
def test_processes_that_share_a_gpu_get_the_trees_bits(tmp_path, world, replays):
    done = on_one_gpu(tmp_path, world, 120.0)
    said = done[0].stdout.splitlines()
    assert all(x.stdout.splitlines() == said for x in done)
    each = 1 + 7 + 4095 + 4096 + 4097 + 33 * 130 + 1664 * 5120
    each += 2048 * 5120 + 5003 * 1001 if world == 2 else 0
    replayed = replays * (64 * 4096 + 4096 + 4097 + 1664 * 5120)
    ways = ["all_gather bytes", "all_reduce one-shot", "all_reduce two-shot"]
    assert said == [
        f"compared {3 * 2 * each}",
        f"replayed {replayed} {replayed}",
        str([f"rl_comm.peer_memory.{way}" for way in ways]),
    ]


def test_a_replay_whose_peer_does_not_come_ends_in_an_error_that_says_so(tmp_path):
    first, _ = on_one_gpu(tmp_path, 2, 2.0)
    assert first.stdout.splitlines() == ["failed in time"]
    assert "no peer came: one has ended, or makes another call" in first.stderr
