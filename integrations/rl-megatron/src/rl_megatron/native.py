"""What the native arm has beside Megatron-core's modules: its loss, and attention without TransformerEngine."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_contract import ContractError
from rl_contract.devices import to_device
from rl_megatron import topology
from rl_megatron.batch import PackedBatch, StrictPackedSeqParams
from rl_megatron.checks import choice_problem
from rl_megatron.cpu_device import device

# below this mean length many short calls cost more than the faster kernel gains
_LONG = 512


def native_substitutions(operators: str = "local") -> list[dict[str, str]]:
    """What the native arm replaces of stock Megatron on this device, and why; for the run's manifest.

    Args:
        operators: ``te`` or ``local``, as ``model.rl.native_operators`` says.

    Raises:
        ContractError: another value; ``auto`` is none that runs.
    """
    if problem := choice_problem("operators", operators, ("te", "local")):
        raise ContractError(f"native_substitutions: {problem}; give model.rl.native_operators")
    on_cpu = device().type == "cpu"
    attention = [
        {
            "stock": "megatron.core.transformer.dot_product_attention.DotProductAttention",
            "used": "rl_megatron.native.PackedDotProductAttention"
            + ("" if on_cpu else " (torch scaled_dot_product_attention: cuDNN, else FlashAttention)"),
            "why": "without TransformerEngine the stock module refuses packed sequences and context parallelism",
        }
    ]
    found = [
        *(attention if operators == "local" else []),
        {
            "stock": "megatron.core.optimizer (Apex or TransformerEngine fused Adam)",
            "used": "rl_megatron.StrictOptimizer, unless OptimizerConfig(kind='megatron')"
            + ("" if operators == "te" else ", and there torch's Adam with Megatron's own norm and clip"),
            "why": "one optimizer in both arms, so that only operators differ",
        },
    ]
    if on_cpu:
        found.append(
            {
                "stock": "torch.cuda.current_device, torch.cuda.synchronize",
                "used": "rl_megatron.cpu_device",
                "why": "Megatron-core asks CUDA for its device; here the answer is the CPU",
            }
        )
    return found


class PackedDotProductAttention(torch.nn.Module):
    """Causal attention with torch's scaled_dot_product_attention; with CP, keys are gathered."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._cp_group = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: StrictPackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """q [T, Hq/t, D], k and v [T, Hkv/t, D] -> [T, Hq/t * D]."""
        if packed_seq_params is None:
            raise ContractError("native attention takes packed sequences; build the input with rl_megatron.PackedBatch")
        cu = packed_seq_params.cu_seqlens_q.tolist()
        batch = packed_seq_params.batch
        if batch.cp > 1:
            order = batch.once(("order", query.device), partial(_rank_order, batch, query.device))
            key = _GatherTokens.apply(key, self._cp_group)[order]
            value = _GatherTokens.apply(value, self._cp_group)[order]
        if query.is_cuda:
            return _on_gpu(query, key, value, batch, cu, self.scale, self._cp_group).flatten(1)
        out = []
        start = 0
        for a, b in pairwise(cu):
            n = (b - a) // batch.cp
            positions = packed_seq_params.positions[start : start + n]
            mask = positions[:, None] >= torch.arange(b - a, device=positions.device)[None, :]
            q, k, v = (x.transpose(0, 1)[None] for x in (query[start : start + n], key[a:b], value[a:b]))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
            out.append(y[0].transpose(0, 1))
            start += n
        return torch.cat(out).flatten(1)


