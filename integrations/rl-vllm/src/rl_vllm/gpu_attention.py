"""Backend of a GPU: vLLM's member ``CUSTOM``, with CUDA graphs of every kind.

Kernels take query starts, lengths and pages from the device and choose their launches by shapes alone, so a captured
graph serves every batch of its shape: full graphs of mixed batches too.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata, MultipleOf

import rl_attn
from rl_contract import ContractError
from rl_vllm.attention import StrictAttentionImpl, StrictAttentionMetadata, StrictMetadataBuilder
from rl_vllm.fusing import Before

# vLLM up to 0.24 asks the backend for the shape of the cache, later ones offer layouts to choose from
SPLIT = hasattr(AttentionBackend, "get_kv_cache_shape")


class StrictGPUMetadataBuilder(StrictMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StrictAttentionMetadata:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = getattr(common_attn_metadata, "query_start_loc_cpu", None)
        if starts is not None and len(starts) > 1:
            found.min_query_len = max(0, int((starts[1:] - starts[:-1]).min()))
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StrictAttentionMetadata:
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        # a full graph of mixed batches is captured with equal rows a request, and replayed with any number of them
        few = found.seq_lens.shape[0] < found.num_actual_tokens
        if few or mode.mixed_mode() == type(mode).FULL:
            found.max_query_len, found.min_query_len = found.num_actual_tokens, 0
        return found


class StrictGPUAttentionImpl(StrictAttentionImpl):
    layout = "vllm_split" if SPLIT else "vllm_cpu"
    # set once the model stands, where its layers are joined; see ``fusing``
    before: Before | None = None

    def _queries(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: rl_attn.PagedKV, m: StrictAttentionMetadata
    ) -> torch.Tensor:
        if self.before is None:
            return q
        if m.positions is None:
            raise ContractError("vLLM gave no positions; start the engine with additional_config={'rl_fused': False}")
        T = q.shape[0]
        return self.before(q, k, v, m.positions[:T], cache, m.slot_mapping[:T])


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
