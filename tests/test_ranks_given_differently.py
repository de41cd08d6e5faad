"""Operators over real process groups whose ranks are given different values: every rank is told, and none goes on.

What would come of it is one wrong number on all ranks alike. The ranks are children of this file run as a script.
"""

import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rl_logprob as lp
from rl_comm import TreeCommunicator
from rl_contract import ContractError
from rl_logprob import draw

WORLD, VOCAB, TILE, ROWS, WIDTH = 2, 1000, 16, 5, 24

g = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(ROWS, WIDTH, generator=g).bfloat16()
HEAD = torch.randn(1024, WIDTH, generator=g).bfloat16()
TARGETS = torch.randint(0, VOCAB - 1, (ROWS,), generator=g)
BAD = HIDDEN.index_fill(0, torch.tensor([3]), torch.nan)
BY_ROW = torch.rand(ROWS, generator=g) + 0.5
LOGITS = torch.randn(ROWS, VOCAB, generator=g)
SEEDS = torch.arange(ROWS)


def scored(comm, temperature=0.7, targets=TARGETS, hidden=HIDDEN, leaves=8, dtype=torch.bfloat16, **given):
    hidden, head = hidden.to(dtype), HEAD.to(dtype)
    head = head if comm is None else head.chunk(WORLD)[comm.rank]
    given = {"vocab_size": VOCAB, "vocab_tile": TILE, "return_entropy": True, **given}
    found = lp.linear_logprob(hidden, head, targets, comm=comm, temperature=temperature, leaves=leaves, **given)
    return torch.stack(found if isinstance(found, tuple) else (found, found))


def drawn(comm, seeds=SEEDS, temperature=BY_ROW, kinds=SEEDS % 2, positions=SEEDS, rows=ROWS, **given):
    logits = LOGITS if comm is None else LOGITS[:, comm.rank * 500 : comm.rank * 500 + 500]
    out, bad = torch.full((3, rows), -7), torch.zeros(1, dtype=torch.int64)
    batch = [x[:rows] for x in (logits, seeds, positions, temperature, kinds)]
    draw.draw_scored(*batch, **{"vocab_size": VOCAB, **given}, bad=bad, out=out, comm=comm)
    return out


def support(top_k, kind="key"):
    key = lp.sampling_support(LOGITS, vocab_size=VOCAB, temperature=0.7, top_k=top_k)
    return key if kind == "key" else key.ids(LOGITS, vocab_size=VOCAB, temperature=0.7)


def differing():
    """(operator, what most ranks are given, what one is given, what of it that rank says)."""
    one = {"hidden": HIDDEN[:0], "targets": TARGETS[:0]}
    return [
        (scored, {}, {"temperature": 0.8}, r"linear_logprob\(vocab_size=1000, .*temperature=0\.8"),
        (scored, {}, {"temperature": BY_ROW}, r"temperature=float32 \[5\] \(check "),
        (scored, {"temperature": BY_ROW}, {"temperature": BY_ROW.flip(0)}, r"temperature=float32 \[5\]"),
        (scored, {}, {"leaves": 4}, "leaves=4"),
        (scored, {}, {"vocab_size": VOCAB - 1}, "vocab_size=999"),
        (scored, {}, {"vocab_tile": 2 * TILE}, "vocab_tile=32"),
        (scored, {}, {"return_entropy": False}, "return_entropy=False"),
        (scored, {}, {"nonfinite": "nan"}, "nonfinite=nan"),
        # where a row is bad, the one rank would raise and the other go on
        (scored, {"hidden": BAD}, {"hidden": BAD, "nonfinite": "nan"}, "nonfinite=nan"),
        (scored, {}, {"targets": TARGETS.flip(0)}, r"targets=int64 \[5\]"),
        (scored, {}, {"dtype": torch.float32}, r"hidden=torch\.float32, H=24, weight=torch\.float32"),
        (scored, {}, one, r"targets=int64 \[0\]"),
        (scored, one, {**one, "temperature": 0.8}, r"temperature=0\.8.*targets=int64 \[0\]"),
        (scored, one, {**one, "temperature": torch.tensor(0.8)}, r"temperature=0\.8.*targets=int64 \[0\]"),
        (scored, {"support": support(7)}, {"support": support(8)}, "threshold=float32"),
        (scored, {"support": support(7)}, {"support": support(7, "ids")}, "starts=int64"),
        (scored, {}, {"support": support(7)}, "threshold=float32"),
        (drawn, {}, {"vocab_size": VOCAB - 1}, r"draw_scored\(vocab_size=999"),
        (drawn, {}, {"vocab_tile": 64}, "vocab_tile=64"),
        (drawn, {}, {"seeds": SEEDS + 1}, r"seeds=int64 \[5\]"),
        (drawn, {}, {"positions": SEEDS + 1}, r"positions=int64 \[5\]"),
        (drawn, {}, {"temperature": BY_ROW + 1}, r"temperature=float32 \[5\]"),
        (drawn, {}, {"kinds": SEEDS * 0}, r"kinds=int64 \[5\]"),
        (drawn, {}, {"rows": 0}, r"seeds=int64 \[0\]"),
        (drawn, {}, {"rows": 4}, r"seeds=int64 \[4\]"),
    ]