def _rank_order(batch: PackedBatch, place: torch.device) -> Tensor:
    order = torch.cat([batch.rank_tokens(r) for r in range(batch.cp)]).argsort()
    return to_device(order, place)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, cu: list[int], scale: float, cp_group: Any) -> Tensor:
    """[T, Hq, D]: long sequences by cuDNN, equal neighbours in one call; else FlashAttention, packed."""
    lengths = [b - a for a, b in pairwise(cu)]
    if batch.cp > 1 or len(q) < _LONG * len(lengths):
        rank = cp_group.rank() if batch.cp > 1 else 0
        cut = batch.once(("flash", rank, q.device), partial(_chunks, lengths, rank, batch.cp, q.device))
        return _flash(q, k, v, cut, scale)
    out, start = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        part = slice(start, start + count * length)
        start = part.stop
        qs, ks, vs = (x[part].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            y = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=scale, enable_gqa=True)
        out.append(y.transpose(1, 2).flatten(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


@dataclass(frozen=True)
class _Cut:
    """Starts of queries and keys, int32 on the GPU, their longest lengths, and rows of the keys (None: as they are)."""

    starts: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    rows: Tensor | None


def _chunks(lengths: list[int], rank: int, cp: int, place: torch.device) -> _Cut:
    """Each of a rank's chunks as a sequence of its own, which sees all keys up to its end."""
    queries, keys, rows, start = [0], [0], [], 0
    for length in lengths:
        size = length // (2 * cp) if cp > 1 else length
        for chunk in (rank, 2 * cp - 1 - rank) if cp > 1 else (0,):
            rows.append(torch.arange(start, start + (chunk + 1) * size))
            queries.append(queries[-1] + size)
            keys.append(keys[-1] + (chunk + 1) * size)
        start += length
    return _Cut(
        tuple(to_device(torch.tensor(x, dtype=torch.int32), place) for x in (queries, keys)),  # type: ignore[arg-type]
        tuple(max(b - a for a, b in pairwise(x)) for x in (queries, keys)),  # type: ignore[arg-type]
        to_device(torch.cat(rows), place) if cp > 1 else None,
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, cut: _Cut, scale: float) -> Tensor:
    """FlashAttention as torch ships it; the last query of a sequence sees all of its keys."""
    if cut.rows is not None:
        k, v = k.index_select(0, cut.rows), v.index_select(0, cut.rows)
    flash = torch.ops.aten._flash_attention_forward
    out: Tensor = flash(q, k, v, *cut.starts, *cut.longest, 0.0, True, False, scale=scale)[0]
    return out


class _GatherTokens(torch.autograd.Function):
    """All-gather along tokens; backward sums over ranks and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].float().contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()].to(grads[0].dtype), None


def token_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float, with_entropy: bool, fused: bool = False
) -> Any:
    """Log-probabilities through Megatron's vocabulary-parallel cross entropy.

    Args:
        logits: this rank's columns, ``[n, V_padded/t]``, model type.
        targets: int64 ``[n]``.
        fused: by Megatron's fused cross entropy, which torch compiles.

    Returns:
        fp32 ``[n]``; with ``with_entropy`` a pair of two such tensors.
    """
    comm = topology.tensor_parallel()
    width = logits.shape[-1]
    padded = (comm.rank + 1) * width > vocab_size
    # a rank may have no row to score, which is nothing to compile for
    fused = fused and len(targets) > 0
    # the fused cross entropy widens narrow logits itself
    plain = fused and logits.dtype != torch.float32 and temperature == 1.0 and not padded and not with_entropy
    x = logits if plain else logits.float()
    if temperature != 1.0:
        x = x / temperature
    if padded:
        columns = torch.arange(width, device=logits.device) + comm.rank * width
        x = x.masked_fill(columns >= vocab_size, float("-inf"))
    # Megatron's cross entropy works in place on fp32 input
    held = x.clone() if with_entropy or (x is logits and not plain) else x
    if fused:
        group = parallel_state.get_tensor_model_parallel_group()
        loss = fused_vocab_parallel_cross_entropy(held.unsqueeze(1), targets.unsqueeze(1), group)
    else:
        loss = vocab_parallel_cross_entropy(held.unsqueeze(1), targets.unsqueeze(1))
    logprob = -loss.squeeze(1)
    if not with_entropy:
        return logprob
    with torch.no_grad():
        full = F.log_softmax(comm.all_gather(x.detach().contiguous(), dim=1), dim=-1)
        entropy = -(full.exp() * full).nan_to_num(0.0).sum(-1)
    return logprob, entropy
