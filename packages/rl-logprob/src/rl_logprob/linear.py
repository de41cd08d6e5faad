"""Log-probability straight from hidden states: the head's product, scored chunk by chunk, nothing of size [T, V] kept.

Order and rounding are contract `logprob`; how many ids a chunk holds moves memory and time, never bits.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from rl_contract import Communicator, ContractError, SingleRank, TokenShards
from rl_contract.checks import require_tensor, shown, whole_number
from rl_contract.communicator import refuse, said_of
from rl_contract.gradients import apart
from rl_contract.tokens import check_peers
from rl_logprob import gpu, linear_cpu, linear_gpu, linear_shared, ops
from rl_logprob.checks import (
    check_targets,
    check_tensor,
    check_vocab,
    refuse_nonfinite,
    refuse_rows,
    row_temperature,
    said_temperature,
)
from rl_logprob.scores import Nonfinite
from rl_logprob.support import Support, SupportIds, check_support, refuse_empty, said_support


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    comm: Communicator | None = None,
    leaves: int = 1,
    return_entropy: Literal[False] = False,
    nonfinite: Nonfinite = "raise",
    keep_logits: int | Literal["auto"] = 0,
    tokens: TokenShards | None = None,
    support: Support | None = None,
    return_rescued: Literal[False] = False,
) -> Tensor: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    comm: Communicator | None = None,
    leaves: int = 1,
    return_entropy: Literal[True],
    nonfinite: Nonfinite = "raise",
    keep_logits: int | Literal["auto"] = 0,
    tokens: TokenShards | None = None,
    support: Support | None = None,
    return_rescued: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    comm: Communicator | None = None,
    leaves: int = 1,
    return_entropy: bool = False,
    nonfinite: Nonfinite = "raise",
    keep_logits: int | Literal["auto"] = 0,
    tokens: TokenShards | None = None,
    support: Support | None = None,
    return_rescued: Literal[True],
) -> tuple[Tensor, ...]: ...
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    vocab_tile: int = 512,
    comm: Communicator | None = None,
    leaves: int = 1,
    return_entropy: bool = False,
    nonfinite: Nonfinite = "raise",
    keep_logits: int | Literal["auto"] = 0,
    tokens: TokenShards | None = None,
    support: Support | None = None,
    return_rescued: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``log softmax(hidden @ weight.T / temperature)[target]``, the bits of ``selected_logprob`` at every world size.

    Args:
        hidden: [T, H], bf16 or fp32, the same on every rank.
        weight: [V_padded/t, H] of hidden's type: rank r's rows of the head, padded to ``padded_vocab_size``.
        targets: int64 or int32 [T], global ids below ``vocab_size``.
        vocab_size: the real vocabulary; rows from there on are padding and take no part, whatever they hold.
        temperature: positive number, or fp32 [T].
        vocab_tile: ids per tile; belongs to the contract.
        comm: the t ranks that share the vocabulary; ``None`` is a world of one. Where it compares what ranks say (as
            ``TreeCommunicator`` does, in the call that is made anyway), those that give another ``vocab_size``,
            ``vocab_tile``, ``leaves``, ``return_entropy``, ``nonfinite``, number of rows, type or temperature are
            refused, and on a CPU other targets or another support. Not compared: hidden itself, tensors on a GPU,
            anything inside of what a compiler has traced, and between hosts with NCCL all but a shape's first call.
        leaves: G of the tree over the padded vocabulary in hidden's gradient; a power of two, a multiple of t.
        return_entropy: also return the entropy of each row, in nats.
        nonfinite: ``"raise"``, which on a GPU waits for the device once, or ``"nan"``, which never does: a row that
            is not finite, or whose target or temperature lie on the GPU and are out of range, gets NaN.
        keep_logits: bytes of GPU memory in which fp32 logits may wait for the backward, which computes the others
            again; memory for time, never bits. ``"auto"``: half of what is free at the call,
            from 4,096 tokens on. A CPU keeps none.
        tokens: where hidden is one context parallel rank's rows, the ranks that hold the others: the gradient of weight
            is then that of all tokens, the same on every rank, in the bits of one rank that holds them all.
        support: the kept ids of each row, over which probabilities are renormalised; see ``sampling_support``. The same
            on every rank. A target outside is kept all the same.
        return_rescued: also return which rows' targets were outside their support, bool [T].

    Returns:
        fp32 [T], nats; or a tuple of that, entropy fp32 [T] if asked for, rescued if asked for. Gradients
        flow from the first two to hidden and weight. That of weight is added in fp32 to ``weight.main_grad`` where that
        exists, and rounded to weight's type otherwise.

    Raises:
        ContractError: types, shapes, a target or a temperature out of range, shards that are not whole tiles or too
            small for the vocabulary, leaves that do not fit, rows whose logits are not finite, a support made at
            another temperature, or, on a CPU, one that keeps no id of a row; on every rank, ranks that were given
            different values of what ``comm`` compares.
        MissingSupport: a device without kernels.
    """
    try:
        check_peers("linear_logprob", comm, tokens)
        comm = SingleRank() if comm is None else comm
        check_vocab(vocab_size, vocab_tile)
        _check(hidden, weight, vocab_size, vocab_tile, comm.world_size, leaves)
        check_targets(targets, len(hidden), vocab_size)
        if nonfinite not in ("raise", "nan"):
            raise ContractError(f"nonfinite={shown(nonfinite)}; supported: 'raise', or 'nan' to give such rows NaN")
        if hidden.is_cuda:
            gpu.check(hidden, weight, vocab_tile)
        temp = row_temperature(temperature, len(hidden), hidden.device)
        targets = targets.to(hidden.device, torch.int64).contiguous()
        if keep_logits != "auto" and (not whole_number(keep_logits) or keep_logits < 0):
            raise ContractError(
                f"keep_logits={shown(keep_logits)}; supported: a number of bytes, 0 to keep none, or 'auto'"
            )
        check_support(support, len(hidden), hidden.device, vocab_size, temperature)
        if tokens is not None and isinstance(support, SupportIds):
            raise ContractError(
                "support is a list of ids beside tokens=TokenShards; supported: SupportKey, whose rows can be gathered"
            )
        if tokens is not None and not temp.numel():
            # the short form of temperature 1 cannot be gathered
            temp = torch.ones(len(hidden), dtype=torch.float32, device=hidden.device)
        strict = nonfinite == "raise"
        grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        if grad:
            weight, hidden = apart(weight, hidden)
        room = 0 if not grad or not hidden.is_cuda else gpu.room(len(hidden)) if keep_logits == "auto" else keep_logits
        said = ""
        if comm.world_size > 1:
            said = said_of(
                "linear_logprob", vocab_size=vocab_size, vocab_tile=vocab_tile, leaves=leaves,
                temperature=said_temperature(temperature, temp), return_entropy=bool(return_entropy),
                nonfinite=nonfinite, targets=targets, hidden=hidden.dtype, H=hidden.shape[1], weight=weight.dtype,
                rows=len(weight), **said_support(support),
            )  # fmt: skip
        given = (
            hidden, weight, targets, temp, comm, vocab_size, vocab_tile, leaves, return_entropy, strict, room, support,
            return_rescued, said,
        )  # fmt: skip
        if grad or not hidden.is_cuda:
            logp, entropy, rescued = _LinearLogprob.apply(
                tokens, temperature if _by_row(temperature) else float(temperature), *given
            )
        else:
            logp, entropy, rescued = _score(*given)[:3]
        found = [logp]
        found += [entropy] if return_entropy and entropy is not None else []
        found += [rescued] if return_rescued and rescued is not None else []
        return tuple(found) if len(found) > 1 else logp
    except Exception as problem:
        refuse(problem, comm, tokens, given=(hidden, weight))
        raise


