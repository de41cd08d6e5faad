"""What guards calls of GPUs, with and without memory that ranks share: on all ranks at once, by ``rank_main.py``."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_values import same_bits

from rl_comm import TreeCommunicator, board, shared_memory
from rl_comm.device import AgreedMover, NcclMover
from rl_comm.header import HEADER_BYTES, Call
from rl_comm.mover import GlooMover
from rl_contract import ContractError


def check_board(rank, world):
    """What guards a GPU call: ranks that say the same go on, one that differs stops all, nobody is left behind."""
    gloo = GlooMover(dist.group.WORLD, rank, world)
    held = board.make(gloo, 60.0)
    assert isinstance(held, board.Board)
    for i in range(300):
        if i % world == rank and i % 50 == 0:
            time.sleep(0.002)
        held.agree(Call("all_reduce", torch.float32, torch.bfloat16, 0, (i, 5), "cuda"))
    for odd in (0, world - 1):
        shape = (4, 5) if rank == odd else (3, 5)
        with pytest.raises(ContractError, match=r"ranks make different calls: rank 0 .*5\), .*cuda"):
            held.agree(Call("all_gather", torch.float32, torch.float32, 0, shape, "cuda"))
    held.agree(Call("barrier", torch.uint8, torch.uint8, 0, ()))
    seen = board.Signatures(gloo)
    for _ in range(3):
        seen.agree(Call("all_gather", torch.float32, torch.float32, 0, (3, 5), "cuda"))
    with pytest.raises(ContractError, match="ranks make different calls"):
        seen.agree(Call("all_gather", torch.float32, torch.float32, 0, (rank, 9), "cuda"))
    # what an operator was given, without a word of it on the board
    call = Call("all_gather", torch.float32, torch.float32, 0, (3, 6), "cuda")
    for each in (held, seen):
        with pytest.raises(ContractError, match=r"ranks make different calls: .*on cuda\) by an operator whose values"):
            each.agree(replace(call, said=f"op(k={5 + rank})"))
        each.agree(replace(call, said="" if rank else "op(k=3)"))
        for said in ("op(k=3)" * 100, "op(k=3)"):
            each.agree(replace(call, said=said))
    with pytest.raises(ContractError, match=r"by an operator whose values"):
        held.agree(replace(call, said=f"op(k={5 + rank})"))
    # where a board compares each call, a rank that says nothing meets any text; else a kind is asked of once, and a
    # new text waits for nobody
    held.agree(replace(call, said="" if rank else "op(k=4)"))
    asked = gloo._traffic.calls
    for new in ("op(k=4)", "op(k=5)"):
        seen.agree(replace(call, said="" if rank else new))
    assert gloo._traffic.calls == asked
    assert len(seen._seen) == 1
    # nothing that is kept of a call grows with its tensors
    kept = board._kept.cache_info().currsize
    for each in (held, seen, seen):
        one = Call("all_gather", torch.float32, torch.float32, 0, (3, 5), "cuda")
        each.agree(replace(one, beside=(one,) * 500))
        with pytest.raises(ContractError, match="ranks make different calls"):
            each.agree(replace(one, beside=(one,) * 500 + (replace(one, shape=(rank,)),)))
    assert board._kept.cache_info().currsize == kept
    assert all(type(words) is bytes and len(words) == HEADER_BYTES for words in seen._seen)


def check_devices(rank, world):
    """One rank's tensor on the host, its peers' on GPUs, or one's argument on neither: all are told, in any order."""
    gloo = GlooMover(dist.group.WORLD, rank, world)
    odd, x = rank == world - 1, torch.full((3, world), float(rank))
    held = board.make(gloo, 30.0)
    group = NcclMover(dist.group.WORLD, rank, world, held)
    host = AgreedMover(shared_memory.connect(gloo, 30.0), held)
    assert host.name == "shared_memory"
    for op in ("all_reduce", "barrier", "broadcast"):
        call = Call(op, x.dtype, x.dtype, 0, tuple(x.shape), "cpu" if odd else "cuda")
        with pytest.raises(ContractError, match=r"ranks make different calls: rank 0 .*on cuda"):
            (host if odd else group).gather(call, x.view(torch.uint8).reshape(-1))
    for movers in ({"cpu": host}, {"cpu": host, "cuda": group}):
        comm = TreeCommunicator.over(movers, rank, world)
        comm._device = "cuda" if odd and "cuda" in movers else "cpu"
        with pytest.raises(ContractError, match=f"refused on rank {world - 1}, "):
            comm.all_reduce(None if odd else x)
        assert same_bits(comm.all_reduce(x), torch.full((3, world), float(sum(range(world)))))
        mine = comm.reduce_scatter(x, dim=1)
        assert same_bits(mine, torch.full((3, 1), float(sum(range(world)))))
        whole = torch.zeros(world, 2)
        whole[rank] = rank
        comm.all_gather_into([whole])
        assert same_bits(whole, torch.arange(float(world))[:, None].repeat(1, 2))
        assert same_bits(comm.all_gather_each([x, x[:1]])[1], torch.arange(float(world))[:, None].repeat(1, world))
        assert same_bits(comm.broadcast(x, source=1), torch.full((3, world), 1.0))
        comm.barrier()
        # an operator's refusal is met on the board, wherever the next call lies
        if odd:
            comm.refuse(ContractError("odd"), device="cpu")
        else:
            with pytest.raises(ContractError, match=f"rank {world - 1} has refused an operator"):
                comm.barrier()
        assert same_bits(comm.all_reduce(x), torch.full((3, world), float(sum(range(world)))))
    # what one rank alone meets ends its peers' wait, on the board and for bytes
    if odd:
        comm._movers["cpu"]._host.gather = lambda call, payload: {}[0]
    with pytest.raises(KeyError if odd else RuntimeError, match="0" if odd else "makes no calls any more"):
        comm.all_reduce(x)
    with pytest.raises(ContractError, match="out of step since an earlier call"):
        comm.barrier()


