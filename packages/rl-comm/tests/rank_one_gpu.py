"""One rank of test_comm_peer_gpu: processes that share a GPU and write to one another's memory, taking turns on it.

NCCL gives no GPU to two ranks; what it would move is not asked for here.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_comm import TreeCommunicator, board, peer_joining, tree_sum
from rl_comm.device import NcclMover
from rl_comm.mover import GlooMover
from rl_contract import ContractError, launches, reset_launches

SIZES = [(1,), (7,), (4095,), (4096,), (4097,), (33, 130), (1664, 5120), (2048, 5120), (5003, 1001)]
REPLAYED = [(64, 4096), (1, 4096), (4097,), (1664, 5120)]
# whoever shares a GPU waits for its turn at every call, and so do others that use it
REPLAYS = {2: 20, 4: 4}
LARGEST = {2: len(SIZES), 4: 7}
WAIT_S = 2.0


class OneOfThem(peer_joining.Driver):
    """A GPU of this rank's own, as far as its peers know."""

    def __init__(self, rank):
        super().__init__()
        self._rank = rank

    def current(self):
        device, name = super().current()
        return device, f"{name}-{self._rank}"

    def reaches(self, device, peer):
        return True


class WithoutNccl(NcclMover):
    def __init__(self, rank, world, agreement, peers):
        self.group, self.rank, self.world_size, self.peers, self.name = None, rank, world, peers, peers.name
        self._agreement, self.refuse = agreement, agreement.refuse


def partials(world, shape, seed):
    """[world, *shape] on the GPU: what the last rank holds nearly takes the others' away, and NaN is no sum's."""
    g = torch.Generator("cuda").manual_seed(seed)
    parts = torch.randn(world, *shape, generator=g, device="cuda") * 1e3
    parts[-1] -= parts[:-1].sum(0)
    return parts


def same(a, b):
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


def sums(comms, rank, world):
    compared = differs = 0
    for seed, shape in enumerate(SIZES[: LARGEST[world]]):
        parts = partials(world, shape, seed)
        chain = parts[0].clone()
        for part in parts[1:]:
            chain += part
        for kind in (torch.float32, torch.bfloat16):
            want = tree_sum(list(parts.cpu()), kind).cuda()
            for name, comm in comms.items():
                got = comm.all_reduce(parts[rank], out_dtype=kind)
                assert same(got, want), (name, shape, kind)
                compared += got.numel()
        differs += int((chain != tree_sum(list(parts))).sum())
    assert world == 2 or differs > 1_000_000, "another order has the tree's bits"
    return compared


def gathers(comm, rank, world):
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        parts = [(torch.arange(60, device="cuda").reshape(6, 10) % 7 + r).to(dtype) for r in range(world)]
        for dim in (0, 1):
            assert torch.equal(comm.all_gather(parts[rank], dim=dim), torch.cat(parts, dim))


def replays(comm, rank, world):
    """Graphs of all sums, replayed by ranks that come when they like, beside calls that are none of a graph's."""
    delay, compared = random.Random(rank), 0
    given = [partials(world, shape, 7)[rank].clone() for shape in REPLAYED]
    for x in given:
        comm.all_reduce(x, out_dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [comm.all_reduce(x, out_dtype=torch.bfloat16) for x in given]
    for replay in range(REPLAYS[world]):
        parts = [partials(world, shape, replay) for shape in REPLAYED]
        for x, part in zip(given, parts):
            x.copy_(part[rank])
        for out in outs:
            out.fill_(float("nan"))
        if delay.random() < 0.3:
            torch.cuda._sleep(int(delay.random() * 2e6))
        graph.replay()
        if replay % 16 == 3:
            assert same(comm.all_reduce(parts[1][rank]), tree_sum(list(parts[1])))
        for out, part in zip(outs, parts):
            assert same(out, tree_sum(list(part), torch.bfloat16)), (replay, out.shape)
            compared += out.numel()
    return compared


def refusal(comm, rank):
    """What both are told of one that differs; the group goes on."""
    with pytest.raises(ContractError, match="rank 1 has"):
        comm.all_reduce(torch.ones(3 + (rank == 1), 5, device="cuda"))
    assert comm.all_reduce(torch.ones(4, device="cuda")).tolist() == [float(comm.world_size)] * 4


def alone(comm, rank, folder):
    """A replay whose peer does not come fails once its time is over."""
    x = torch.ones(64, device="cuda")
    comm.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    over = Path(folder) / "over"
    if rank == 0:
        began = time.monotonic()
        graph.replay()
        with pytest.raises(RuntimeError, match="assert"):
            torch.cuda.synchronize()
        waited = time.monotonic() - began
        assert WAIT_S < waited < 15 * WAIT_S, waited
        print("failed in time", flush=True)
        over.touch()
    while not over.exists():
        time.sleep(0.1)
    # the context of rank 0 is none any more
    sys.stderr.flush()
    os._exit(0)


def main():
    rank, world, folder, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world)
    gloo = GlooMover(dist.group.WORLD, rank, world)
    peers = peer_joining.connect(gloo, timeout_s, lambda: OneOfThem(rank))
    assert not isinstance(peers, str), peers
    mover = WithoutNccl(rank, world, board.make(gloo, 60.0), peers)
    forms = {"auto": None, "one step": 1 << 60, "two steps": 0}
    movers = {"cpu": mover, "cuda": mover}
    comms = {name: TreeCommunicator.over(movers, rank, world, n) for name, n in forms.items()}
    if timeout_s == WAIT_S:
        alone(comms["auto"], rank, folder)
    reset_launches()
    print("compared", sums(comms, rank, world))
    gathers(comms["auto"], rank, world)
    print("replayed", replays(comms["auto"], rank, world), replays(comms["two steps"], rank, world))
    refusal(comms["two steps"], rank)
    print(sorted({f"{row['kernel']} {row['plan']}" for row in launches()}))


if __name__ == "__main__":
    main()
