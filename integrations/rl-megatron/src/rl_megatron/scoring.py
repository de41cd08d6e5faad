"""Log-probabilities of response tokens: one function for scoring and for training, so that both give the same bits."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

import rl_logprob
from rl_contract import Communicator, ContractError
from rl_contract.checks import shown
from rl_contract.devices import to_device
from rl_contract.shares import LaterShares
from rl_logprob.checks import FP32_TINY, usable_temperature
from rl_megatron import native, tokens, topology
from rl_megatron.batch import PackedBatch, RankBatch, StrictPackedSeqParams
from rl_megatron.checks import real
from rl_megatron.cpu_device import cpu_device, device

# tokens in what the longest sequence that TransformerEngine is told of is a multiple of; 2 * CP divides it
_BOUND = 64


def logprobs(
    model: GPTModel, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = False
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Log-probability of every response token under the policy at ``temperature``.

    Returns:
        One fp32 tensor a sample, as long as its response, the same on every rank; with gradients where grad mode is on.
        With ``with_entropy`` a second such list, without gradients, in nats.

    Raises:
        ContractError: the batch was packed for another CP size, or the temperature is none that fp32 can divide by.
    """
    out = token_logprobs(model, batch, temperature=temperature, with_entropy=with_entropy)
    if with_entropy:
        return batch.split(out[0]), batch.split(out[1])
    return batch.split(out)


def token_logprobs(
    model: GPTModel,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    nonfinite: Literal["raise", "nan"] = "raise",
    keep_logits: int = 0,
) -> Any:
    """As ``logprobs``, packed: fp32 ``[response tokens]`` (and the entropies), on the model's device.

    Args:
        nonfinite: on a GPU ``raise`` waits for the device; ``nan`` does not, and the caller looks later.
        keep_logits: see ``rl_logprob.linear_logprob``.
    """
    built = model.rl
    if batch.cp != built.parallel.cp:
        raise ContractError(
            f"the batch is packed for cp={batch.cp}, the model is built for cp={built.parallel.cp}; pack it again"
        )
    check_temperature(temperature)
    comm = topology.context_parallel()
    mine = batch.on(comm.rank, device())
    with cpu_device():
        scored = _score(model, batch, mine, temperature, with_entropy, nonfinite, keep_logits)
        if comm.world_size == 1:
            return scored
        if with_entropy:
            return _GatherSlots.apply(scored[0], batch, comm), _GatherSlots.apply(scored[1], batch, comm)
        return _GatherSlots.apply(scored, batch, comm)


def check_temperature(temperature: float) -> None:
    """Raise ContractError unless it is a number that logits can be divided by: finite, and of all bits in fp32."""
    if real(temperature) and usable_temperature(temperature):
        return
    raise ContractError(
        f"temperature={shown(temperature)}, supported: a finite number above 0 that fp32 holds, at least "
        f"{FP32_TINY:.3g}; give the rollout's"
    )


def _score(
    model: GPTModel,
    batch: PackedBatch,
    mine: RankBatch,
    temperature: float,
    with_entropy: bool,
    nonfinite: str,
    keep_logits: int,
) -> Any:
    built = model.rl
    scored = _TakeRows.apply(_decode(model, batch, mine), mine.rows)
    settings = built.profile.settings
    if built.mode == "native":
        return native.token_logprobs(
            scored,
            mine.targets,
            vocab_size=settings.vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
            fused=built.native_operators == "te",
        )
    score: Any = rl_logprob.linear_logprob
    later = later_shares(model)
    return score(
        scored,
        _head_weight(model),
        mine.targets,
        vocab_size=settings.vocab_size,
        temperature=temperature,
        vocab_tile=settings.vocab_tile,
        comm=topology.tensor_parallel(),
        leaves=settings.leaves,
        return_entropy=with_entropy,
        tokens=batch.once(("scored", id(later)), lambda: batch.scored_shards(topology.context_parallel(), later)),
        nonfinite=nonfinite,
        keep_logits=keep_logits,
    )


def later_shares(model: GPTModel) -> LaterShares | None:
    """Where the model's optimizer lets rows of weight gradients wait; None where they are taken over at once."""
    return getattr(model, "rl_later", None)


class _TakeRows(torch.autograd.Function):
    """x[rows] for distinct rows; backward writes each gradient to its place, nothing is added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, rows, grads[0]), None


def _decode(model: GPTModel, batch: PackedBatch, mine: RankBatch) -> Tensor:
    """Strict: hidden states ``[T/cp, H]``. Native: this rank's logits ``[T/cp, V_padded/t]``."""
    longest, cu_seqlens = max(batch.lengths), batch.cu_seqlens
    if model.rl.native_operators == "te":
        cu_seqlens = batch.once(("cu_seqlens", device()), lambda: to_device(batch.cu_seqlens, device()))
        # as TransformerEngine rounds a bound of its own: its kernels are planned for each bound anew
        longest = -(-longest // _BOUND) * _BOUND
    params = StrictPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=mine.positions,
        batch=batch,
    )
    strict = model.rl.mode == "strict"
    shards = None
    if strict and torch.is_grad_enabled():
        later = later_shares(model)
        shards = batch.once(("tokens", id(later)), lambda: batch.token_shards(topology.context_parallel(), later))
    tokens.enter(shards)
    out = model(
        input_ids=mine.token_ids[None],
        position_ids=mine.positions[None],
        attention_mask=None,
        packed_seq_params=params,
    )
    return tokens.announced(out[0], shards)


def _head_weight(model: GPTModel) -> Tensor:
    return model.shared_embedding_or_output_weight() if model.rl.config.tied else model.output_layer.weight


class _GatherSlots(torch.autograd.Function):
    """Every rank's values in packed order on every rank.

    The loss is computed alike on all ranks, so backward keeps a rank's own part.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: PackedBatch, comm: Communicator) -> Tensor:
        slots = [batch.on(r, values.device).slots for r in range(comm.world_size)]
        ctx.slots = slots[comm.rank]
        longest = max(s.numel() for s in slots)
        padded = torch.zeros(longest, dtype=values.dtype, device=values.device)
        padded[: values.numel()] = values
        rows = comm.all_gather(padded[None], dim=0)
        total = torch.empty(sum(s.numel() for s in slots), dtype=values.dtype, device=values.device)
        for row, s in zip(rows, slots):
            total[s] = row[: s.numel()]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.slots], None, None


def refuse_nan(values: Sequence[np.ndarray]) -> None:
    """Raise ContractError for a log-probability that is NaN, one array a sample."""
    for i, value in enumerate(values):
        bad = np.flatnonzero(np.isnan(value))
        if bad.size:
            raise ContractError(
                f"log-probability of response token {bad[0]} of sample {i} is NaN ({bad.size} in this sample): its "
                "logits hold a NaN, +inf or no finite value; look for the first nonfinite activation or weight"
            )
