"""Attention over sequences that are split between ranks: each rank keeps its queries, keys and values move as bytes.

The gathered rows are put back into absolute order, so every chain of the contract ``attention`` runs over the same
values in the same order as on one rank. Backward: queries, dO, lse and delta are gathered, and each rank adds all
queries onto its own keys in ascending order.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rl_attn import gpu, gpu_backward, ops, ops_backward
from rl_attn.attention import attention_packed
from rl_attn.calls import ByTensor, Values, counted
from rl_attn.checks import check_call, require_cu_seqlens, require_family, require_indices
from rl_attn.metadata import positions_of_all_keys
from rl_contract import Communicator, ContractError
from rl_contract.checks import require_tensor, whole_number
from rl_contract.communicator import gather_each, refuse
from rl_contract.devices import to_device
from rl_contract.gradients import apart
from rl_contract.profile import KEY_TILE, SEGMENT
from rl_contract.tokens import check_peers

LAYOUTS = ("zigzag", "contiguous")


def _chunks(rank: int, world: int, layout: str) -> tuple[int, tuple[int, ...]]:
    """Into how many equal chunks a sequence is cut, and which of them the rank holds, ascending."""
    if layout == "zigzag":
        return 2 * world, (rank, 2 * world - 1 - rank)
    if layout == "contiguous":
        return world, (rank,)
    raise ContractError(f"context parallel got layout {layout!r}; supported: {LAYOUTS}")


def _tokens(cu_seqlens: torch.Tensor) -> int:
    """The last entry: rows of the whole batch."""
    require_indices("context parallel", cu_seqlens=cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ContractError(f"context parallel got cu_seqlens {tuple(cu_seqlens.shape)}; supported: [sequences + 1]")
    return int(cu_seqlens[-1])


def _check(cu_seqlens: torch.Tensor, rank: int, world: int, layout: str) -> int:
    if not (whole_number(rank) and whole_number(world)) or world < 1 or not 0 <= rank < world:
        raise ContractError(f"context parallel got rank {rank} of {world}; supported: 0 <= rank < world")
    chunks, _ = _chunks(rank, world, layout)
    require_cu_seqlens("context parallel", "cu_seqlens", cu_seqlens, _tokens(cu_seqlens))
    lengths = cu_seqlens.diff().tolist()
    for n, length in enumerate(lengths):
        if length % chunks:
            raise ContractError(
                f"context parallel got length {length} in sequence {n}; layout {layout!r} over {world} ranks needs "
                f"lengths divisible by {chunks}, pad each sequence at its end and pass the padded cu_seqlens"
            )
    return chunks


def cp_rows(cu_seqlens: torch.Tensor, rank: int, world: int, layout: str = "zigzag") -> torch.Tensor:
    """int64 ``[T / world]``: rows of the whole packed batch that a rank holds, in the order in which it holds them.

    Args:
        cu_seqlens: int ``[sequences + 1]`` of the whole, padded batch.
        layout: ``zigzag`` (2 * world chunks a sequence, rank r holds r and 2 * world - 1 - r, as Megatron does) or
            ``contiguous`` (world chunks, rank r holds r).

    Raises:
        ContractError: a length that the layout does not divide, an unknown layout, a rank outside the world.
    """
    chunks = _check(cu_seqlens, rank, world, layout)
    held = _chunks(rank, world, layout)[1]
    parts = [torch.zeros(0, dtype=torch.int64)]
    starts = cu_seqlens.tolist()
    for begin, end in pairwise(starts):
        size = (end - begin) // chunks
        parts += [torch.arange(begin + c * size, begin + (c + 1) * size) for c in held]
    return torch.cat(parts)


def cp_positions(cu_seqlens: torch.Tensor, rank: int, world: int, layout: str = "zigzag") -> torch.Tensor:
    """int64 ``[T / world]``: absolute position, inside its sequence, of every row that a rank holds."""
    rows = cp_rows(cu_seqlens, rank, world, layout)
    return positions_of_all_keys(cu_seqlens, _tokens(cu_seqlens))[rows]


def cp_split(x: torch.Tensor, cu_seqlens: torch.Tensor, rank: int, world: int, layout: str = "zigzag") -> torch.Tensor:
    """This rank's rows ``[T / world, ...]`` of ``x [T, ...]``."""
    _require_rows("cp_split", x, _tokens(cu_seqlens))
    return x[cp_rows(cu_seqlens, rank, world, layout)]


