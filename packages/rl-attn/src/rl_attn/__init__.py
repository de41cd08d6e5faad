"""Rotary positions and attention: one order for training, prefill, chunks and decode."""

from rl_attn import ops_gpu  # noqa: F401  registers the GPU kernels
from rl_attn.attention import attention_packed, attention_paged, rotary, segments_of, write_paged
from rl_attn.context_parallel import context_parallel_attention, cp_merge, cp_positions, cp_rows, cp_split
from rl_attn.fused import norm_rotary_write
from rl_attn.paged import PagedKV, check_paged
from rl_attn.rope import RopeTable, rope_table

__all__ = [
    "PagedKV",
    "RopeTable",
    "attention_packed",
    "attention_paged",
    "check_paged",
    "context_parallel_attention",
    "cp_merge",
    "cp_positions",
    "cp_rows",
    "cp_split",
    "norm_rotary_write",
    "rope_table",
    "rotary",
    "segments_of",
    "write_paged",
]
