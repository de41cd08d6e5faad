"""The head's log-probability over real process groups: rl-logprob on rl-comm, every rank in its own process.

The ranks are children of this file run as a script; each compares itself with the one-rank result it computes alone.
"""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rl_logprob as lp
from rl_comm import TreeCommunicator
from rl_contract import ContractError

VOCAB, TILE, LEAVES = 1000, 16, 8


def bits(x):
    return x.contiguous().view(torch.uint8)


def scored(hidden, weight, targets, grads, comm=None):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    kw = {"vocab_size": VOCAB, "vocab_tile": TILE, "temperature": 0.7, "comm": comm, "leaves": LEAVES}
    logp, entropy = lp.linear_logprob(hidden, weight, targets, return_entropy=True, **kw)
    (logp * grads[0] + entropy * grads[1]).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def run_rank(rank, world, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    comm = TreeCommunicator()
    g = torch.Generator().manual_seed(0)
    padded = lp.padded_vocab_size(VOCAB, TILE)
    for dtype in (torch.bfloat16, torch.float32):
        hidden = torch.randn(67, 40, generator=g).to(dtype)
        weight = (torch.randn(padded, 40, generator=g) * 0.3).to(dtype)
        targets = torch.randint(0, VOCAB, (67,), generator=g)
        grads = torch.randn(2, 67, generator=g)
        want = scored(hidden, weight, targets, grads)
        got = scored(hidden, weight.chunk(world)[rank], targets, grads, comm)
        for a, b in zip(got[:3], want[:3]):
            assert torch.equal(bits(a), bits(b))
        assert torch.equal(bits(got[3]), bits(want[3].chunk(world)[rank]))

    # shards that are not equal: an error on every rank, and the group stays usable
    rows = weight[: TILE * 8] if rank == 0 else weight[: padded // 2]
    with pytest.raises(ContractError, match="rank 1 has all_gather"):
        lp.linear_logprob(hidden, rows, targets % 100, vocab_size=100, vocab_tile=TILE, comm=comm, leaves=world)
    comm.barrier()
    dist.destroy_process_group()


@pytest.mark.field_report("R41")
@pytest.mark.parametrize("world", [2, 4])
def test_layout_head_over_gloo_equals_one_rank(world, tmp_path):
    command = [sys.executable, __file__, str(world), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    mp.spawn(run_rank, (int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]))
