"""Policy timeline: weight manifests, versions, verified weight transfer."""

from vime_sync import layout
from vime_sync.client import EngineClient, ShardDigests
from vime_sync.digest import WEIGHT_DIGEST, digests, tensor_digest, tensor_digests
from vime_sync.layout import from_hf, from_vllm, shard_digests, to_hf, vllm_shards
from vime_sync.ledger import Sample, StepLedger, StepReport
from vime_sync.lend import Loan
from vime_sync.manifest import Entry, Manifest
from vime_sync.publisher import Publisher, PublishError, State, Transition, verify
from vime_sync.shape import ModelShape
from vime_sync.spans import Span, check_spans, spans_from_pauses, tokens_digest
from vime_sync.transfer import Weights, lend_weights, read_weights, write_weights
from vime_sync.tree import tree_digests
from vime_sync.version import PolicyVersion

__all__ = [
    "WEIGHT_DIGEST",
    "EngineClient",
    "Entry",
    "Loan",
    "Manifest",
    "ModelShape",
    "PolicyVersion",
    "PublishError",
    "Publisher",
    "Sample",
    "ShardDigests",
    "Span",
    "State",
    "StepLedger",
    "StepReport",
    "Transition",
    "Weights",
    "check_spans",
    "digests",
    "from_hf",
    "from_vllm",
    "layout",
    "lend_weights",
    "read_weights",
    "shard_digests",
    "spans_from_pauses",
    "tensor_digest",
    "tensor_digests",
    "to_hf",
    "tokens_digest",
    "tree_digests",
    "verify",
    "vllm_shards",
    "write_weights",
]
