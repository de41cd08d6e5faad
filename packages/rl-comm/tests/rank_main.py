"""Ranks of one world over gloo, on which every check runs: ``python rank_main.py WORLD FOLDER``.

They are forked before this process has made a thread or a group: eight processes that import torch on two cores take
longer than all that is checked here.
"""

import importlib
import json
import os
import sys
from datetime import timedelta

import rank_boards
import rank_refusals
import rank_values
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_contract import launches, reset_launches

CHECKS = [
    rank_values.check_reductions,
    rank_values.check_fp16_results,
    rank_values.check_r38_size_never_decides,
    rank_values.check_movement,
    rank_values.check_several_at_once,
    rank_refusals.check_refusals,
    rank_refusals.check_one_rank_refuses,
    rank_refusals.check_told,
    rank_refusals.check_numbers,
    rank_refusals.check_modes,
    rank_refusals.check_two_over_one_group,
    rank_values.check_many_small_calls,
]
ONCE = [
    rank_values.check_backward,
    rank_refusals.check_groups,
    rank_refusals.check_choice,
    rank_boards.check_board,
    rank_boards.check_devices,
]
PAIR = [
    rank_values.check_compiled,
    rank_boards.check_unheard,
    rank_refusals.check_absent_peer,
    rank_refusals.check_interrupted,
    rank_boards.check_board_told,
]


def run_rank(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    reset_launches()
    for check in CHECKS + ONCE + (PAIR if world == 2 else []):
        check(rank, world)
    if world < 8:
        rank_values.transport = "gloo"
        for check in CHECKS + ([rank_values.check_compiled, rank_refusals.check_swapped] if world == 2 else []):
            check(rank, world)
        rank_values.transport = "shared_memory"
    if rank == 0:
        with open(os.path.join(folder, "launches.json"), "w") as f:
            json.dump(launches(), f)
    if world == 2:
        rank_refusals.check_ended_peer(rank, world)
        return
    dist.destroy_process_group()


if __name__ == "__main__":
    # what a first op imports costs a second; forked ranks have it from here
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"
    mp.start_processes(run_rank, (int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]), start_method=method)
