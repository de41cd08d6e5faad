"""Operators over real process groups, of which one rank alone is given what it can't use: no peer waits for it.

The ranks are children of this file run as a script.
"""

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rl_attn
import rl_gemm
import rl_logprob.draw
import rl_norm
from rl_comm import TreeCommunicator
from rl_contract import ContractError, TokenShards

WORLD, PATIENCE_S = 2, 30


def operators(comm, tokens, bad):
    """(what, call): each call ends in a collective of ``comm``; where ``bad`` it can't use what it is given."""
    x = torch.randn(4, 64).bfloat16()
    wide = torch.randn(32, 64).bfloat16()
    grad = {"requires_grad": True}

    def column(**given):
        leaf = x.half() if bad else x.clone().requires_grad_()
        rl_gemm.column_parallel_linear(leaf, wide, comm=comm, leaves=WORLD, **given).float().sum().backward()

    def column_backward():
        weight = wide.clone().requires_grad_()
        if bad:
            weight.main_grad = "none"
        rl_gemm.column_parallel_linear(x.clone().requires_grad_(), weight, comm=comm, leaves=WORLD).sum().backward()

    def swiglu():
        leaf = x[:, :63] if bad else x.clone().requires_grad_()
        rl_gemm.gate_up_swiglu(leaf, wide, comm=comm, leaves=WORLD).float().sum().backward()

    def norm():
        weight = torch.ones(16, dtype=torch.bfloat16, **grad)
        rl_norm.rms_norm(x.view(4, 4, 16), weight, "1" if bad else 1e-6, comm=comm, leaves=WORLD).sum().backward()

    def norm_tokens():
        weight = torch.ones(64, dtype=torch.bfloat16, **grad)
        rl_norm.rms_norm(x[:3] if bad else x, weight, 1e-6, tokens=tokens).sum().backward()

    def logprob(**given):
        targets = torch.tensor([1, 2, 3, 4000 if bad else 4])
        head = torch.ones(512, 64).bfloat16()
        rl_logprob.linear_logprob(x, head, targets, vocab_size=1000, comm=comm, leaves=WORLD, **given)

    def draw():
        seeds = torch.arange(4)
        rl_logprob.draw.draw_scored(
            torch.randn(4, 150), seeds, seeds, torch.ones(4), seeds.int() if bad else seeds * 0, vocab_size=300,
            bad=torch.zeros(1, dtype=torch.int64), out=torch.zeros(3, 4, dtype=torch.int64), comm=comm,
        )  # fmt: skip

    def attention():
        q = torch.randn(4, 2, 32).bfloat16()
        cu = torch.tensor([0, 6 if bad else 8])
        rl_attn.context_parallel_attention(q, q, q, cu_seqlens=cu, comm=comm, scale=0.1)

    return {
        "row": lambda: rl_gemm.row_parallel_linear(x.half() if bad else x, wide, comm=comm, leaves=WORLD),
        "row, no tensor": lambda: rl_gemm.row_parallel_linear(None if bad else x, wide, comm=comm, leaves=WORLD),
        "row, leaves": lambda: rl_gemm.row_parallel_linear(x, wide, comm=comm, leaves=3 if bad else WORLD),
        "column": column,
        "column, backward": column_backward,
        "swiglu": swiglu,
        "norm": norm,
        "norm over tokens": norm_tokens,
        "logprob": logprob,
        "logprob, temperature": lambda: logprob(temperature=-1.0 if bad else 1.0),
        "draw": draw,
        "attention": attention,
    }


def run_rank(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    for transport in ("shared_memory", "gloo"):
        comm = TreeCommunicator(transport=transport, timeout_s=PATIENCE_S)
        tokens = TokenShards(comm, [torch.arange(4), torch.arange(4, 8)])
        for odd in range(WORLD):
            for what, call in operators(comm, tokens, rank == odd).items():
                began = time.monotonic()
                with pytest.raises(Exception) as raised:
                    call()
                assert isinstance(raised.value, ContractError), (what, raised.value)
                told = f"rank {odd} has refused an operator that would have called"
                assert (told in str(raised.value)) == (rank != odd), (what, raised.value)
                assert time.monotonic() - began < PATIENCE_S / 2, what
                # in step again, with the right value
                assert float(comm.all_reduce(torch.ones(1))) == WORLD, what
        # refused by all alike, and inside a compiler's trace on one rank: nothing is left behind
        with pytest.raises(ContractError, match=r"x is torch\.float16"):
            rl_gemm.row_parallel_linear(torch.ones(4, 64).half(), torch.ones(32, 64).half(), comm=comm, leaves=WORLD)
        if rank == 0:
            compiled = torch.compile(rl_gemm.row_parallel_linear, backend="eager", fullgraph=True)
            with pytest.raises(Exception, match="float16"):
                compiled(torch.ones(4, 64).half(), torch.ones(32, 64).half(), comm=comm, leaves=WORLD)
        assert float(comm.all_reduce(torch.ones(1))) == WORLD
    # gloo's own thread gives back what the last call moved, for which it needs an interpreter that still runs
    time.sleep(0.2)
    dist.destroy_process_group()


def test_bad_input_on_one_rank_is_told_to_its_peers(tmp_path):
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    mp.spawn(run_rank, (sys.argv[1],), nprocs=WORLD)
