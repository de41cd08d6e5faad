"""Megatron modules whose arithmetic is the strict operators'.

Parameters, names and sharding are the stock modules'; only ``forward`` differs. ``settings`` is bound to a class by
``bind``, because Megatron instantiates a layer spec's classes itself, with arguments that depend on its version.
"""

import math
from functools import lru_cache
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

import rl_attn
import rl_gemm
import rl_norm
from rl_contract import Communicator, ContractError, Settings, TokenShards
from rl_contract.gradients import main_grad_of
from rl_megatron import tokens, topology
from rl_megatron.batch import StrictPackedSeqParams

# padding to a multiple of 2*CP may place pad tokens just past the last position; their rows are never read
_SPARE_POSITIONS = 64


def bind(cls: type, settings: Settings, **constants: Any) -> type:
    """A subclass of ``cls`` that carries ``settings`` (and ``constants``) as class attributes."""
    return type(cls.__name__, (cls,), {"settings": settings, "__module__": cls.__module__, **constants})


class StrictColumnLinear(ColumnParallelLinear):
    """qkv and fc1: a chain over the input width; ``stride`` 2 says that the weight is this rank's [gate; up]."""

    settings: ClassVar[Settings]

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.fused = stride

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """x [T, 1, H] -> [T, 1, N/t]."""
        y = rl_gemm.column_parallel_linear(
            input_,
            self.weight,
            self.bias,
            comm=topology.communicator(self.tp_group),
            leaves=self.settings.leaves,
            fused=self.fused,
            tokens=tokens.current(),
        )
        return y, None


class StrictRowLinear(RowParallelLinear):
    """o and fc2: tree(leaves) over the global input width, joined over the ranks, one rounding."""

    settings: ClassVar[Settings]

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """x [T, 1, K/t] -> [T, 1, N], the same on every rank."""
        y = rl_gemm.row_parallel_linear(
            input_,
            self.weight,
            self.bias,
            comm=topology.communicator(self.tp_group),
            leaves=self.settings.leaves,
            tokens=tokens.current(),
        )
        return y, None


class StrictNorm(torch.nn.Module):
    """RMSNorm over the hidden width; the residual stream arrives already summed and rounded."""

    settings: ClassVar[Settings]

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Any = rl_norm.rms_norm(x, self.weight, self.eps, tokens=tokens.current())
        return y


class StrictHeadNorm(StrictNorm):
    """q and k norm: the weight's gradient is one tree over the leaves of all heads, on any TP."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, 1, heads/t, D]."""
        y: Any = rl_norm.rms_norm(
            x.flatten(0, 1),
            self.weight,
            self.eps,
            comm=topology.tensor_parallel(),
            leaves=self.leaves(x),
            tokens=tokens.current(),
        )
        return y.view(x.shape)

    def leaves(self, x: Tensor) -> int:
        # a model may have fewer k heads than leaves; then each head is a leaf
        return min(self.settings.leaves, x.shape[-2] * topology.tensor_parallel().world_size)


class StrictSwiGLU(torch.nn.Module):
    """The activation of a stock MLP: [gate, up] -> silu(gate) * up in fp32, one rounding."""

    settings: ClassVar[Settings]

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return rl_gemm.swiglu(gate_up)


@lru_cache(maxsize=4)
def _rope_table(max_positions: int, rotary_dim: int, theta: float, scaling: tuple[tuple[str, Any], ...]) -> Any:
    return rl_attn.rope_table(max_positions, rotary_dim, theta, dict(scaling) or None)