def cp_merge(parts: list[torch.Tensor], cu_seqlens: torch.Tensor, layout: str = "zigzag") -> torch.Tensor:
    """``[T, ...]`` in absolute order from every rank's rows, rank 0 first; the inverse of ``cp_split``."""
    if not isinstance(parts, (list, tuple)):
        raise ContractError(f"cp_merge got parts as {type(parts).__name__}; give every rank's rows in a list")
    if not parts:
        raise ContractError("cp_merge got no parts; give every rank's rows, rank 0 first")
    for n, part in enumerate(parts):
        require_tensor("cp_merge", f"part {n}", part)
        given, first = ((tuple(x.shape), x.dtype, x.device) for x in (part, parts[0]))
        if not part.dim() or given != first:
            raise ContractError(
                f"cp_merge got part {n} as {given} beside part 0 as {first}; supported: parts alike, [T / world, ...], "
                "as cp_split gives them"
            )
    gathered = torch.cat(list(parts))
    _require_rows("cp_merge", gathered, _tokens(cu_seqlens))
    return gathered[_merge_order(cu_seqlens, len(parts), layout)]


def _require_rows(where: str, x: torch.Tensor, tokens: int) -> None:
    require_tensor(where, "x", x)
    if not x.dim() or x.shape[0] != tokens:
        raise ContractError(
            f"{where} got a tensor {tuple(x.shape)}; cu_seqlens describes {tokens} rows, pass [{tokens}, ...]"
        )


def _merge_order(cu_seqlens: torch.Tensor, world: int, layout: str) -> torch.Tensor:
    """int64 [T]: where row t of the whole batch lies in the concatenation of the ranks' rows."""
    return torch.cat([cp_rows(cu_seqlens, r, world, layout) for r in range(world)]).argsort()


@dataclass(frozen=True)
class _Cut:
    """How one batch is cut over the ranks, on the device of its tensors.

    Attributes:
        cu, cu_local: int64 [sequences + 1], starts in the whole batch and in a rank's rows.
        positions: int64 [T / world], of this rank's rows; every_position: [T], of all. order: see ``_merge_order``.
    """

    cu: torch.Tensor
    cu_local: torch.Tensor
    positions: torch.Tensor
    every_position: torch.Tensor
    order: torch.Tensor


# by cu_seqlens; a training step hands the same tensor to every layer
_seen: ByTensor[tuple[Any, Values, _Cut]] = ByTensor()


def _cut(cu_seqlens: torch.Tensor, rank: int, world: int, layout: str, device: torch.device) -> _Cut:
    """Checked and laid out once per tensor: cutting costs host time, and a look at a GPU's value stops the stream."""
    # a tensor of inference mode does not count its changes, so nothing found in one is kept
    keeps = counted(cu_seqlens)
    key = (rank, world, layout, device)
    known = _seen.get(cu_seqlens) if keeps else None
    if known is not None and known[0] == key and known[1].hold(cu_seqlens):
        return known[2]
    # a pass in inference mode may come first, and one with gradients after it
    with torch.inference_mode(False):
        # a copy, since an entry that holds its own tensor never goes
        held = cu_seqlens.cpu().long().clone()
        rows = [cp_rows(held, r, world, layout) for r in range(world)]
        every = positions_of_all_keys(held, int(held[-1]))
        values = (held, held // world, every[rows[rank]], every, torch.cat(rows).argsort())
        cut = _Cut(*(to_device(x, device) for x in values))
    if keeps:
        _seen.keep(cu_seqlens, (key, Values(cu_seqlens), cut))
    return cut


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, cut: Any, comm: Any, scale: Any, key_tile: Any, segment: Any
    ) -> Any:  # fmt: skip
        every_k, every_v = _gather(comm, cut.order, k, v)
        packed = gpu.packed if gpu.direct(q, every_k, every_v) else ops.packed
        out, lse = packed(q, every_k, every_v, cut.cu_local, cut.cu, cut.positions, scale, key_tile, segment)
        # the gathered keys are not kept: only this rank's share stays until the backward
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.cut, ctx.comm, ctx.scale = cut, comm, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        try:
            q, k, v, out, lse = ctx.saved_tensors
            cut, comm, scale = ctx.cut, ctx.comm, ctx.scale
            grad_out = grads[0]
            kernels: Any = gpu_backward if not torch.is_grad_enabled() and gpu.direct(grad_out) else ops_backward
            delta = kernels.row_delta(grad_out, out)
            # every rank takes part in every gather, whatever its own inputs need
            every_k, every_v, every_grad, every_q, every_lse, every_delta = _gather(
                comm, cut.order, k, v, grad_out, q, lse, delta
            )
            dq = kernels.grad_queries(
                grad_out, q, every_k, every_v, lse, delta, cut.cu_local, cut.cu, cut.positions, scale
            )  # fmt: skip
            del every_k, every_v
            dk, dv = kernels.grad_keys(
                every_grad, every_q, k, v, every_lse, every_delta, cut.cu, cut.cu_local, cut.every_position,
                cut.positions, scale,
            )  # fmt: skip
            return dq, dk, dv, *([None] * 5)
        except Exception as problem:
            refuse(problem, ctx.comm, given=grads)
            raise


