"""Linear log-probability over a sharded vocabulary, with mismatch metrics."""

from rl_logprob import ops_gpu  # noqa: F401  registers the GPU kernels
from rl_logprob.checks import padded_vocab_size
from rl_logprob.linear import linear_logprob
from rl_logprob.metrics import as_logprobs, rollout_metrics
from rl_logprob.sampling import greedy_sample, gumbel_sample, request_seed
from rl_logprob.scores import entropy, full_logprob, selected_logprob
from rl_logprob.semantics import SamplingSemantics, check_sampling_semantics
from rl_logprob.support import SupportIds, SupportKey, sampling_support

__all__ = [
    "SamplingSemantics",
    "SupportIds",
    "SupportKey",
    "as_logprobs",
    "check_sampling_semantics",
    "entropy",
    "full_logprob",
    "greedy_sample",
    "gumbel_sample",
    "linear_logprob",
    "padded_vocab_size",
    "request_seed",
    "rollout_metrics",
    "sampling_support",
    "selected_logprob",
]
