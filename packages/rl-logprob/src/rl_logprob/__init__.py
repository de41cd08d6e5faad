"""Linear log-probability over a sharded vocabulary, with mismatch metrics."""

from rl_logprob.checks import padded_vocab_size
from rl_logprob.linear import linear_logprob
from rl_logprob.scores import entropy, full_logprob, selected_logprob

__all__ = ["entropy", "full_logprob", "linear_logprob", "padded_vocab_size", "selected_logprob"]
