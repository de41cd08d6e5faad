"""The native arm: Megatron-core's own operators, and the plainest torch where Megatron has none for a CPU."""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from rl_contract import ContractError
from rl_megatron import topology
from rl_megatron.batch import StrictPackedSeqParams


def native_substitutions() -> list[dict[str, str]]:
    """What the native arm replaces of stock Megatron on a CPU, and why; for the run's manifest."""
    return [
        {
            "stock": "megatron.core.transformer.dot_product_attention.DotProductAttention",
            "used": "rl_megatron.native.PackedDotProductAttention",
            "why": "without TransformerEngine the stock module refuses packed sequences and context parallelism",
        },
        {
            "stock": "torch.cuda.current_device, torch.cuda.synchronize",
            "used": "rl_megatron.cpu_device",
            "why": "Megatron-core asks CUDA for its device; here the answer is the CPU",
        },
        {
            "stock": "megatron.core.optimizer (Apex or TransformerEngine fused Adam)",
            "used": "rl_megatron.StrictOptimizer",
            "why": "one optimizer in both arms, so that only operators differ",
        },
    ]


class PackedDotProductAttention(torch.nn.Module):
    """Causal attention, sequence by sequence, with torch's scaled_dot_product_attention; with CP, keys are gathered."""

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
            order = torch.cat([batch.rank_tokens(r) for r in range(batch.cp)]).argsort()
            key = _GatherTokens.apply(key, self._cp_group)[order]
            value = _GatherTokens.apply(value, self._cp_group)[order]
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


def token_logprobs(logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float, with_entropy: bool) -> Any:
    """Log-probabilities through Megatron's vocabulary-parallel cross entropy.

    Args:
        logits: this rank's columns, ``[n, V_padded/t]``, model type.
        targets: int64 ``[n]``.

    Returns:
        fp32 ``[n]``; with ``with_entropy`` a pair of two such tensors.
    """
    comm = topology.tensor_parallel()
    columns = torch.arange(logits.shape[-1], device=logits.device) + comm.rank * logits.shape[-1]
    x = (logits.float() / temperature).masked_fill(columns >= vocab_size, float("-inf"))
    # Megatron's cross entropy works in place on its input
    logprob = -vocab_parallel_cross_entropy(x.clone().unsqueeze(1), targets.unsqueeze(1)).squeeze(1)
    if not with_entropy:
        return logprob
    with torch.no_grad():
        full = F.log_softmax(comm.all_gather(x.detach().contiguous(), dim=1), dim=-1)
        entropy = -(full.exp() * full).nan_to_num(0.0).sum(-1)
    return logprob, entropy
