"""Seeded requests and chunked prefill together, on a CPU.

vLLM draws a token for every row of a batch, also for a prompt that is not finished, and takes that draw back by moving
the request's generator four back in its offset. A CPU generator has no offset, and stock vLLM stops there. A strict
engine never uses the generator's state (see ``sampling``); an audited one does, so the state before the draw is kept.
"""

from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator whose last draw can be taken back."""

    _before: torch.Tensor | None = None

    def remember(self) -> None:
        """The state to come back to: call it before a draw."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """vLLM's way of taking the last draw back; the number has no meaning here."""
        if self._before is not None:
            self.set_state(self._before)
        return self


def make_seed_holders(runner: Any) -> None:
    """As ``make_rewindable`` for an engine that never draws from generators: nothing is remembered.

    A device's generator would take an offset below zero when vLLM takes back a draw that was not made.
    """
    _replace(runner, remember=False)


def make_rewindable(runner: Any) -> None:
    """Replace the generators of new requests, before their first draw, and remember the state of all."""
    _replace(runner, remember=True)


def _replace(runner: Any, *, remember: bool) -> None:
    batch = runner.input_batch
    for index, generator in list(batch.generators.items()):
        if not isinstance(generator, RewindableGenerator):
            ours = RewindableGenerator()
            ours.manual_seed(generator.initial_seed())
            batch.generators[index] = ours
            # a preempted request comes back with the generator its state holds
            runner.requests[batch.req_ids[index]].generator = ours
            generator = ours
        if remember:
            generator.remember()
