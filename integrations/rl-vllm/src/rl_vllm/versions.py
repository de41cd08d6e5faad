"""Which weights made which token, on a vLLM that stamps none (0.24): counted where tokens are sampled.

A worker sees each step's schedule, so it knows how many tokens of a request it has sampled, before the client has. At a
push these numbers are the boundaries between versions; ``VersionLedger`` turns them into spans when a request ends.

An engine that schedules ahead throws away what was in flight when its requests were preempted for a push, and samples
those tokens anew. How many tokens a request had kept shows when it comes back; the boundary moves down to that.
"""

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

from vime_sync.spans import Span, spans_from_pauses

FIRST_VERSION = "default"


class SampledTokens:
    """Tokens sampled of every request in flight, from the schedules a worker executes."""

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}
        # of the last step that had the request: tokens sampled before it, positions computed before it and by it
        self._last: dict[str, tuple[int, int, int]] = {}
        # since the last push: who has not come back yet, and with how many tokens the others did
        self._away: set[str] = set()
        self._kept: dict[str, int] = {}

    def observe(self, schedule: Any) -> None:
        """One executed ``SchedulerOutput``. Called at every step: no Python runs for each request that decodes."""
        scheduled: Mapping[str, int] = schedule.num_scheduled_tokens
        for gone in schedule.finished_req_ids:
            self._prompts.pop(gone, None)
            self._last.pop(gone, None)
            self._away.discard(gone)
        for new in schedule.scheduled_new_reqs:
            prompt = len(new.prompt_token_ids or ())
            # a request that comes back after a preemption is new to some runners, and brings its tokens
            so_far = len(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids or ()) - prompt
            self._prompts[new.req_id] = prompt
            self._last[new.req_id] = (so_far, new.num_computed_tokens, scheduled.get(new.req_id, 0))
        old = schedule.scheduled_cached_reqs
        rows = zip(old.num_output_tokens, old.num_computed_tokens, map(scheduled.get, old.req_ids, repeat(0)))
        self._last.update(zip(old.req_ids, rows))
        if self._away:
            back = self._away & {*old.req_ids, *(new.req_id for new in schedule.scheduled_new_reqs)}
            self._away -= back
            self._kept.update((name, self._last[name][0]) for name in back)

    def counts(self) -> dict[str, int]:
        """Tokens sampled so far, by the engine's own request id."""
        return {
            name: outputs + (computed + scheduled >= self._prompts.get(name, 0) + outputs)
            for name, (outputs, computed, scheduled) in self._last.items()
        }

    def pushed(self) -> dict[str, int]:
        """``counts`` at a push; from now on ``kept`` is about those requests."""
        self._away, self._kept = set(self._last), {}
        return self.counts()

    def kept(self) -> dict[str, int]:
        """Tokens with which requests in flight at the last push have come back since."""
        return dict(self._kept)


class VersionLedger:
    """The versions of one engine's tokens, kept by its client."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self._starts: dict[str, list[tuple[int, str]]] = {}

    def push(self, version: str, sampled: Mapping[str, int]) -> None:
        """``version`` serves from now on; ``sampled``: tokens that each request in flight had before."""
        for request, count in sampled.items():
            starts = self._starts.setdefault(request, [(0, self.version)])
            starts.append((max(count, starts[-1][0]), version))
        self.version = version

    def settle(self, kept: Mapping[str, int]) -> None:
        """After the last push: requests have come back with so many tokens, and sampled the others anew."""
        for request, count in kept.items():
            starts = self._starts.get(request)
            if starts:
                at, version = starts[-1]
                floor = starts[-2][0] if len(starts) > 1 else 0
                starts[-1] = (max(floor, min(at, count)), version)

    def met(self, request: str) -> bool:
        """Whether a push came while this request was in flight."""
        return request in self._starts

    def spans(self, request: str, generated: int) -> tuple[Span, ...]:
        """Spans of a finished request, which is forgotten; a request no push has met is of the serving version."""
        starts = self._starts.pop(request, [(0, self.version)])
        # tokens that were sampled, but thrown away with the request, are no tokens of its output
        kept = [(min(at, generated), version) for at, version in starts]
        return spans_from_pauses(kept, generated)


def attach(engine: Any, spans: Callable[[str, int], tuple[Span, ...]]) -> None:
    """Let ``engine.step`` (vLLM's ``LLMEngine``, this instance alone) put ``weight_versions`` on finished outputs."""
    processor, stock = engine.output_processor, engine.step

    def step() -> Any:
        # outputs carry the caller's name of a request, workers the engine's own
        names = {state.external_req_id: own for own, state in processor.request_states.items()}
        outputs = stock()
        for output in outputs:
            if getattr(output, "finished", False) and len(output.outputs) == 1:
                completion = output.outputs[0]
                request = names.get(output.request_id, output.request_id)
                completion.weight_versions = spans(request, len(completion.token_ids))
        return outputs

    engine.step = step
