from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from . import attention, cpu_offload, distributed, fp8, ops, router

__all__ = ["attention", "cpu_offload", "distributed", "fp8", "ops", "router"]


def __getattr__(name: str) -> Any:
    # Megatron derives classes of many more as it is imported
    if name.startswith("_") or not name[0].isupper():
        raise AttributeError(name)
    return type(name, (Module,), {"__module__": __name__})


class Linear(Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert not any((bias, sequence_parallel, fuse_wgrad_accumulation, delay_wgrad_compute, return_bias))
        rows, columns = out_features, in_features
        rows //= tp_size if parallel_mode == "column" else 1
        columns //= tp_size if parallel_mode == "row" else 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        marks = {"tensor_model_parallel": True, "partition_dim": int(parallel_mode == "row"), "partition_stride": 1}
        for mark, value in marks.items():
            setattr(self.weight, mark, value)
        self.bias, self.use_bias = torch.empty(0, dtype=params_dtype), False
        self.in_features, self.out_features = in_features, out_features

    def get_extra_state(self) -> Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if self.fuse_wgrad_accumulation:
            out: Tensor = _Fused.apply(x, self.weight, is_first_microbatch)
            return out
        return F.linear(x, self.weight)


class _Fused(torch.autograd.Function):
    """Adds the weight's gradient to ``main_grad``, or writes it there if it is the first; leaves none to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: bool | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.first = weight, bool(first)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.first:
            ctx.weight.main_grad.zero_()
        ctx.weight.main_grad += (grads[0].flatten(0, -2).t() @ x.flatten(0, -2)).float()
        return grads[0] @ ctx.weight, None, None


class RMSNorm(Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: Any = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not any((sequence_parallel, zero_centered_gamma))
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.eps = eps
        self.weight = Parameter(torch.ones(shape, dtype=params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: Any = None,
        device: Any = "cuda",
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **linear)
        assert normalization == "RMSNorm"
        assert not any((return_layernorm_output, return_layernorm_output_gathered, zero_centered_gamma))
        self.eps = eps
        self.layer_norm_weight = Parameter(torch.ones(in_features, dtype=params_dtype, device=device))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        width = (self.in_features,)
        return super().forward(F.rms_norm(x, width, self.layer_norm_weight, self.eps), is_first_microbatch)


class DotProductAttention(Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        assert not any((attention_dropout, sequence_parallel, return_max_logit))
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
        assert cu_seqlens_q.dtype == torch.int32
        assert isinstance(max_seqlen_q, int)
        out = []
        for a, b in pairwise(cu_seqlens_q.tolist()):
            assert b - a <= max_seqlen_q
            q, k, v = (x[a:b].transpose(0, 1)[None] for x in (query_layer, key_layer, value_layer))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            out.append(y[0].transpose(0, 1))
        return torch.cat(out).flatten(1)