def alike():
    """(operator, what rank 0 is given, what rank 1 is given): the same, said otherwise."""
    return [
        (scored, {"temperature": 0.7, "leaves": 8}, {"temperature": np.float32(0.7), "leaves": np.int64(8)}),
        (scored, {"temperature": torch.tensor(0.7)}, {"temperature": torch.full((ROWS,), 0.7)}),
        (scored, {"temperature": 2}, {"temperature": 2.0, "targets": TARGETS.int()}),
        (
            scored,
            {"temperature": 0.5, "vocab_size": VOCAB},
            {"temperature": np.float64(0.5), "vocab_size": np.int16(VOCAB)},
        ),
        (scored, {"support": support(7)}, {"support": support(7), "keep_logits": 100}),
        (scored, {"support": support(7), "nonfinite": "nan"}, {"support": support(7), "nonfinite": "nan"}),
        (drawn, {"vocab_size": VOCAB}, {"vocab_size": np.int64(VOCAB), "seeds": SEEDS.repeat(2)[:ROWS]}),
    ]


def check_transformed(comm, rank, transform):
    """Inside torch.func, which has no rule for this operator: PyTorch's own words, and ranks stay in step."""
    inside = transform(lambda x: scored(comm, hidden=x).sum())
    with pytest.raises(RuntimeError, match="override the setup_context"):
        inside(HIDDEN)
    # both have refused one operator
    assert float(comm.all_reduce(torch.ones(1))) == WORLD
    if rank:
        with pytest.raises(RuntimeError, match="override the setup_context"):
            inside(HIDDEN)
    else:
        with pytest.raises(ContractError, match="refused on rank 1"):
            scored(comm)


def run_rank(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    for transport in ("shared_memory", "gloo"):
        comm = TreeCommunicator(transport=transport, timeout_s=30)
        for at, (operator, most, one, says) in enumerate(differing()):
            odd = at % WORLD
            with pytest.raises(ContractError, match="ranks make different calls: rank 0 has all_gather") as told:
                operator(comm, **(one if rank == odd else most))
            assert rank != odd or told.match(says), told.value
            assert float(comm.all_reduce(torch.ones(1))) == WORLD
        for operator, *given in alike():
            assert torch.equal(operator(comm, **given[rank]), operator(None, **given[0])), given
        for transform in (torch.func.grad, lambda f: lambda x: torch.func.vmap(f)(x[None])):
            check_transformed(comm, rank, transform)
        assert float(comm.all_reduce(torch.ones(1))) == WORLD
        # no rows on all ranks are no error
        none = {"hidden": HIDDEN[:0], "targets": TARGETS[:0]}
        assert scored(comm, **none).shape == (2, 0)
        assert drawn(comm, rows=0).shape == (3, 0)
        # a compiler's graph says nothing, which fits what an eager rank says
        torch._dynamo.reset()
        call = torch.compile(scored, backend="eager") if rank == 0 else scored
        for _ in range(2):
            assert torch.equal(call(comm), scored(None))
        assert float(comm.all_reduce(torch.ones(1))) == WORLD
    # gloo's own thread gives back what the last call moved, for which it needs an interpreter that still runs
    time.sleep(0.2)
    dist.destroy_process_group()


def test_values_that_ranks_must_share_are_compared(tmp_path):
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    mp.spawn(run_rank, (sys.argv[1],), nprocs=WORLD)