def _gather(comm: Communicator, order: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's rows of each tensor, in absolute order."""
    return [every[order] for every in gather_each(comm, [x.contiguous() for x in tensors])]


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    layout: str = "zigzag",
    comm: Communicator | None,
    scale: float,
    key_tile: int = KEY_TILE,
    segment: int = SEGMENT,
    family: str = "segments",
    return_lse: bool = False,
    **variants: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention whose sequences are split over the ranks of ``comm``; the bits are those of one rank.

    Args:
        q: ``[T / world, Hq, D]``; k, v: ``[T / world, Hkv, D]``: this rank's rows, as ``cp_split`` gives them.
        cu_seqlens: int ``[sequences + 1]`` of the whole batch, each sequence padded at its end to what the layout
            divides. Padding changes no real row; with a dO of zero in padding rows no real gradient either.
        layout: ``zigzag`` or ``contiguous``, see ``cp_rows``.
        comm: the context parallel ranks; None is a world of one.
        scale, key_tile, segment, return_lse, variants: as in ``attention_packed``.
        family: as in ``attention_packed``; over more than one rank ``segments`` alone.

    Returns:
        as ``attention_packed``, for this rank's rows. Gradients of k and v are complete: no reduction remains.

    Raises:
        ContractError: as ``attention_packed``, lengths or row counts that the layout does not fit, and the family
            ``nosplit`` over more than one rank.
    """
    try:
        check_peers("context_parallel_attention", comm)
        rank, world = (0, 1) if comm is None else (comm.rank, comm.world_size)
        require_indices("context parallel", cu_seqlens=cu_seqlens)
        require_tensor("context_parallel_attention", "q", q)
        cut = _cut(cu_seqlens, rank, world, layout, q.device)
        for name, x in (("q", q), ("k", k), ("v", v)):
            _require_rows(f"context_parallel_attention, {name},", x, cut.positions.numel())
        if comm is None or world == 1:
            return attention_packed(
                q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, scale=scale, key_tile=key_tile,
                segment=segment, family=family, return_lse=return_lse, **variants,
            )  # fmt: skip
        require_family("context_parallel_attention", family)
        if family == "nosplit":
            raise ContractError(
                f"context_parallel_attention got family 'nosplit' over {world} ranks: the library takes the last rows "
                "of a sequence as queries, which a rank's rows are not; use 'segments', or one rank"
            )
        check_call("context_parallel_attention", q, k, v, scale, key_tile, segment, variants)
        q, k, v = apart(q, k, v)
        out, lse = _ContextParallel.apply(q, k, v, cut, comm, float(scale), key_tile, segment)
        return (out, lse) if return_lse else out
    except Exception as problem:
        refuse(problem, comm, given=(q, k, v))
        raise
