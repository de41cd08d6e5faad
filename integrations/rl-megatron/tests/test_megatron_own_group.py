"""Trainers in a process group that the caller has joined: it serves and stays, and what one rank refuses all refuse."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rl_megatron import ParallelConfig

OWN_GROUP = """
import sys
from datetime import timedelta
import torch.distributed as dist
from rl_contract import ContractError
from rl_megatron import ParallelConfig, topology

rank, folder = int(sys.argv[1]), sys.argv[2]

def said(call):
    try:
        call()
    except ContractError as error:
        return str(error)
    return "went on"

# as of a stack that has joined its ranks by NCCL alone, which moves no CPU tensor
dist.init_process_group("gloo", init_method="file://" + folder, rank=rank, world_size=2,
    timeout=timedelta(seconds=20))
dist.get_backend_config = lambda group=None: "cuda:nccl"
made, new_group = [], dist.new_group
def counted(*args, **kwargs):
    if kwargs.get("backend"):
        made.append((kwargs["backend"], kwargs["timeout"].seconds))
    return new_group(*args, **kwargs)
dist.new_group = counted
print(said(lambda: topology.start(1 - rank, ParallelConfig(tp=2), "file:///nowhere")))
print(said(lambda: topology.start(0, ParallelConfig(), "file:///nowhere")))
topology.start(rank, ParallelConfig(tp=2), "file:///nowhere")
gather, gathered = dist.all_gather, []
def noted(rows, mine, group=None):
    gathered.append(group is not None and group is not dist.group.WORLD)
    return gather(rows, mine, group=group)
dist.all_gather = noted
topology.agree({"profile": "a"})
print(said(lambda: topology.agree({"profile": "ab"[rank]})))
def refuses():
    if rank:
        raise ContractError("no")
    return 3
print(said(lambda: topology.together(refuses)))
print(topology.together(lambda: 3), made, set(gathered))
topology.stop()
topology.stop()
# it is the caller's
dist.barrier()
print(dist.get_world_size())
topology.start(rank, ParallelConfig(cp=2), "file:///nowhere")
topology.agree({"profile": "a"})
topology.stop()
print(len(made))
dist.destroy_process_group()
"""


@pytest.mark.engine
def test_a_group_of_the_callers_own_serves_and_stays(tiny: Any, tmp_path: Path) -> None:
    for rank, text in enumerate(tiny.said_by_two(OWN_GROUP, tmp_path)):
        said = text.splitlines()
        # each says its own where both refuse
        assert said[0].startswith(f"topology.start got rank {1 - rank} of 2 (tp=2, cp=1), but this process has joined")
        assert f"as rank {rank} of 2; supported: the same" in said[1]
        assert "rank 1 has profile='b', rank 0 'a'" in said[2]
        told = "rank 1 refuses this call, which all ranks make together: ContractError: no"
        assert said[3] == ("no" if rank else told)
        # one group of gloo beside it, whatever is agreed on
        assert said[4] == "3 [('gloo', 20)] {True}"
        assert said[5:] == ["2", "1"]


REFUSALS = """
import json, pickle, sys, time
from datetime import timedelta
import torch.distributed as dist
from rl_megatron import ParallelConfig, TrainerRank, topology

rank, init = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + init, rank=rank, world_size=2, timeout=timedelta(seconds=60))
job = pickle.load(open(init + ".job", "rb"))
right = {"rank": rank, "parallel": ParallelConfig(tp=2), "init_method": "file:///nowhere/init"}
wrong = [
    {"device": "cuda:99"},
    {"device": "tpu"},
    {"rank": 0},
    {"rank": "1"},
    {"parallel": ParallelConfig(cp=2)},
    {"parallel": ParallelConfig(tp=4)},
    {"init_method": "foo://x"},
    {"share_gpu": 1},
]

def told(call):
    began = time.monotonic()
    try:
        call()
        said = None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert time.monotonic() - began < 30, said
    print(json.dumps(said), flush=True)

for other in wrong:
    told(lambda: topology.start(**right | (other if rank else {})))
topology.start(**right)
if rank == 0:
    topology.stop()
told(lambda: topology.start(**right))
topology.stop()
for other in job["wrong"]:
    told(lambda: TrainerRank(**job["trainer"] | right | (other if rank else {})).init())
