"""All-reduce bits: NCCL one-shot = two-shot = peer memory = gloo = one rank's tree, eager and in graphs; times."""

import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

# the last but two fills a slot of peer memory, nearly; ranks divide no odd one
SIZES = ((1,), (7,), (4095,), (4096,), (4097,), (409, 5120), (1664, 5120), (2048, 5120))
TIMED = tuple((rows, 4096) for rows in (1, 8, 64, 128, 256, 512, 1024, 2048, 8192))


def partials(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """[2, *shape] on the CPU: what the second rank holds nearly takes the first one's away."""
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=g) * 1e3
    return torch.stack([first, torch.randn(shape, generator=g) - first])


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from rl_comm import TreeCommunicator

    one_gpu = settings.get("one_gpu", False)
    torch.cuda.set_device(0 if one_gpu else rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    one, two = (TreeCommunicator(transport="nccl", two_shot_bytes=n) for n in (1 << 60, 0))
    peer = TreeCommunicator(transport="peer_memory")
    # a slot at most, in one step
    in_one, in_two = (TreeCommunicator(transport="peer_memory", two_shot_bytes=n) for n in (1 << 60, 0))
    gloo = TreeCommunicator(dist.new_group(backend="gloo"), transport="gloo")
    forms = {
        "one-shot": one, "two-shot": two, "peer memory": peer, "peer memory, one step": in_one,
        "peer memory, two steps": in_two,
    }  # fmt: skip
    yield {
        "transport": one.device_transport, "with peer memory": peer.device_transport,
        "eager outputs compared": check_eager(rank, [*forms.values()], gloo),
    }  # fmt: skip
    for comm in (one, peer, in_two):
        check_movement(rank, comm)
        check_refusals(rank, comm)
        check_compiled(rank, comm)
    for name, comm in forms.items():
        yield {f"{name}: replays compared": check_graphs(rank, comm, settings["replays"])}
    yield {"streams: outputs compared": check_streams(rank, peer)}
    if one_gpu:
        return
    yield {"microseconds": times(forms)}
    yield {"eager host microseconds a call": {name: host_time(comm) for name, comm in forms.items()}}


def check_eager(rank: int, comms: list[Any], gloo: Any) -> int:
    compared = 0
    for shape in SIZES:
        x = partials(shape, len(shape) + shape[0])
        mine = x[rank].cuda()
        for dtype in (torch.float32, torch.bfloat16):
            want = (x[0] + x[1]).to(dtype)
            for comm, given in (*((comm, mine) for comm in comms), (gloo, x[rank])):
                for got in (comm.all_reduce(given, out_dtype=dtype), comm.all_reduce(given, out_dtype=dtype)):
                    assert equal(got.cpu(), want), (shape, dtype, comm.device_transport)
                    compared += got.numel()
    return compared


def check_movement(rank: int, comm: Any) -> None:
    x = torch.arange(60, device="cuda").reshape(6, 10) + 1000 * rank
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        for dim in (0, 1, -1):
            want = torch.cat([(x - 1000 * rank + 1000 * r).to(dtype) for r in range(2)], dim)
            assert equal(comm.all_gather(x.to(dtype), dim=dim), want)
    parts = partials((6, 10), 5)
    for dim in (0, 1):
        want = (parts[0] + parts[1]).bfloat16().chunk(2, dim)[rank]
        assert equal(comm.reduce_scatter(parts[rank].cuda(), dim=dim, out_dtype=torch.bfloat16).cpu(), want)
    assert equal(comm.broadcast(x, source=1), x - 1000 * rank + 1000)


def check_refusals(rank: int, comm: Any) -> None:
    """Ranks that disagree are told so, both of them, at once, and the group goes on."""
    from rl_contract import ContractError

    x = torch.ones(4, 5, device="cuda")
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(torch.ones(3 + rank, 5, device="cuda")),
        lambda: comm.all_reduce(x.to(torch.float16 if rank else torch.float32)),
        lambda: comm.all_gather(x, dim=0) if rank else comm.all_reduce(x),
        lambda: comm.all_reduce(x, out_dtype=torch.bfloat16 if rank else None),
    ]
    for call in calls:
        begin, said = time.monotonic(), ""
        try:
            call()
        except ContractError as error:
            said = str(error)
        assert "rank 1 has" in said, said or "ranks that differ went on"
        assert time.monotonic() - begin < 5
    assert float(comm.all_reduce(x).sum()) == 40.0


