"""vLLM's layers with the strict operators inside; each class replaces the forward pass alone.

Boundaries: gemm.column (qkv, gate_up, lm_head), gemm.row (o, down), norm, swiglu, rotary. Weights keep vLLM's own
layout, unpacked, so their bytes can be read back.
"""

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, split_tensor_along_last_dim
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

import rl_attn
import rl_attn.ops
import rl_gemm
import rl_norm
from rl_contract import ContractError
from rl_vllm.scope import active
from rl_vllm.settings import rope_scaling


def _poison(layer: torch.nn.Module) -> None:
    # a parameter that no checkpoint tensor reaches stays NaN, and the check after loading names it
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            parameter.fill_(float("nan"))


def _weight(layer: torch.nn.Module) -> torch.Tensor:
    return layer.weight  # type: ignore[return-value]


@register_weight_loader_v2_supported_method
class StrictLinearMethod(UnquantizedLinearMethod):
    """Column-parallel linear layers: a chain over K."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        _poison(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # the stock method packs the weight for oneDNN and empties the parameter. vLLM's class of parameter, which knows
        # how to load, has every operator that is given one call back into Python, twice a layer's projection
        layer.weight = torch.nn.Parameter(_weight(layer).data, requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return rl_gemm.column_parallel_linear(x, _weight(layer), bias)


class StrictGateUpMethod(StrictLinearMethod):
    """gate_up and the activation behind it, which hands on what it is given; see ``fusing``."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return rl_gemm.gate_up_swiglu(x, _weight(layer))


class StrictEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Token embedding (a gather) and lm_head: a chain over K whose fp32 accumulators are the logits."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        _poison(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return rl_gemm.column_parallel_linear(x, _weight(layer), bias, out_dtype=torch.float32)


class StrictRowParallelLinear(RowParallelLinear):
    """Partial sub-tree roots stay fp32 until the ranks are joined; one rounding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strict = active()

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.nn.Parameter | None]:
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)[self.tp_rank].contiguous()
        bias = None if self.skip_bias_add else self.bias
        comm = self.strict.comm if self.tp_size > 1 else None
        y = rl_gemm.row_parallel_linear(x, _weight(self), bias, comm=comm, leaves=self.strict.profile.settings.leaves)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


class StrictVocabParallelEmbedding(VocabParallelEmbedding):
    """Each row comes from the rank that owns it, byte for byte. A sum over ranks would turn -0.0 into +0.0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strict = active()
        if not hasattr(self, "tp_rank"):
            # vLLM 0.24 does not keep it
            self.tp_rank = get_tensor_model_parallel_rank()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.tp_size == 1:
            return self.quant_method.embedding(self, input_.long())
        ids = input_.long()
        rows = self.num_embeddings_per_partition
        owner = ids // rows
        local = torch.where(owner == self.tp_rank, ids - self.tp_rank * rows, 0)
        mine = self.quant_method.embedding(self, local)  # [T, H]
        every = self.strict.comm.all_gather(mine.unsqueeze(0).contiguous(), dim=0)  # [t, T, H]
        return every[owner, torch.arange(ids.shape[0], device=ids.device)]


class StrictRMSNorm(RMSNorm):
    # the attention does it, see ``fusing``
    hands_on = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strict = active()
        _poison(self)

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.hands_on:
            return x
        return rl_norm.rms_norm(x, self.weight.data, self.variance_epsilon, residual=residual)

    forward_cpu = forward_cuda = forward_hip = forward_native


class StrictSiluAndMul(SiluAndMul):
    # the projection does it, see ``fusing``
    hands_on = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strict = active()

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x if self.hands_on else rl_gemm.swiglu(x)

    forward_cpu = forward_cuda = forward_hip = forward_native  # type: ignore[assignment]


class _StrictRotary:
    """cos and sin come from the profile, in fp32; vLLM's own table, in the model's type, is never built."""

    # the attention does it, see ``fusing``
    hands_on = False

    def _use_profile(self, head_size: int, max_positions: int) -> None:
        self.strict = active()
        rope = self.strict.profile.settings.rope
        table = rl_attn.rope_table(max_positions, rope["rotary_dim"], rope["theta"], rope_scaling(rope))
        # buffers, so that they lie at fixed addresses of the model's own memory and come back after a sleep; vLLM casts
        # no buffers, and a cast one is refused below
        cos, sin = table.on(torch.get_default_device())
        self.register_buffer("rl_cos", cos, persistent=False)  # type: ignore[attr-defined]
        self.register_buffer("rl_sin", sin, persistent=False)  # type: ignore[attr-defined]
        self._head_size = head_size

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return torch.empty(0)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert key is not None
        if self.hands_on:
            return query, key
        cos: torch.Tensor = self.rl_cos  # type: ignore[attr-defined]
        sin: torch.Tensor = self.rl_sin  # type: ignore[attr-defined]
        if cos.dtype != torch.float32:
            raise ContractError(f"the position table was cast to {cos.dtype}; it must stay fp32")
        q = query.view(query.shape[0], -1, self._head_size)  # [T, Hq, D]
        k = key.view(key.shape[0], -1, self._head_size)  # [T, Hkv, D]
        q, k = rl_attn.ops.rotary(q, k, positions.flatten(), cos, sin, False)
        return q.reshape(query.shape), k.reshape(key.shape)

    forward_cpu = forward_cuda = forward_hip = forward_native


class StrictRotaryEmbedding(_StrictRotary, RotaryEmbedding):
    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, *args, **kwargs)
        self._use_profile(head_size, max_position_embeddings)


class StrictLlama3RotaryEmbedding(_StrictRotary, Llama3RotaryEmbedding):
    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, *args, **kwargs)
        self._use_profile(head_size, max_position_embeddings)


def replacements() -> dict[str, type]:
    """Stock class name -> strict class, as vLLM's registry of out-of-tree layers wants them."""
    pairs: dict[type, type] = {
        RowParallelLinear: StrictRowParallelLinear,
        VocabParallelEmbedding: StrictVocabParallelEmbedding,
        RMSNorm: StrictRMSNorm,
        SiluAndMul: StrictSiluAndMul,
        RotaryEmbedding: StrictRotaryEmbedding,
        Llama3RotaryEmbedding: StrictLlama3RotaryEmbedding,
    }
    return {stock.__name__: ours for stock, ours in pairs.items()}
