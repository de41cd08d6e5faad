"""Paged attention of vLLM served by ``rl_attn``: boundary attention. Backend of the CPU; ``gpu_attention`` has a GPU's.

The order of addition is that of the profile's attention contract; nothing here adds.
"""

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

import rl_attn
from rl_contract import ContractError
from rl_vllm.fusing import Before
from rl_vllm.scope import active


@dataclass
class StrictAttentionMetadata:
    """One batch: query_start_loc [R+1], seq_lens [R], block_table [R, blocks]; slot_mapping and positions [T].

    Rows that pad a captured graph belong to no request: the last entries of query_start_loc are equal. On a GPU the
    tensors keep their addresses from step to step, as vLLM's graphs demand, and nothing looks at their values.

    Made once a step, so that a layer has nothing to work out; changed by ``dataclasses.replace`` alone.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None
    min_query_len: int = 0
    batch: dict[str, Any] = field(init=False)
    """What ``rl_attn.attention_paged`` is told about the batch."""

    def __post_init__(self) -> None:
        # vLLM's lie in buffers of more rows than the batch has
        self.slot_mapping = _rows(self.slot_mapping, self.num_actual_tokens)
        self.positions = None if self.positions is None else _rows(self.positions, self.num_actual_tokens)
        names = ("query_start_loc", "seq_lens", "block_table", "max_query_len", "min_query_len")
        self.batch = {name: getattr(self, name) for name in names}


class StrictMetadataBuilder(AttentionMetadataBuilder[StrictAttentionMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StrictAttentionMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise ContractError(f"attention with causal={m.causal!r} is not supported; supported: causal=True")
        return StrictAttentionMetadata(
            m.num_actual_tokens, m.max_query_len, m.query_start_loc, m.seq_lens, m.block_table_tensor, m.slot_mapping,
            getattr(m, "positions", None), self._least_queries(m),
        )  # fmt: skip

    def _least_queries(self, m: CommonAttentionMetadata) -> int:
        """A bound from below on the queries of a request; 0 where nobody gains by one."""
        return 0


class StrictCPUBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type["StrictAttentionImpl"]:
        return StrictAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StrictMetadataBuilder]:
        return StrictMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class StrictAttentionImpl(AttentionImpl):
    # one block per (block id, kv head) of [block_size, 2 * head_dim]
    layout = "vllm_cpu"
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "bfloat16")
    # what a joined attention does to q, k and v first, see ``fusing``; elsewhere vLLM has called ``do_kv_cache_update``
    before: Before | None = None
    _held: tuple[Any, int, rl_attn.PagedKV] | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        asked = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **{k: v for k, v in extra.items() if v},
        }
        problems = [f"{k}={v!r}" for k, v in asked.items() if v is not None]
        if attn_type != AttentionType.DECODER:
            problems.append(f"attn_type={attn_type!r}")
        if kv_cache_dtype not in self.kv_cache_dtypes:
            problems.append(f"kv_cache_dtype={kv_cache_dtype!r}")
        if problems:
            raise ContractError(
                f"strict attention does not support {', '.join(problems)}; "
                "supported: causal decoder attention over the whole prefix with an unquantised cache"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.strict = active()

    @cached_property
    def _contract(self) -> dict[str, Any]:
        """What ``rl_attn.attention_paged`` is told about the layer."""
        settings = self.strict.profile.settings
        return {
            "scale": self.scale, "key_tile": settings.key_tile, "segment": settings.segment,
            "family": settings.attention,
        }  # fmt: skip

    def _cache(self, kv_cache: torch.Tensor) -> rl_attn.PagedKV:
        """The layer's cache, viewed once: it is asked for at every step and moves at most when the engine starts."""
        held = self._held
        if held is not None and held[0]() is kv_cache and held[1] == kv_cache.data_ptr():
            return held[2]
        # views of the tensor itself would keep it, and a cache that vLLM only tries out must go when vLLM lets it go
        paged = rl_attn.PagedKV.from_layout(
            self.layout, kv_cache.detach(), num_kv_heads=self.num_kv_heads, head_dim=self.head_size
        )
        self._held = weakref.ref(kv_cache, self._forget), kv_cache.data_ptr(), paged
        return paged

    def _forget(self, gone: Any) -> None:
        if self._held is not None and self._held[0] is gone:
            self._held = None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        T = slot_mapping.shape[0]
        rl_attn.write_paged(self._cache(kv_cache), key[:T], value[:T], slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StrictAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise ContractError("strict attention has no quantised output; switch output quantisation off")
        # vLLM profiles memory without metadata; what lies in memory by chance must not reach the sampler's checks
        if attn_metadata is None:
            return output.zero_()
        cache, rows = self._cache(kv_cache), output
        T = attn_metadata.num_actual_tokens
        # rows of padding, as a piecewise graph has them
        if query.shape[0] != T:
            query, key, value, rows = query[:T], key[:T], value[:T], output[:T]
        if self.before is not None:
            query = self.before(query, key, value, attn_metadata.positions, cache, attn_metadata.slot_mapping)
        rl_attn.attention_paged(query, cache, **attn_metadata.batch, **self._contract, out=rows)
        return output


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows; a slice takes time even where it is the whole."""
    return x if x.shape[0] == count else x[:count]