# a rank that makes another call
told(lambda: topology.start(**right) if rank else topology.together(lambda: 3, lambda _: {"call": b"logprobs"}))
trainer = TrainerRank(**job["trainer"] | right)
print(trainer.init()["tp"])
trainer.close()
dist.barrier()
"""


@pytest.mark.engine
def test_what_one_rank_refuses_of_a_group_joined_before_is_refused_by_all_at_once(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    job = {
        "trainer": {
            "hf_path": tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config)),
            "profile": tiny.tiny_profile(config),
        },
        "wrong": [
            {"profile": tiny.tiny_profile(config, vocab_size=1000)},
            {"hf_path": str(tmp_path / "none")},
            # a cut of the same size that the model has not, and one of another
            {"profile": tiny.tiny_profile(config, leaves=1)},
            {"parallel": ParallelConfig()},
            {"device": "cuda"},
        ],
    }
    (tmp_path / "init.job").write_bytes(pickle.dumps(job))
    refused = [
        "MissingSupport: device='cuda",
        "ContractError: device='tpu'; supported",
        "ContractError: topology.start got rank 0 of 2 (tp=2, cp=1), but this process has joined",
        "ContractError: topology.start: rank='1', supported: an integer",
        None,
        "ContractError: topology.start got rank 1 of 4 (tp=4, cp=1), but this process has joined",
        "ContractError: topology.start: init_method='foo://x': torch.distributed knows no 'foo'",
        "ContractError: topology.start: share_gpu=1, supported: a bool",
        "ContractError: this process already holds a Megatron parallel state",
        "ContractError: rl-megatron: the checkpoint has vocab_size=",
        f"ContractError: {tmp_path}/none/config.json can't be read",
        "ContractError: rl-megatron: tp=2 does not divide the profile's leaves=1",
        "ContractError: rank 1 with tp=1 and cp=1; supported: 0 to 0",
        "MissingSupport: device='cuda'",
    ]
    for rank, text in enumerate(tiny.said_by_two(REFUSALS, tmp_path)):
        *said, other, tp = map(json.loads, text.splitlines())
        for words, told in zip(refused, said, strict=True):
            if words is None:
                assert "rank 1 has parallel=ParallelConfig(tp=1, cp=2), rank 0 ParallelConfig(tp=2, cp=1)" in told
            else:
                alone = "" if rank else "ContractError: rank 1 refuses this call, which all ranks make together: "
                assert told.startswith(alone + words)
        assert other.startswith("ContractError: rank 1 has other call than rank 0")
        assert tp == 2


LATE = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from megatron.core import parallel_state
from rl_megatron import ParallelConfig, topology

rank, init = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + init, rank=rank, world_size=2, timeout=timedelta(seconds=3))

def started():
    began = time.monotonic()
    try:
        topology.start(rank, ParallelConfig(tp=2), "file:///nowhere")
    except Exception as error:
        print(type(error).__name__, str(error).partition(" (")[0])
    else:
        print("went on")
    print(time.monotonic() - began)

if rank:
    # it agrees to all, and does not come to the groups that are made next
    parallel_state.initialize_model_parallel = lambda **_: None
    started()
    while not os.path.exists(init + ".done"):
        time.sleep(0.1)
else:
    started()
    started()
    open(init + ".done", "w").close()
"""


@pytest.mark.engine
def test_a_peer_that_does_not_come_is_waited_for_as_long_as_its_group_says(tiny: Any, tmp_path: Path) -> None:
    first, second = (text.splitlines() for text in tiny.said_by_two(LATE, tmp_path))
    assert second[0] == "went on"
    assert first[2] == "RuntimeError not all 2 ranks made this call"
    assert first[0] != "went on"
    assert all(float(seconds) < 30 for seconds in first[1::2])


LATER = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rl_megatron import ParallelConfig, topology

rank, init = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + init, rank=rank, world_size=2, timeout=timedelta(seconds=3))
topology.start(rank, ParallelConfig(tp=2), "file:///nowhere")
comm = topology.tensor_parallel()
print(comm.transport, comm.all_reduce(torch.ones(2)).tolist())

# as of a group of NCCL alone, beside which one for the host is made
group, given = parallel_state.get_tensor_model_parallel_group(), []
backends, real = dist.get_backend_config, topology.TreeCommunicator
dist.get_backend_config = lambda group=None: "cuda:nccl"
topology.TreeCommunicator = lambda group, **options: given.append(options) or group
topology._communicators.clear()
topology.communicator(group)
host = given[0]["host_group"]
print(given[0]["timeout_s"], topology._timeout(host), dist.get_process_group_ranks(host))

# a backend that does not say how long it waits, and one without a limit
for found in (None, timedelta(0)):
    topology._communicators.clear()
    topology._timeout = lambda group: found
    topology.communicator(group)
    print(given[-1].get("timeout_s"))

if rank:
    while not os.path.exists(init + ".done"):
        time.sleep(0.1)
else:
    began = time.monotonic()
    try:
        comm.all_reduce(torch.ones(2))
    except RuntimeError as error:
        print(error)
    print(time.monotonic() - began)
    open(init + ".done", "w").close()
"""


@pytest.mark.engine
def test_a_peer_that_does_not_come_to_a_later_call_is_waited_for_no_longer(tiny: Any, tmp_path: Path) -> None:
    first, second = (text.splitlines() for text in tiny.said_by_two(LATER, tmp_path))
    *both, said, seconds = first
    assert both == second == ["shared_memory [2.0, 2.0]", "3.0 0:00:03 [0, 1]", "None", "inf"]
    assert said.startswith("rank 1 did not make this call within 3 s")
    assert float(seconds) < 30
