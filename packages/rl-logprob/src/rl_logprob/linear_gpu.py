"""``linear_logprob`` on a GPU: slices of tokens, and ranks that share the vocabulary.

Contract `logprob`: what crosses ranks is a row's maximum, then integer sums against the maximum of all ranks. Maximum
and integer addition have no order, so how tokens are sliced and how many ranks there are never shows in the bits.
"""

import torch
from torch import Tensor

from rl_contract import Communicator
from rl_contract.communicator import gather_said
from rl_contract.gradients import main_grad_of
from rl_logprob import gpu, gpu_grad
from rl_logprob.checks import real_rows
from rl_logprob.contract import GPU_TILE, GPU_TOKEN_BLOCK
from rl_logprob.support import Support


@torch.compiler.disable
def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, comm: Communicator, vocab_size: int,
    entropy: bool, leaves: int = 1, keep_logits: int = 0, support: Support | None = None, said: str = "",
) -> tuple[Tensor, Tensor, Tensor, list[gpu.Kept]]:  # fmt: skip
    """x fp32 [T] of the targets, NaN for one outside the vocabulary; its log-probability fp32 [T]; state fp64 [T, 3];
    logits kept, by block of tokens. ``said`` is what ranks must have been given alike.
    """
    scores = gpu.ready(hidden).scores
    rows = weight.shape[0]
    real = real_rows(rows, comm.rank, vocab_size)
    tokens, alone = hidden.shape[0], comm.world_size == 1
    x, logp = (torch.empty(tokens, dtype=torch.float32, device=hidden.device) for _ in range(2))
    state = torch.empty((tokens, 3), dtype=torch.float64, device=hidden.device)
    # logits are kept for the blocks of tokens of the backward
    step = GPU_TOKEN_BLOCK if keep_logits else gpu.stats_rows(rows // GPU_TILE, entropy)
    if tokens > step and not keep_logits:
        # slices of one size, since a short last one would leave processors idle
        step = -(-tokens // -(-tokens // step) // 128) * 128
    logits: list[gpu.Kept] = []
    first_id = comm.rank * rows
    if not tokens and not alone:
        # peers that have rows learn of it
        gather_said(comm, x[None], said)
    for begin in range(0, tokens, step):
        part = slice(begin, min(begin + step, tokens))
        h, goal, temp, own, out = hidden, targets, temperature, support, (x, state, logp)
        if tokens > step:
            h, goal, temp, out = h[part], goal[part], _part(temp, part), (x[part], state[part], logp[part])
            own = None if own is None else own[part]
        if keep_logits:
            logits.append({})
            room = keep_logits * len(h) // tokens
            found = gpu.stats(
                h, weight, temp, real, entropy, kept=logits[-1], keep_bytes=room,
                leaf_rows=rows * comm.world_size // leaves, first_id=first_id, targets=goal, support=own,
            )  # fmt: skip
        else:
            found = gpu.stats(h, weight, temp, real, entropy, first_id=first_id, targets=goal, support=own)
        gpu.target_logits(h, weight, goal, temp, first_id, real, out[0], vocab_size if alone else None)
        if alone:
            scores.score(found, *out)
            gpu.record("triton_scores.score")
        else:
            # ranks' numbers are added, so a NaN has to wait until they are
            here, whole = _exchange(out[0], found, comm, entropy, said)
            out[0].copy_(torch.where((goal >= 0) & (goal < vocab_size), here, torch.nan))
            out[1].copy_(whole)
            gpu.record("triton_scores.merge")
        # the next slice's statistics take their place
        del found
    return x, logp if alone else gpu.selected(x, state), state, logits


def _part(temperature: Tensor, part: slice) -> Tensor:
    return temperature[part] if temperature.numel() else temperature


def _exchange(
    x: Tensor, found: tuple[Tensor, Tensor, Tensor], comm: Communicator, entropy: bool, said: str = ""
) -> tuple[Tensor, Tensor]:
    """x of whichever rank holds the target, and the state over all ranks: 4 bytes a token, then 24."""
    ranks = gpu.kernels().ranks
    m, s, u = found
    top = ranks.rank_top(m) if m.shape[0] else torch.full_like(x, -torch.inf)
    top = gather_said(comm, top[None], said).amax(0)
    sums = ranks.rank_sums(m, s, u, top) if m.shape[0] else torch.zeros((2, len(x)), dtype=torch.int64, device=x.device)
    # every rank but the owner of a target holds +0, whose bit pattern is 0
    mine = torch.cat([sums, x.view(torch.int32)[None].to(torch.int64)])
    total = comm.all_gather(mine[None], dim=0).sum(0)
    return total[2].to(torch.int32).view(torch.float32), ranks.state_of(top, total[:2].contiguous(), entropy)


@torch.compiler.disable
def backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, state: Tensor, dlogp: Tensor,
    dentropy: Tensor,
    comm: Communicator, vocab_size: int, leaves: int, needs_hidden: bool, needs_weight: bool,
    logits: list[gpu.Kept], support: Support | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of hidden and weight; that of weight is None where ``weight.main_grad`` took it."""
    rows = weight.shape[0]
    blocks = range(0, len(hidden), GPU_TOKEN_BLOCK)
    main_grad = main_grad_of(weight) if needs_weight else None
    sink, add = None, False
    if main_grad is not None:
        sink, add = main_grad, True
    elif needs_weight:
        # blocks of tokens are added in fp32, so more than one needs room for that; a trainer has main_grad
        add = len(blocks) > 1
        if len(blocks) == 1:
            # one block writes every row of an id; only padding is left
            sink = torch.empty_like(weight)
            sink[real_rows(rows, comm.rank, vocab_size) :].zero_()
        else:
            sink = torch.zeros_like(weight, dtype=torch.float32 if add else weight.dtype)
    dhidden = torch.empty_like(hidden) if needs_hidden and len(blocks) != 1 else None
    for i, begin in enumerate(blocks):
        part = slice(begin, min(begin + GPU_TOKEN_BLOCK, len(hidden)))
        root = gpu_grad.backward(
            hidden[part], weight, _part(temperature, part), state[part], targets[part], dlogp[part],
            dentropy[part] if dentropy.numel() else dentropy, first_id=comm.rank * rows,
            real=real_rows(rows, comm.rank, vocab_size), leaf_rows=rows * comm.world_size // leaves,
            needs_hidden=needs_hidden,
            weight_grad=sink, add=add, kept=logits[i] if logits else {},
            support=None if support is None else support[part],
        )  # fmt: skip
        if root is not None and len(blocks) == 1:
            dhidden = comm.all_reduce(root, out_dtype=hidden.dtype)
        elif dhidden is not None and root is not None:
            dhidden[part] = comm.all_reduce(root, out_dtype=hidden.dtype)
        # the next block's root takes its place
        del root
    if sink is None or sink is main_grad:
        return dhidden, None
    return dhidden, sink.to(weight.dtype)
