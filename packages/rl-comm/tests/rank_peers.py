"""One rank of test_comm_peer_ranks: a GPU's path without a GPU, over gloo, kernels interpreted in a file's pages."""

import ctypes
import mmap
import sys

import torch
import torch.distributed as dist

from rl_comm import TreeCommunicator, board, peer_memory, reduce_from_ranks, tree_sum
from rl_comm.device import NcclMover
from rl_comm.mover import GlooMover
from rl_contract import ContractError, launches, reset_launches

PAGE = 4096


def size_of_memory(world):
    return world * -(-4 * peer_memory.areas_of(world)[-1].end // PAGE) * PAGE


def small(world):
    """Slots of 1,024 words for one step, 384 for two, so that a tensor has several; called on every rank alike."""
    peer_memory.SLOT_BYTES, peer_memory.STEP_BLOCKS = {world: 4096}, {world: 128}
    peer_memory.PROGRAMS, peer_memory.STEP_PROGRAMS, peer_memory._BLOCK = 2, 3, 128
    peer_memory.TWO_STEP_BYTES = 4096 * (world - 1)


def refusal(call):
    """What a call that must be refused is told; or that it went on."""
    try:
        call()
    except ContractError as error:
        return str(error)
    return "went on"


def placed(x, off):
    """``x`` where it begins ``off`` bytes behind a multiple of 16."""
    room = torch.empty(x.nbytes + 64, dtype=torch.uint8)
    first = -room.data_ptr() % 16 + off
    return room[first : first + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def moved():
    """How the last call went, since the one before."""
    (row,) = launches()
    reset_launches()
    return f"{row['kernel'].split('.')[1]} {row['plan']}"


class Rank:
    def __init__(self, rank, world, folder):
        self.rank, self.world = rank, world
        with open(f"{folder}/memory", "r+b") as f:
            self._memory = mmap.mmap(f.fileno(), 0)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._addresses = [begin + r * (size_of_memory(world) // world) for r in range(world)]

    def communicator(self, two_shot_bytes):
        peers = peer_memory.PeerMemory(self._addresses, self.rank, torch.device("cpu"))
        agreement = board.make(GlooMover(dist.group.WORLD, self.rank, self.world), 30.0)
        mover = NcclMover(dist.group.WORLD, self.rank, self.world, agreement, peers)
        # gloo gathers one tensor at a time
        mover._grouped = False
        return TreeCommunicator.over({"cpu": mover}, self.rank, self.world, two_shot_bytes)

    def partials(self, shape, seed):
        """[world, *shape]: what the last rank holds nearly takes the others' away."""
        parts = torch.randn(self.world, *shape, generator=torch.Generator().manual_seed(seed)) * 1e3
        parts[-1] -= parts[:-1].sum(0)
        return parts

    def sums(self, comm):
        """How many values were compared."""
        compared = 0
        for shape in ((1,), (7,), (1024,), (33, 130), (1, 1), (), (0, 3), (2, 3, 700), (5000,)):
            parts = self.partials(shape, len(shape) + 3)
            for kind in (torch.float32, torch.float16):
                got = comm.all_reduce(parts[self.rank], out_dtype=kind)
                assert torch.equal(got, tree_sum(list(parts)).to(kind)), (shape, kind)
                compared += got.numel()
        whole = self.partials((40, 30), 8)
        total = tree_sum(list(whole))
        # a transpose, and rows that begin anywhere
        assert torch.equal(comm.all_reduce(whole[self.rank].t()), total.t())
        assert torch.equal(comm.all_reduce(whole[self.rank].reshape(-1)[1:402]), total.reshape(-1)[1:402])
        for dim in (0, 1):
            parts = self.partials((8, 16), 5)
            want = tree_sum(list(parts)).chunk(self.world, dim)[self.rank]
            assert torch.equal(comm.reduce_scatter(parts[self.rank], dim=dim), want)
            lying = parts[self.rank].t().contiguous().t()
            assert torch.equal(comm.reduce_scatter(lying, dim=dim), want)
        return compared

    def moves(self, comm):
        for shape in ((1,), (6,), (4, 5), (3, 700)):
            parts = self.partials(shape, 2).bfloat16()
            for dim in range(-len(shape), len(shape)):
                assert torch.equal(comm.all_gather(parts[self.rank], dim=dim), torch.cat(list(parts), dim))
        each = comm.all_gather_each([torch.full((2, 3), self.rank), torch.full((1,), 0.5 + self.rank)])
        assert each[0].tolist() == [[r] * 3 for r in range(self.world) for _ in range(2)]
        assert each[1].tolist() == [0.5 + r for r in range(self.world)]
        whole = torch.full((2 * self.world, 3), -1.0)
        whole[2 * self.rank : 2 * self.rank + 2] = self.rank
        comm.all_gather_into([whole])
        assert whole.tolist() == [[float(r)] * 3 for r in range(self.world) for _ in range(2)]
        assert comm.broadcast(torch.tensor([self.rank]), source=1).tolist() == [1]

    def refusals(self, comm):
        """Every rank is told of the one that differs, and the group goes on."""
        odd, x = self.rank == 1, torch.ones(4, 6)
        for call in (
            lambda: comm.all_reduce(torch.ones(3 + odd, 5)),
            lambda: comm.all_reduce(x.half() if odd else x),
            lambda: comm.all_gather(x) if odd else comm.all_reduce(x),
            lambda: comm.all_reduce(x, out_dtype=torch.bfloat16 if odd else None),
        ):
            assert "rank 1 has" in refusal(call)
        assert comm.all_reduce(x).tolist() == [[float(self.world)] * 6] * 4
        # an operator that refuses before it calls
        if odd:
            comm.refuse(ContractError("no"))
        else:
            assert "refused on rank 1" in refusal(lambda: comm.all_reduce(x))
        assert comm.all_reduce(x).tolist() == [[float(self.world)] * 6] * 4

    def askew(self):
        """A rank's tensors lie as they like, which chooses no way of its own."""
        comm, two = self.communicator(None), self.communicator(0)
        reset_launches()
        ways = {
            (): "peer_memory one-shot", (1,): "peer_memory one-shot", (1023,): "peer_memory one-shot",
            (1024,): "peer_memory two-shot", (1025,): "peer_memory two-shot", (0, 3): "nccl one-shot",
        }  # fmt: skip
        for shape, way in ways.items():
            parts = self.partials(shape, 4)
            for kind in (None, torch.float16, torch.bfloat16):
                # the interpreter cuts bf16 off where a GPU rounds: sums of these need no rounding
                given = parts.round().clamp(-30, 30) if kind == torch.bfloat16 else parts
                mine, want = given[self.rank], tree_sum(list(given), kind)
                for x in (mine, placed(mine, 4 * (self.rank == 1))):
                    assert torch.equal(comm.all_reduce(x, out_dtype=kind), want), (shape, kind)
                    assert moved() == way, shape
        for dtype, n, way in (
            (torch.bfloat16, 6, "peer_memory"), (torch.bfloat16, 7, "nccl"), (torch.bool, 8, "peer_memory"),
            (torch.int64, 3, "peer_memory"), (torch.uint8, 3, "nccl"), (torch.int64, 513, "nccl"),
        ):  # fmt: skip
            parts = [(torch.arange(n) * 3 + 5 * r).to(dtype) for r in range(self.world)]
            got = comm.all_gather(placed(parts[self.rank], dtype.itemsize * (self.rank == 1)))
            assert torch.equal(got, torch.cat(parts)), (dtype, n)
            assert moved() == f"{way} bytes", (dtype, n)
        assert two.all_gather(torch.empty(2, 0, dtype=torch.int64), dim=1).shape == (2, 0)
        x = torch.ones(4, 6)
        for bad in (None, x.to_sparse(), x.clone().requires_grad_(), x[:2]):
            for op in (comm.all_reduce, comm.all_gather):
                assert "rank 1" in refusal(lambda op=op, bad=bad: op(bad if self.rank == 1 else x))

    def transforms(self, comm):
        parts = self.partials((33, 13), 9)
        compiled = torch.compile(lambda x: comm.all_reduce(x * 1.0) + 0, backend="eager")
        assert torch.equal(compiled(parts[self.rank]), tree_sum(list(parts)))
        x = torch.ones(4, 5, requires_grad=True)
        reduce_from_ranks(x * 2, comm).sum().backward()
        assert x.grad.tolist() == [[2.0] * 5] * 4


def main():
    number, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    small(world)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=number, world_size=world)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda: "the stream"
    rank, compared = Rank(number, world, folder), 0
    rank.askew()
    # memory is one, and all communicators' calls are made one after the other
    for two_shot_bytes in (None, 0, 1 << 30):
        comm = rank.communicator(two_shot_bytes)
        reset_launches()
        compared += rank.sums(comm)
        took = {(row["kernel"], row["plan"]) for row in launches() if row["kernel"].endswith("all_reduce")}
        rank.moves(comm)
        rank.refusals(comm)
        rank.transforms(comm)
        print(two_shot_bytes, sorted(took))
    print("compared", compared)


if __name__ == "__main__":
    main()