def check_unheard(rank, world):
    """Between hosts nothing is said of a refusal; this rank's next call meets none that was not meant for it."""
    gloo, odd = GlooMover(dist.group.WORLD, rank, world), rank == 1
    comm = TreeCommunicator.over({"cpu": NcclMover(dist.group.WORLD, rank, world, board.Signatures(gloo))}, rank, world)
    x = torch.ones(4)
    for _ in range(2):
        assert float(comm.all_reduce(x)[0]) == world
    # alike on all, and one alone whose peers' call is agreed on as it is new
    comm.refuse(ContractError("no"))
    assert float(comm.all_reduce(x)[0]) == world
    if odd:
        comm.refuse(ContractError("no"))
    else:
        with pytest.raises(ContractError, match="refused on rank 1, "):
            comm.all_gather(torch.ones(5))
    assert float(comm.all_reduce(x)[0]) == world
    # what all have refused is refused again, and not taken for a call that was agreed on
    for _ in range(2):
        with pytest.raises(ContractError, match="dim=7 for a tensor"):
            comm.all_gather(x, dim=7)
        assert float(comm.all_reduce(x)[0]) == world
    with pytest.raises(ContractError, match="refused on rank 1, "):
        comm.all_gather(x, dim=7 if odd else 0)
    assert float(comm.all_reduce(x)[0]) == world
    # nothing of a refusal is left that a call could be met by
    met = []
    gloo.agree = lambda call: met.append(call.op)
    comm.refuse(ContractError("no"))
    comm.all_reduce(x)
    assert met == ["all_reduce"]


def check_board_told(rank, world):
    """As ``check_told`` and ``check_absent_peer``, where a board guards GPU calls."""
    held = board.make(GlooMover(dist.group.WORLD, rank, world), 1.0)
    call = Call("all_gather", torch.float32, torch.float32, 0, (3, 5), "cuda")
    refused = Call("refusal", None, None, 0, (), refused=True)
    held.agree(call)
    for times in (1, 2, 3):
        for _ in range(times):
            if rank == world - 1:
                held.refuse(refused)
            else:
                with pytest.raises(ContractError, match=f"refused on rank {world - 1}, whose error says why"):
                    held.agree(call)
        held.agree(call)
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 did not make this call within 1 s"):
            held.agree(call)
        held.leave()
    dist.barrier()
    began = time.monotonic()
    if rank:
        with pytest.raises(RuntimeError, match="rank 0 makes no calls any more"):
            held.agree(call)
        held.leave()
    assert time.monotonic() - began < 0.5
    ahead = board.make(GlooMover(dist.group.WORLD, rank, world), 60.0)
    ahead._number += 2 * rank
    if rank:
        ahead._wait = lambda peer, mine: mine
        ahead.agree(call)
    dist.barrier()
    if not rank:
        with pytest.raises(ContractError, match="this is call 1 of rank 0 and call 3 of rank 1"):
            ahead.agree(call)