class StrictCoreAttention(torch.nn.Module):
    """Rotary positions and attention over packed sequences; with CP, each rank keeps its queries and sees all keys."""

    settings: ClassVar[Settings]
    max_positions: ClassVar[int]

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
        rope = dict(self.settings.rope)
        dim, theta = rope.pop("rotary_dim"), rope.pop("theta")
        self.table = _rope_table(self.max_positions + _SPARE_POSITIONS, dim, theta, tuple(sorted(rope.items())))
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
        """q [T, Hq/t, D], k and v [T, Hkv/t, D] of this rank's tokens -> [T, Hq/t * D]."""
        if packed_seq_params is None or attention_mask is not None or attention_bias is not None:
            raise ContractError(
                "strict attention takes packed sequences without mask or bias; build them with rl_megatron.PackedBatch"
            )
        q, k = rl_attn.rotary(query, key, packed_seq_params.positions, self.table)
        cu_seqlens, tiles = packed_seq_params.cu_seqlens_q, self.settings
        comm = topology.communicator(self._cp_group)
        # "nosplit" has no context parallel form: ModelConfig.check has refused that cut
        if comm.world_size == 1 or tiles.attention == "nosplit":
            out: Any = rl_attn.attention_packed(
                q, k, value, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, scale=self.scale,
                key_tile=tiles.key_tile, segment=tiles.segment, family=tiles.attention,
            )  # fmt: skip
        else:
            out = rl_attn.context_parallel_attention(
                q, k, value, cu_seqlens=cu_seqlens, layout=packed_seq_params.batch.layout, comm=comm, scale=self.scale,
                key_tile=tiles.key_tile, segment=tiles.segment,
            )  # fmt: skip
        return out.flatten(1)


def residual_add(training: bool, fused: bool) -> Any:
    """Megatron's bias-dropout-add slot: the residual sum in fp32, rounded once to the model's type."""
    return _residual_add


def _residual_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    if bias is not None or prob > 0.0:
        raise ContractError(
            f"strict residual add got a bias ({bias is not None}) and dropout {prob}; supported: neither"
        )
    # torch adds two bf16 values in fp32 and rounds once, which is the contract
    return x + residual


class _VocabRows(torch.autograd.Function):
    """Rows of a vocabulary-parallel table. Backward adds token gradients in packed order, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, first: int, comm: Communicator, shards: TokenShards | None
    ) -> Tensor:
        local = ids - first
        mine = (local >= 0) & (local < weight.shape[0])
        local = torch.where(mine, local, 0)
        ctx.save_for_backward(local, mine)
        ctx.weight, ctx.shards = weight, shards
        rows = weight.detach()[local]
        if comm.world_size == 1:
            return rows
        # exactly one rank holds a row; -0.0 is the identity of addition, also for a stored -0.0
        rows = torch.where(mine.unsqueeze(-1), rows, -0.0).float()
        return comm.all_reduce(rows, out_dtype=weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None, None]:
        local, mine = ctx.saved_tensors
        weight, grad = ctx.weight, grads[0]
        if ctx.shards is not None:
            local, mine, grad = ctx.shards.gather_each(local, mine, grad)
        main_grad = main_grad_of(weight)
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if main_grad is None else main_grad
        if weight.is_cuda:
            # neither the order of atomic additions nor a look at the mask is wanted there
            from rl_megatron import triton_rows

            triton_rows.add_rows(total, torch.where(mine, local, weight.shape[0]), grad)
        else:
            total.index_add_(0, local[mine], grad[mine].float())
        return None, total.to(weight.dtype) if main_grad is None else None, None, None, None


class StrictEmbedding(torch.nn.Module):
    """Stands where ``VocabParallelEmbedding`` stood, with its parameter."""

    def __init__(self, stock: Any, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = stock.weight
        self.first = stock.vocab_start_index
        self.tp_group = stock.tp_group

    def forward(self, ids: Tensor) -> Tensor:
        """ids [1, T] -> [1, T, H]."""
        comm = topology.communicator(self.tp_group)
        rows = _VocabRows.apply(ids.flatten(), self.weight, self.first, comm, tokens.current())
        return rows.view(*ids.shape, -1)


class StrictHead(torch.nn.Module):
    """Stands where the output layer stood, with its parameter (none where tied); hands the hidden states through.

    Logits are never made: ``rl_megatron.scoring`` gives the hidden states and the head's rows to
    ``rl_logprob.linear_logprob``.
    """

    def __init__(self, stock: Any, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = stock.weight
        self.sequence_parallel = False

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        return hidden, None
