"""The head's gradient of weight over context parallel ranks: each computes equal rows of it from all tokens.

The bits are those of one rank that holds all tokens: tokens are gathered in packed order and every row is computed by
one rank alone, so no partial sums are joined.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from rl_contract.gradients import main_grad_of
from rl_logprob.checks import row_temperature
from rl_logprob.support import Support, SupportKey, key_of

# below so many tokens a GPU computes a gradient of weight sooner than its peers could send their parts
SHARED_TOKENS = 4096

# (ctx, comm, weight, hidden, targets, temperature, state, dlogp, dentropy, support=, needs_hidden=, needs_weight=)
Gradients = Callable[..., tuple[Tensor | None, Tensor | None]]


class _Shard(NamedTuple):
    """Whose rows of the vocabulary are meant; a gradient of weight moves nothing."""

    rank: int
    world_size: int


def weight_gradient(gradients: Gradients, ctx: Any, weight: Tensor, rows: list[Tensor]) -> Tensor | None:
    """Gradient of weight from the tokens of all of ``ctx.tokens``, of which this rank holds ``rows``.

    ``rows``: hidden, targets, temperature, state, dlogp, dentropy. None where it went into ``weight.main_grad``.
    """
    every, support = _all_tokens(ctx, rows)
    peers, comm = ctx.tokens.comm, ctx.comm
    few = weight.is_cuda and ctx.tokens.total < SHARED_TOKENS
    if few or peers.world_size == 1 or len(weight) % (peers.world_size * ctx.vocab_tile):
        # no whole tiles for each, or not worth sending: every rank computes all rows
        return gradients(ctx, comm, weight, *every, support=support, needs_hidden=False, needs_weight=True)[1]
    size = len(weight) // peers.world_size
    mine = slice(peers.rank * size, (peers.rank + 1) * size)
    part, main_grad = weight.detach()[mine], main_grad_of(weight)
    if main_grad is not None:
        setattr(part, "main_grad", main_grad[mine])  # noqa: B010 - Tensor declares no such attribute
    shard = _Shard(comm.rank * peers.world_size + peers.rank, comm.world_size * peers.world_size)
    own = gradients(ctx, shard, part, *every, support=support, needs_hidden=False, needs_weight=True)[1]
    if main_grad is None:
        assert own is not None
        return peers.all_gather(own, dim=0)
    # every rank's main_grad was the same, so the rows that peers have added to are theirs as they are
    ctx.tokens.share(main_grad)
    return None


def _all_tokens(ctx: Any, rows: list[Tensor]) -> tuple[list[Tensor], Support | None]:
    """The rows of all ranks in packed order, and their support."""
    hidden, targets, temperature, state, dlogp, dentropy = rows
    given = {"hidden": hidden, "targets": targets, "state": state, "dlogp": dlogp}
    if ctx.temperature is None:
        given["temperature"] = temperature
    if ctx.with_entropy:
        given["dentropy"] = dentropy
    threshold, last_id = key_of(ctx.support)
    if threshold is not None and last_id is not None:
        given |= {"threshold": threshold, "last_id": last_id}
    every = dict(zip(given, ctx.tokens.gather_each(*given.values())))
    if ctx.temperature is not None:
        # one number for all tokens, of which a GPU keeps no row where it is 1
        every["temperature"] = row_temperature(ctx.temperature, ctx.tokens.total, hidden.device)
    support = SupportKey(every["threshold"], every["last_id"]) if "threshold" in every else None
    everyone = [every[name] for name in ("hidden", "targets", "temperature", "state", "dlogp")]
    return [*everyone, every.get("dentropy", dentropy)], support