def _check(hidden: Tensor, weight: Tensor, vocab_size: int, vocab_tile: int, world: int, leaves: int) -> None:
    for name, x in (("hidden", hidden), ("weight", weight)):
        check_tensor(name, x)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ContractError(
            f"linear_logprob got hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; "
            "needs [T, H] and [V_padded/t, H] with one H"
        )
    rows = weight.shape[0]
    remedy = "pad the head to padded_vocab_size(vocab_size, vocab_tile) and split it evenly"
    if rows == 0 or rows % vocab_tile:
        raise ContractError(f"weight has {rows} rows; supported: whole tiles of {vocab_tile} ids; {remedy}")
    if rows * world < vocab_size:
        raise ContractError(f"{world} shards of {rows} rows do not hold vocab_size={vocab_size}; {remedy}")
    if not whole_number(leaves) or leaves < 1 or leaves & (leaves - 1) or leaves % world:
        raise ContractError(f"leaves={shown(leaves)} on {world} ranks; supported: a power of two that {world} divides")
    if rows % (leaves // world * vocab_tile):
        raise ContractError(
            f"leaves={shown(leaves)} cut {rows * world} ids into parts of {rows * world / leaves:g}; "
            f"supported: whole tiles of {vocab_tile}; {remedy}"
        )


def _by_row(temperature: float | Tensor) -> bool:
    return isinstance(temperature, Tensor) and temperature.dim() > 0


def _score(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, comm: Communicator, vocab_size: int,
    vocab_tile: int, leaves: int, with_entropy: bool, strict: bool, keep_logits: int, support: Support | None,
    with_rescued: bool, said: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, list[gpu.Kept]]:  # fmt: skip
    """logp fp32 [T]; entropy and rescued where asked for; state fp64 [T, 3] and logits that are kept."""
    logits: list[gpu.Kept] = []
    if hidden.is_cuda:
        x, logp, state, logits = linear_gpu.forward(
            hidden, weight, targets, temperature, comm, vocab_size, with_entropy, leaves, keep_logits, support, said
        )
    else:
        x, state = linear_cpu.forward(
            hidden, weight, targets, temperature, comm, vocab_size, vocab_tile, with_entropy, support, said
        )
        if strict:
            refuse_nonfinite(state, temperature)
        logp = ops.selected(x, state)
    if hidden.is_cuda and strict:
        refuse_rows(logp, state, targets, temperature, vocab_size)
    elif support is not None and strict:
        refuse_empty(support, x, targets, state)
    rescued = None
    if with_rescued:
        rescued = torch.zeros_like(targets, dtype=torch.bool) if support is None else support.outside(x, targets)
    return logp, state[:, 2].float() if with_entropy else None, rescued, state, logits


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tokens: TokenShards | None, given_temperature: float | Tensor, *given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, targets, temperature, comm, vocab_size, vocab_tile, leaves = given[:8]
        ctx.with_entropy, ctx.support = given[8], given[11]
        logp, entropy, rescued, state, ctx.logits = _score(*given)
        ctx.temperature = None if isinstance(given_temperature, Tensor) else given_temperature
        ctx.save_for_backward(hidden, weight, targets, temperature, state)
        ctx.comm, ctx.vocab_size, ctx.vocab_tile, ctx.leaves, ctx.tokens = comm, vocab_size, vocab_tile, leaves, tokens
        if rescued is None:
            rescued = torch.empty(0, dtype=torch.bool, device=hidden.device)
        if entropy is None:
            entropy = logp.new_empty(0)
        ctx.mark_non_differentiable(*(rescued,) if ctx.with_entropy else (entropy, rescued))
        return logp, entropy, rescued

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dlogp: Tensor, dentropy: Tensor, _rescued: Tensor
    ) -> tuple[Tensor | None, ...]:
        try:
            hidden, weight, targets, temperature, state = ctx.saved_tensors
            held = {"hidden": hidden, "weight": weight, "targets": targets, "temperature": temperature, "state": state}
            for name, x in (held | said_support(ctx.support)).items():
                if x is not None:
                    require_tensor("linear_logprob's backward", name, x)
            needs_hidden, needs_weight = ctx.needs_input_grad[2:4]
            if not ctx.with_entropy:
                dentropy = dlogp.new_empty(0)
            rows = [hidden, targets, temperature, state, dlogp.contiguous(), dentropy.contiguous()]
            if ctx.tokens is None or not needs_weight:
                grads = _gradients(
                    ctx,
                    ctx.comm,
                    weight,
                    *rows,
                    support=ctx.support,
                    needs_hidden=needs_hidden,
                    needs_weight=needs_weight,
                )
                return None, None, *grads, *[None] * 12
            dhidden = None
            if needs_hidden:
                dhidden = _gradients(
                    ctx, ctx.comm, weight, *rows, support=ctx.support, needs_hidden=True, needs_weight=False
                )[0]
            ctx.logits = None
            return None, None, dhidden, linear_shared.weight_gradient(_gradients, ctx, weight, rows), *[None] * 12
        except Exception as problem:
            refuse(problem, ctx.comm, ctx.tokens, given=(dlogp,))
            raise


def _gradients(
    ctx: Any, comm: Any, weight: Tensor, hidden: Tensor, targets: Tensor, temperature: Tensor, state: Tensor,
    dlogp: Tensor, dentropy: Tensor, *, support: Support | None, needs_hidden: bool, needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of hidden and of weight from these rows."""
    if hidden.is_cuda:
        return linear_gpu.backward(
            hidden, weight, targets, temperature, state, dlogp, dentropy, comm, ctx.vocab_size, ctx.leaves,
            needs_hidden, needs_weight, ctx.logits, support,
        )  # fmt: skip
    return linear_cpu.backward(
        hidden, weight, targets, temperature, state, dlogp, dentropy, comm, ctx.vocab_size, ctx.vocab_tile, ctx.leaves,
        needs_hidden, needs_weight, support,
    )  # fmt: skip