def check_compiled(rank: int, comm: Any) -> None:
    x = partials((33, 130), 9)
    compiled = torch.compile(lambda p: comm.all_reduce(p * 1.0, out_dtype=torch.bfloat16) + 0, backend="eager")
    assert equal(compiled(x[rank].cuda()).cpu(), (x[0] + x[1]).bfloat16())


def check_graphs(rank: int, comm: Any, replays: int) -> int:
    """Replays with other inputs each time, ranks delayed at random on the host and on the device."""
    compared = 0
    delay = random.Random(rank)
    for shape in ((7,), (4097,), (409, 5120), (1664, 5120)):
        inputs = [partials(shape, seed) for seed in range(3)]
        mine = [x[rank].cuda() for x in inputs]
        want = [(x[0] + x[1]).bfloat16().cuda() for x in inputs]
        held = torch.zeros(shape, device="cuda")
        comm.all_reduce(held, out_dtype=torch.bfloat16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first = comm.all_reduce(held, out_dtype=torch.bfloat16)
            # the second call needs the first one's result, so a stream that ran ahead would show
            second = comm.all_reduce(first.float() + held, out_dtype=torch.bfloat16)
        again = [((w.float() + x[0].cuda()) + (w.float() + x[1].cuda())).bfloat16() for w, x in zip(want, inputs)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(replays):
            if delay.random() < 0.1:
                torch.cuda._sleep(delay.randrange(1, 200_000))
            if delay.random() < 0.02:
                time.sleep(delay.random() * 1e-3)
            held.copy_(mine[i % 3])
            graph.replay()
            if i % 50 == 0:
                # calls and replays take turns
                wrong += (comm.all_reduce(held, out_dtype=torch.bfloat16) != want[i % 3]).sum()
            wrong += (first.view(torch.int16) != want[i % 3].view(torch.int16)).sum()
            wrong += (second.view(torch.int16) != again[i % 3].view(torch.int16)).sum()
        assert int(wrong) == 0, (shape, int(wrong))
        compared += 2 * replays * held.numel()
    return compared


def check_streams(rank: int, comm: Any) -> int:
    """Calls on two streams in turn, of sizes that differ, one rank late: each waits for the one before."""
    sizes = (4097, 7, 2_000_000)
    inputs = [partials((n,), n) for n in sizes]
    mine = [x[rank].cuda() for x in inputs]
    want = [(x[0] + x[1]).cuda() for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    for i in range(300):
        with torch.cuda.stream(streams[i % 2]):
            if (i + rank) % 7 == 0:
                torch.cuda._sleep(100_000)
            out = comm.all_reduce(mine[i % 3])
            wrong[i % 2] += (out.view(torch.int32) != want[i % 3].view(torch.int32)).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0], wrong.tolist()
    return 100 * sum(sizes)


def timed(call: Callable[[], Any], repeat: int = 20) -> float:
    """Microseconds of one call inside a graph of ``repeat``."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeat):
            call()
    samples = []
    for _ in range(6):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        samples.append(1e3 * marks[0].elapsed_time(marks[1]) / repeat)
    return round(median(samples[1:]), 1)


def times(forms: dict[str, Any]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for shape in TIMED:
        x = torch.randn(shape, device="cuda")
        half = x.bfloat16()
        row = {
            name: timed(lambda x=x, comm=comm: comm.all_reduce(x, out_dtype=torch.bfloat16))  # type: ignore[misc]
            for name, comm in forms.items()
        }
        found["x".join(map(str, shape))] = row | {"nccl bf16": timed(lambda half=half: dist.all_reduce(half))}  # type: ignore[misc]
    return found


def host_time(comm: Any) -> float:
    x = torch.randn(64, 64, device="cuda")
    for _ in range(50):
        comm.all_reduce(x, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        comm.all_reduce(x, out_dtype=torch.bfloat16)
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return round(1e6 * taken / 200, 1)
