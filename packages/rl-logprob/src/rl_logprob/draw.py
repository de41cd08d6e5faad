"""What a rollout engine asks of a batch's logits at every step, as one call: tokens, log-probabilities, ranks."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_contract import Communicator, ContractError
from rl_contract.communicator import gather_said, refuse, said_of
from rl_contract.memory import reach
from rl_contract.tokens import check_peers
from rl_logprob import gpu, ops
from rl_logprob.checks import check_logits, check_tensor, check_vocab, usable_temperature
from rl_logprob.contract import GPU_TILE
from rl_logprob.sampling import sample_op

DRAWN, GREEDY, PADDING = 0, 1, -1


class Drawn(NamedTuple):
    """One step of T rows: ids int64 [T], their log-probabilities fp32 [T], nats, and ranks int64 [T] from 1."""

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def new_packed(rows: int, device: torch.device) -> Tensor:
    """Room for one step, int64 [3, T]; see ``unpack``."""
    return torch.empty((3, rows), dtype=torch.int64, device=device)


def unpack(packed: Tensor, rows: int) -> Drawn:
    """Views of the first ``rows`` rows of what ``draw_scored`` has filled."""
    return Drawn(packed[0, :rows], packed[2].view(torch.float32)[:rows], packed[1, :rows])


def draw_scored(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor, *, vocab_size: int,
    vocab_tile: int = 512, bad: Tensor, out: Tensor, comm: Communicator | None = None,
) -> None:  # fmt: skip
    """``gumbel_sample`` or ``greedy_sample``, ``selected_logprob`` of the choice and its rank: their bits, two passes.

    Nothing looks at a device value, so that the call may be captured in a CUDA graph.

    Args:
        logits: fp32 [T, at least vocab_size]; columns from ``vocab_size`` on take no part. With ``comm``, this rank's
            [T, C]: column j of rank r is id r C + j, and ranks have at least ``vocab_size`` columns together.
        seeds, positions: int64 [T], as for ``gumbel_sample``.
        temperature: fp32 [T], positive and finite, at least 1.18e-38; 1 for a greedy row. Any other makes its row bad.
        kinds: int64 [T]: ``DRAWN``, ``GREEDY``, or ``PADDING`` for a row whose results mean nothing. Any other makes
            its row bad.
        vocab_tile: ids per tile; belongs to the contract.
        bad: int64 [1]; the number of bad rows is added: those of the above, and those with a NaN or +inf or nothing
            above -inf. Such a row gets id 0 and a NaN; its rank means nothing.
        out: int64 [3, T], contiguous, is filled; see ``unpack``. It shares no memory with the others.
        comm: ranks that share the vocabulary and are given the same rows; each gets the results of all ids, those of
            one rank that holds all columns. On a GPU 48 bytes a row cross ranks, and 512 where they share a tile. Where
            it compares what ranks say (as ``TreeCommunicator`` does, in the call that is made anyway), those that give
            another ``vocab_size``, ``vocab_tile`` or number of rows or columns are refused, and on a CPU other seeds,
            positions, temperatures or kinds. Not compared: tensors on a GPU, which nothing looks at, the calls of a
            replayed graph, and between hosts with NCCL all but a shape's first call.

    Raises:
        ContractError: types, shapes, devices or memory; on every rank, ranks that were given different values of what
            ``comm`` compares. MissingSupport: a device without kernels.
    """
    try:
        check_peers("draw_scored", comm, None)
        _draw_scored(logits, seeds, positions, temperature, kinds, vocab_size, vocab_tile, bad, out, comm)
    except Exception as problem:
        refuse(problem, comm, given=(logits,))
        raise


def _draw_scored(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor, vocab_size: int,
    vocab_tile: int, bad: Tensor, out: Tensor, comm: Communicator | None,
) -> None:  # fmt: skip
    check_vocab(vocab_size, vocab_tile)
    shared = comm if comm is not None and comm.world_size > 1 else None
    check_logits(logits, vocab_size if shared is None else -(-vocab_size // shared.world_size))
    rows = len(logits)
    for name, x, dtype in (
        ("seeds", seeds, torch.int64), ("positions", positions, torch.int64), ("kinds", kinds, torch.int64),
        ("temperature", temperature, torch.float32),
    ):  # fmt: skip
        _check_here(name, x, logits)
        if x.shape != (rows,) or x.dtype != dtype or not x.is_contiguous():
            raise ContractError(f"{name} are {x.dtype} {tuple(x.shape)}; needs {dtype} [{rows}], contiguous")
    for name, x, shape in (("out", out, (3, rows)), ("bad", bad, (1,))):
        _check_here(name, x, logits)
        if x.shape != shape or x.dtype != torch.int64 or not x.is_contiguous():
            raise ContractError(f"{name} is {x.dtype} {tuple(x.shape)}; needs int64 {list(shape)}, contiguous")
    _check_apart(
        {"out": out, "bad": bad},
        {"logits": logits, "seeds": seeds, "positions": positions, "temperature": temperature, "kinds": kinds},
    )
    k = None
    if logits.is_cuda:
        k = gpu.ready(logits)
        gpu.check_tile(vocab_tile)
    if shared is not None:
        said = said_of(
            "draw_scored", vocab_size=vocab_size, vocab_tile=vocab_tile, columns=logits.shape[1], seeds=seeds,
            positions=positions, temperature=temperature, kinds=kinds,
        )  # fmt: skip
        if rows and k is not None and logits.shape[1] >= GPU_TILE:
            own = logits if logits.stride(1) == 1 else logits.contiguous()
            k.draw_ranks.draw(own, seeds, positions, temperature, kinds, vocab_size, bad, out, shared, said)
            gpu.record("triton_draw_ranks.draw")
            return
        # also of no rows: peers that have some learn of it
        logits = gather_said(shared, logits.contiguous(), said, dim=1)
    if not rows:
        return
    if k is not None:
        columns = logits if logits.stride(1) == 1 else logits.contiguous()
        k.draw.draw(columns, seeds, positions, temperature, kinds, vocab_size, bad, out)
        gpu.record("triton_draw.draw")
        return
    found = unpack(out, rows)
    # a temperature of NaN makes a row bad, as it does on a GPU
    usable = usable_temperature(temperature) & (kinds >= PADDING) & (kinds <= GREEDY)
    temperature = torch.where(usable, temperature, torch.nan)
    best = sample_op(logits, seeds, positions, temperature, vocab_size, True)
    chosen = torch.where(kinds == DRAWN, sample_op(logits, seeds, positions, temperature, vocab_size, False), best)
    bad += ((chosen < 0) & (kinds != PADDING)).sum()
    found.ids.copy_(chosen.clamp_(min=0))
    own = logits.gather(1, chosen[:, None])
    state = ops.merge_tiles(*ops.tile_stats(logits.contiguous(), temperature, 0, vocab_size, vocab_tile, False))
    found.logprobs.copy_(ops.selected(own[:, 0] / temperature, state))
    found.ranks.copy_((logits[:, :vocab_size] >= own).sum(1))


def _check_here(name: str, x: Tensor, logits: Tensor) -> None:
    check_tensor(name, x)
    if x.device != logits.device:
        raise ContractError(f"{name} is on {x.device}, logits on {logits.device}; move it there")


def _check_apart(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Raise if what is written shares memory with anything else."""
    spans = [(name, *reach(x)) for name, x in (*written.items(), *read.items()) if x.numel()]
    for i, (name, first, end) in enumerate(spans[: len(written)]):
        for other, start, stop in spans[i + 1 :]:
            if first < stop and start < end:
                raise ContractError(f"{name} shares memory with {other}; give it memory of its own")
