"""``linear_logprob`` on a CPU: chunks of ids, and ranks that share the vocabulary.

Order and rounding are contract `logprob`; how many ids a chunk holds moves memory and time, never bits.
"""

import torch
from torch import Tensor

import rl_gemm
import rl_gemm.ops
from rl_contract import Communicator
from rl_contract.communicator import gather_said
from rl_contract.gradients import main_grad_of
from rl_logprob import ops
from rl_logprob.checks import real_rows
from rl_logprob.support import Support, SupportIds, key_of

# fp32 logits held at once; at least one vocabulary tile
CHUNK_ELEMENTS = 1 << 22


def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, comm: Communicator, vocab_size: int,
    vocab_tile: int, entropy: bool, support: Support | None, said: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x fp32 [T] of the targets; state fp64 [T, 3]. ``said`` is what ranks must have been given alike."""
    m, s, u, x = _local_stats(hidden, weight, targets, temperature, comm.rank, vocab_size, vocab_tile, entropy, support)
    m, s, u, x = _exchange(m, s, u, x, targets, weight.shape[0], comm, said)
    return x, ops.merge_tiles(m, s, u)


def backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, state: Tensor, dlogp: Tensor,
    dentropy: Tensor, comm: Communicator, vocab_size: int, vocab_tile: int, leaves: int, needs_hidden: bool,
    needs_weight: bool, support: Support | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of hidden and of weight, the latter None where it went into ``main_grad``."""
    rows = weight.shape[0]
    real = real_rows(rows, comm.rank, vocab_size)
    leaf_rows = rows * comm.world_size // leaves
    step = min(_chunk(len(hidden), rows, vocab_tile), leaf_rows)
    sink = _WeightGradient(weight) if needs_weight else None
    roots = []
    for leaf in range(0, rows, leaf_rows):
        # padding adds +0 to a sum that is never -0, so leaving it out keeps the bits
        root: Tensor | None = None
        end = min(leaf + leaf_rows, real)
        for begin in range(leaf, end, step):
            part = weight[begin : min(begin + step, end)]
            logits = rl_gemm.linear(hidden.detach(), part.detach(), out_dtype=torch.float32)
            first_id = comm.rank * rows + begin
            if isinstance(support, SupportIds):
                support.mask_(logits, first_id, targets)
            dlogits = ops.grad_logits(
                logits, temperature, state, targets, dlogp, dentropy, first_id, vocab_size, *key_of(support)
            ).to(weight.dtype)
            if sink is not None:
                sink.put(begin, rl_gemm.ops.grad_weight(dlogits, hidden))
            if needs_hidden:
                for b in range(0, len(part), vocab_tile):
                    block = rl_gemm.ops.grad_input(dlogits[:, b : b + vocab_tile], part[b : b + vocab_tile])
                    root = block if root is None else root.add_(block)
        if root is None:
            root = torch.zeros(hidden.shape, dtype=torch.float32)
        roots.append(root)
    dhidden = comm.all_reduce(_tree(roots), out_dtype=hidden.dtype) if needs_hidden else None
    return dhidden, sink.result() if sink is not None else None


class _WeightGradient:
    """Takes fp32 gradients of row ranges: into ``main_grad`` where the parameter has one, else rounded to its type."""

    def __init__(self, weight: Tensor) -> None:
        self.main_grad = main_grad_of(weight)
        self.own = None if self.main_grad is not None else torch.zeros_like(weight)

    def put(self, begin: int, grad: Tensor) -> None:
        if self.main_grad is not None:
            self.main_grad[begin : begin + len(grad)].add_(grad)
        elif self.own is not None:
            self.own[begin : begin + len(grad)] = grad

    def result(self) -> Tensor | None:
        return self.own


def _chunk(tokens: int, rows: int, tile: int) -> int:
    """Ids per chunk, whole tiles."""
    return min(rows, max(1, CHUNK_ELEMENTS // (max(tokens, 1) * tile)) * tile)


def _tree(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2])]
    return parts[0]


def _local_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    rank: int,
    vocab_size: int,
    vocab_tile: int,
    with_entropy: bool,
    support: Support | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's tiles m, s, u [T, tiles/t], and x [T] of the targets it owns, 0 elsewhere."""
    rows, tokens = weight.shape[0], len(hidden)
    real = real_rows(rows, rank, vocab_size)
    stats = []
    x = torch.zeros(tokens, dtype=torch.float32)
    step = _chunk(tokens, rows, vocab_tile)
    for begin in range(0, real, step):
        part = weight[begin : min(begin + step, real)]
        logits = rl_gemm.linear(hidden.detach(), part.detach(), out_dtype=torch.float32)  # [T, step]
        first_id = rank * rows + begin
        if isinstance(support, SupportIds):
            support.mask_(logits, first_id, targets)
        key = key_of(support)
        stats.append(ops.tile_stats(logits, temperature, first_id, vocab_size, vocab_tile, with_entropy, *key, targets))
        at = targets - first_id
        here = ((at >= 0) & (at < len(part))).nonzero()[:, 0]
        x[here] = logits[here, at[here]] / temperature[here]
    # tiles of padding only are never computed: their maximum is -inf, their sums are 0
    empty = rows // vocab_tile - -(-real // vocab_tile)
    nothing = torch.zeros(tokens, empty, dtype=torch.int64)
    stats.append((torch.full((tokens, empty), -torch.inf), nothing, nothing if with_entropy else nothing[:, :0]))
    m, s, u = (torch.cat(parts, dim=1) for parts in zip(*stats))
    return m, s, u, x


def _exchange(
    m: Tensor, s: Tensor, u: Tensor, x: Tensor, targets: Tensor, rows: int, comm: Communicator, said: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One gather of every rank's tiles and target logits; tiles come back in id order, x from the rank that owns it."""
    if comm.world_size == 1:
        return m, s, u, x
    tokens = len(m)
    words = [m.view(torch.int32), s.view(torch.int32), u.view(torch.int32), x[:, None].view(torch.int32)]
    packed = gather_said(comm, torch.cat(words, dim=1)[None], said)  # [t, T, words]
    parts = packed.split([w.shape[1] for w in words], dim=2)

    def in_id_order(part: Tensor, dtype: torch.dtype) -> Tensor:
        # a fresh flat copy: a view as a wider type needs an even offset and even strides, also of empty dimensions
        wide = part.reshape(-1).clone().view(dtype).view(comm.world_size, tokens, part.shape[2] * 4 // dtype.itemsize)
        return wide.transpose(0, 1).reshape(tokens, comm.world_size * wide.shape[2])

    owner = targets // rows
    x = parts[3].contiguous().view(torch.float32)[owner, torch.arange(tokens), 0]
    return (
        in_id_order(parts[0], torch.float32),
        in_id_order(parts[1], torch.int64),
        in_id_order(parts[2], torch.int64),
        x,
    )
