"""Backend of a GPU: vLLM's member ``CUSTOM``, with CUDA graphs of every kind.

Kernels take query starts, lengths and pages from the device and choose their launches by shapes alone, so a captured
graph serves every batch of its shape: full graphs of mixed batches too.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata, MultipleOf

from rl_contract.devices import host_array
from rl_vllm.attention import StrictAttentionImpl, StrictAttentionMetadata, StrictMetadataBuilder

# vLLM up to 0.24 asks the backend for the shape of the cache, later ones offer layouts to choose from
SPLIT = hasattr(AttentionBackend, "get_kv_cache_shape")


class StrictGPUMetadataBuilder(StrictMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def _least_queries(self, m: CommonAttentionMetadata) -> int:
        starts = getattr(m, "query_start_loc_cpu", None)
        # in a decode step every request is short
        if m.max_query_len <= 1 or starts is None or len(starts) < 2:
            return 0
        return max(0, int(np.diff(host_array(starts)).min()))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StrictAttentionMetadata:
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        # a full graph of mixed batches is captured with equal rows a request, and replayed with any number of them
        few = found.seq_lens.shape[0] < found.num_actual_tokens
        if few or mode.mixed_mode() == type(mode).FULL:
            return replace(found, max_query_len=found.num_actual_tokens, min_query_len=0)
        return found


class StrictGPUAttentionImpl(StrictAttentionImpl):
    layout = "vllm_split" if SPLIT else "vllm_cpu"


class StrictGPUBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[StrictGPUAttentionImpl]:
        return StrictGPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StrictGPUMetadataBuilder]:
        return StrictGPUMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys, then values: layout ``vllm_split``. Not asked for by vLLM after 0.24."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class FusedGPUBackend(StrictGPUBackend):
    """Of attentions that ``fusing`` has joined: they write their keys and values themselves."""

    forward_includes_kv_cache_update: bool = True
