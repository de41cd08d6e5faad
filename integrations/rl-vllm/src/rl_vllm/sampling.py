"""What a sampled token and its log-probability mean in strict mode.

A token is a function of (logits row, temperature, request seed, absolute position), never of the batch; hence a rollout
that is aborted and continued from its tokens goes on as if it had never stopped. Its log-probability is that of the
temperature-scaled distribution over the whole vocabulary, by the profile's logprob contract.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

import rl_logprob
from rl_contract import ContractError, Profile

# attribute -> values that leave the distribution alone
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "min_tokens": (0,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "logits_processors": (None, []),
    "watermarking": (None, False),
    "trace_decode_token_ids": (None,),
}


def refusals(params: SamplingParams) -> list[str]:
    """Why strict mode refuses a request; empty where it serves it."""
    found = [
        f"{name}={getattr(params, name)!r} (supported: {neutral[0]!r})"
        for name, neutral in _NEUTRAL.items()
        if hasattr(params, name) and getattr(params, name) not in neutral
    ]
    if params.seed is not None and (type(params.seed) is not int or not _fits(params.seed)):
        found.append(f"seed={params.seed!r} (supported: an int from -2**63 to 2**63 - 1, not -1)")
    found += [
        f"{name}={value!r:.80} (supported: integers of 64 bits)"
        for name, value in _fields(params)
        if name != "seed" and not all(map(_fits, value if isinstance(value, (list, tuple, set)) else [value]))
    ]
    if params.temperature >= _SAMPLING_EPS and params.seed is None:
        found.append("seed=None or -1 (a token is a function of logits, seed and position: give every request a seed)")
    if params.prompt_logprobs is not None and params.temperature >= _SAMPLING_EPS and params.temperature != 1.0:
        found.append(
            f"prompt_logprobs with temperature={params.temperature!r} "
            "(vLLM never scales prompt log-probabilities: rescore with temperature 0 or 1)"
        )
    return found


def _fields(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    names = getattr(type(params), "__struct_fields__", None) or vars(params)
    return ((name, getattr(params, name)) for name in names if not name.startswith("_"))


def _fits(value: Any) -> bool:
    # vLLM sends a request to its core in a form that has no larger ones, and waits forever for one it could not send
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 63


def refuse(params: SamplingParams) -> None:
    """Raise vLLM's own error, which servers answer with 400, for a request that strict mode does not serve."""
    if found := refusals(params):
        raise VLLMValidationError(
            "strict mode compares log-probabilities of the full softmax and refuses: " + "; ".join(found)
        )


class StrictSampling(LogitsProcessor):
    """Checks each request at admission. Changes no logits; with it, vLLM hands output tokens to the sampler."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        refuse(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass


class StrictSampler(Sampler):
    """vLLM's sampler with the strict log-probability and a draw that depends on seed and position alone."""

    def __init__(self, profile: Profile, runner: Any) -> None:
        super().__init__(runner.model_config.logprobs_mode)
        self.vocab_size = profile.settings.vocab_size
        self.vocab_tile = profile.settings.vocab_tile
        self.runner = runner

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """logits [T, >=V] fp32 -> [T, V] fp32; prompt tokens and greedy rows come here at temperature 1."""
        if logits.dtype != torch.float32:
            raise ContractError(f"logits are {logits.dtype}; the strict head keeps its fp32 accumulators")
        return rl_logprob.full_logprob(logits, vocab_size=self.vocab_size, vocab_tile=self.vocab_tile)

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        m = sampling_metadata
        greedy = None if m.all_random else rl_logprob.greedy_sample(logits, vocab_size=self.vocab_size)
        chosen = greedy
        if not m.all_greedy:
            assert m.temperature is not None
            logits = self.apply_temperature(logits, m.temperature, m.all_random)
            seeds, positions = self._streams(m, logits.shape[0])
            drawn = rl_logprob.gumbel_sample(logits, seeds, positions, vocab_size=self.vocab_size)
            chosen = drawn if greedy is None else torch.where(m.temperature < _SAMPLING_EPS, greedy, drawn)
        assert chosen is not None
        wanted = m.max_num_logprobs is not None or m.logprob_token_ids
        return chosen, self.compute_logprobs(logits) if wanted else None

    def _streams(self, m: SamplingMetadata, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """seeds and positions, int64 [rows]."""
        # a greedy row has no generator; what is drawn for it is thrown away
        seeds = [m.generators[i].initial_seed() if i in m.generators else 0 for i in range(rows)]
        # torch reports a seed as an unsigned number
        seeds = [s - (1 << 64) if s >= 1 << 63 else s for s in seeds]
        # vLLM's profiling run has no output tokens
        done = [len(m.output_token_ids[i]) if i < len(m.output_token_ids) else 0 for i in range(rows)]
        prompts = self.runner.input_batch.num_prompt_tokens[:rows]
        positions = torch.as_tensor(prompts, dtype=torch.int64) + torch.tensor(done, dtype=torch.int64)
        return torch.tensor(seeds, dtype=torch.int64), positions

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        top, top_ids = torch.topk(logprobs, num_logprobs, dim=-1)
        token_ids = token_ids.unsqueeze(-1)
        own = logprobs.gather(-1, token_ids)
        ranks = (logprobs >= own).sum(-1)
        return LogprobsTensors(
            torch.cat((token_ids, top_ids), dim=1).to(torch.int32), torch.cat((own, top), dim=1), ranks
        )
