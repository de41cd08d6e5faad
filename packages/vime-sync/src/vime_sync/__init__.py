"""Policy timeline: weight manifests, versions, verified weight transfer."""

from vime_sync import layout
from vime_sync.client import EngineClient, ShardDigests
from vime_sync.digest import tensor_digest, tensor_digests
from vime_sync.layout import from_hf, from_vllm, shard_digests, to_hf, vllm_shards
from vime_sync.shape import ModelShape

__all__ = [
    "EngineClient",
    "ModelShape",
    "ShardDigests",
    "from_hf",
    "from_vllm",
    "layout",
    "shard_digests",
    "tensor_digest",
    "tensor_digests",
    "to_hf",
    "vllm_shards",
]
