"""Sampling on a GPU, with the meaning of ``sampling``, for both of vLLM's model runners.

Seeds and positions come from the runner's device tensors; nothing here waits for the device. A row that nothing can be
sampled from (NaN, +inf) gets a NaN log-probability and is counted on the device; the count is read a step later, and
then the engine stops.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.worker.gpu.sample import logprob, prompt_logprob
from vllm.v1.worker.gpu.sample import sampler as runner_v2
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

import rl_logprob
from rl_contract import Communicator, ContractError, Profile
from rl_logprob.checks import row_temperature
from rl_logprob.draw import Drawn, draw_scored, new_packed, unpack
from rl_logprob.sampling import sample_op


class Scored(NamedTuple):
    """Logits fp32 [T, >= V] and the temperature to divide them by, fp32 [T] or 1.0: log-probabilities on demand."""

    logits: Tensor
    temperature: Tensor | float


class Draws:
    """Tokens and log-probabilities of one engine's rows."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        self.vocab_size = profile.settings.vocab_size
        self.vocab_tile = profile.settings.vocab_tile
        self.device = device
        self._bad = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def check(self) -> None:
        """Raise if a row of an earlier step had nothing to sample from. Without waiting, so perhaps a step late."""
        if int(self._seen):
            raise ContractError(
                f"logits of {int(self._seen)} rows held a NaN, +inf or no finite value; their log-probabilities are "
                "NaN and the tokens mean nothing; look for the first nonfinite activation or weight"
            )

    def forget(self) -> None:
        """What vLLM's warm-up sampled from empty buffers counts as nothing."""
        self._bad.zero_()
        self._seen.zero_()

    def draw(
        self,
        logits: Tensor,
        seeds: Tensor | None,
        positions: Tensor,
        temperature: Tensor | float,
        greedy: Tensor | bool,
    ) -> Tensor:
        """int64 [T]: the largest logit where ``greedy``, else the Gumbel choice by seed and position."""
        self.check()
        if logits.dtype != torch.float32:
            raise ContractError(f"logits are {logits.dtype}; the strict head keeps its fp32 accumulators")
        best = drawn = None
        if greedy is not False:
            zeros = torch.zeros_like(positions)
            one = row_temperature(1.0, len(logits), logits.device)
            best = sample_op(logits, zeros, zeros, one, self.vocab_size, True)
        if greedy is not True:
            assert seeds is not None
            scale = row_temperature(temperature, len(logits), logits.device)
            drawn = sample_op(logits, seeds, positions, scale, self.vocab_size, False)
        chosen = best if drawn is None else drawn if best is None else torch.where(greedy, best, drawn)  # type: ignore[arg-type]
        assert chosen is not None
        self._bad += (chosen < 0).sum()
        self._seen.copy_(self._bad, non_blocking=True)
        return chosen.clamp_(min=0)

    def scored(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, kinds: Tensor, out: Tensor,
        comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        """``draw``, ``selected`` and ranks in one call that a graph may capture; see ``rl_logprob.draw``."""
        draw_scored(
            logits, seeds, positions, temperature, kinds, vocab_size=self.vocab_size, vocab_tile=self.vocab_tile,
            bad=self._bad, out=out, comm=comm,
        )  # fmt: skip
        self._seen.copy_(self._bad, non_blocking=True)

    def selected(self, scored: Scored, ids: Tensor) -> Tensor:
        """fp32 [T], NaN for a row without a finite logit; no second [T, V] tensor is made."""
        return rl_logprob.selected_logprob(
            scored.logits, ids, vocab_size=self.vocab_size, vocab_tile=self.vocab_tile,
            temperature=scored.temperature, nonfinite="nan",
        )  # fmt: skip

    def full(self, scored: Scored) -> Tensor:
        """fp32 [T, V]."""
        return rl_logprob.full_logprob(
            scored.logits, vocab_size=self.vocab_size, vocab_tile=self.vocab_tile,
            temperature=scored.temperature, nonfinite="nan",
        )  # fmt: skip

    def columns(self, scored: Scored, ids: Tensor) -> Tensor:
        """fp32 [T, k] of ids [T, k]."""
        ids = ids.to(torch.int64)
        return self.selected(scored, ids[:, 0])[:, None] if ids.shape[1] == 1 else self.full(scored).gather(1, ids)

    def top(self, scored: Scored, count: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(ids int64 [T, 1 + count], log-probabilities fp32 alike, rank of each given id int64 [T]), given id first."""
        ids = ids.to(torch.int64)
        logits = scored.logits[:, : self.vocab_size]
        every = ids[:, None]
        if count:
            every = torch.cat((every, torch.topk(logits, min(count, self.vocab_size), dim=1).indices), 1)
        return every, self.columns(scored, every), _ranks(logits, ids)


def _ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """How many logits are at least as large as that of the id, int64 [T]."""
    if not logits.is_cuda:
        return (logits >= logits.gather(1, ids[:, None])).sum(1)
    out = torch.empty_like(ids)
    if len(ids):
        # vLLM's own count: integers, one pass over the logits
        logprob._ranks_kernel[(len(ids),)](out, logits, logits.stride(0), ids, logits.shape[1], BLOCK_SIZE=8192)
    return out


class StrictGPUSampler(Sampler):
    """For the V1 model runner."""

    def __init__(self, profile: Profile, runner: Any) -> None:
        super().__init__(runner.model_config.logprobs_mode)
        self.draws = Draws(profile, runner.device)
        self.runner = runner
        self._batch: SamplingMetadata | None = None
        self._seeds: Tensor | None = None

    def compute_logprobs(self, logits: Tensor) -> Any:  # type: ignore[override]
        """What vLLM passes on to ``gather_logprobs``; prompt tokens come here, at temperature 1."""
        return Scored(logits, 1.0)

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
    ) -> tuple[Tensor, Any]:
        m, rows = sampling_metadata, logits.shape[0]
        positions = self._positions(rows)
        if not m.max_num_logprobs and not m.logprob_token_ids:
            found = self._scored(logits, m, positions)
            return found.ids, None if m.max_num_logprobs is None else found
        if m.all_greedy:
            chosen, scored = self.draws.draw(logits, None, positions, 1.0, True), Scored(logits, 1.0)
        else:
            temperature, cold = self._temperatures(m, rows)
            chosen = self.draws.draw(
                logits, self._seeds_of(m, rows), positions, temperature, False if m.all_random else cold
            )
            scored = Scored(logits, temperature)
        if m.max_num_logprobs == -1 or m.logprob_token_ids:
            return chosen, self.draws.full(scored)
        return chosen, scored

    def _scored(self, logits: Tensor, m: SamplingMetadata, positions: Tensor) -> Drawn:
        """Tokens with their log-probabilities and ranks, nobody asking for those of other tokens."""
        rows = logits.shape[0]
        temperature, cold = self._temperatures(m, rows)
        packed = new_packed(rows, logits.device)
        self.draws.check()
        self.draws.scored(logits, self._seeds_of(m, rows), positions, temperature, cold.to(torch.int64), packed)
        return unpack(packed, rows)

    def _temperatures(self, m: SamplingMetadata, rows: int) -> tuple[Tensor, Tensor]:
        """fp32 [rows], 1 where greedy; bool [rows], which are."""
        if m.all_greedy or m.temperature is None:
            ones = torch.ones(rows, dtype=torch.float32, device=self.runner.device)
            return ones, ones > 0
        cold = m.temperature < _SAMPLING_EPS
        return torch.where(cold, 1.0, m.temperature), cold

    def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:  # type: ignore[override]
        if isinstance(logprobs, Drawn):
            values = logprobs.logprobs[:, None]
            return LogprobsTensors(logprobs.ids[:, None].to(torch.int32), values, logprobs.ranks)
        if not isinstance(logprobs, Scored):
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        ids, values, ranks = self.draws.top(logprobs, num_logprobs, token_ids)
        return LogprobsTensors(ids.to(torch.int32), values, ranks)

    def _positions(self, rows: int) -> Tensor:
        """int64 [rows]: a request's tokens so far, so the index of the one to come."""
        lens = self.runner.seq_lens
        return getattr(lens, "gpu", lens)[:rows].to(torch.int64)

    def _seeds_of(self, m: SamplingMetadata, rows: int) -> Tensor:
        """int64 [rows], sent to the device when the batch changes: vLLM then makes a new ``SamplingMetadata``."""
        if self._batch is not m or self._seeds is None or len(self._seeds) != rows:
            # a greedy row has no generator; torch reports a seed as an unsigned number
            found = [m.generators[i].initial_seed() if i in m.generators else 0 for i in range(rows)]
            seeds = torch.tensor([s - (1 << 64) if s >= 1 << 63 else s for s in found], dtype=torch.int64)
            self._seeds = seeds.to(self.runner.device)
            self._batch = m
        return self._seeds


@contextmanager
def _scoring(function: Any) -> Iterator[None]:
    """``function(logits [T, V], ids [T, k]) -> fp32 [T, k]`` in place of the V2 runner's own, wherever it is known."""
    modules: list[Any] = [m for m in (logprob, prompt_logprob) if hasattr(m, "compute_token_logprobs")]
    stock = logprob.compute_token_logprobs
    for module in modules:
        module.compute_token_logprobs = function
    try:
        yield
    finally:
        for module in modules:
            module.compute_token_logprobs = stock


_SAMPLE_ARGUMENTS = tuple(inspect.signature(runner_v2.Sampler.sample).parameters)[1:]


class StrictRunnerSampler(runner_v2.Sampler):
    """For the V2 model runner: takes over the stock sampler's request states."""

    def __init__(self, profile: Profile, stock: Any, device: torch.device) -> None:
        self.__dict__.update(vars(stock))
        self.draws = Draws(profile, device)
        self._scored: Scored | None = None

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _scoring(self._token_logprobs):
            return super().__call__(logits, *args, **kwargs)

    def sample(self, logits: Tensor, expanded_idx_mapping: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # versions differ in what stands between these
        given = dict(zip(_SAMPLE_ARGUMENTS, (logits, expanded_idx_mapping, *args)))
        given |= kwargs
        states, rows = self.sampling_states, given["idx_mapping_np"]
        host = states.temperature.np[rows]
        cold = host < _SAMPLING_EPS
        temperature: Tensor | float = 1.0
        if ((host != 1.0) & ~cold).any():
            temperature = states.temperature.gpu[expanded_idx_mapping]
            if cold.any():
                temperature = torch.where(temperature < _SAMPLING_EPS, 1.0, temperature)
        greedy: Tensor | bool = bool(cold.all())
        if cold.any() and not greedy:
            greedy = states.temperature.gpu[expanded_idx_mapping] < _SAMPLING_EPS
        # the row's own position is that of its last token; the drawn one comes after it
        positions = given["pos"].to(torch.int64) + 1
        seeds = states.seeds.gpu[expanded_idx_mapping]
        self._scored = Scored(logits, temperature)
        return self.draws.draw(logits, seeds, positions, temperature, greedy), logits

    def _token_logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        scored = self._scored
        assert scored is not None
        assert scored.logits is logits
        return self.draws.columns(scored, ids)


class StrictPromptLogprobs(PromptLogprobsWorker):
    """Prompt tokens' log-probabilities at temperature 1, by the strict operator; V2 model runner."""

    def __init__(self, stock: Any, draws: Draws) -> None:
        self.__dict__.update(vars(stock))
        self.draws = draws

    def compute_prompt_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        with _scoring(self._token_logprobs):
            return super().compute_prompt_logprobs(*args, **kwargs)

    def compute_prompt_token_id_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        # a request of later vLLMs
        with _scoring(self._token_logprobs):
            return super().compute_prompt_token_id_logprobs(*args, **kwargs)  # type: ignore[misc]

    def _token_logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        return self.draws.columns(Scored(logits, 1.0), ids)


def install(profile: Profile, runner: Any, v2: bool) -> Draws:
    """Put the strict sampler into a model runner of either kind."""
    if not v2:
        runner.sampler = StrictGPUSampler(profile, runner)
        return runner.sampler.draws
    runner.sampler = StrictRunnerSampler(profile, runner.sampler, runner.device)
    runner.prompt_logprobs_worker = StrictPromptLogprobs(runner.prompt_logprobs_worker, runner.sampler.draws)
    return runner.sampler.draws
