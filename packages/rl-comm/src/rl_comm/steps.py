"""Ranks in step: calls are counted, and what one rank alone meets is told to its peers or ends the communicator.

A rank that refuses alike with its peers is in step with them. One that fails by itself is not: what it makes next would
be met by another call of theirs, with values that were never meant for it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from rl_comm.header import REFUSAL, Call, is_alike
from rl_comm.mover import Mover
from rl_contract import ContractError
from rl_contract.communicator import know, refuse

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="InStep")


def in_step(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """One call of a communicator, counted; an error that not all ranks have raised alike is its last.

    Raises:
        ContractError: an earlier call was the last.
    """

    def counted(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._failed:
            raise self._out_of_step()
        self._number += 1
        try:
            return call(self, *args, **kwargs)
        except BaseException as error:
            self._leave(call.__name__.lstrip("_"), error)
            raise

    untraced = torch.compiler.disable(counted)

    @wraps(call)
    def step(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        # what is no operator breaks a compiler's graph: traced, its exchange would be another one
        if torch.compiler.is_compiling():
            return untraced(self, *args, **kwargs)
        return counted(self, *args, **kwargs)

    return step


def told(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Peers learn of what ends this before it is a call, too."""

    @wraps(call)
    def telling(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(self, *args, **kwargs)
        except Exception as problem:
            refuse(problem, self, given=args)
            raise

    return telling


class InStep:
    """What ``in_step`` keeps of a communicator over ``movers``, by device type."""

    def _begin(self, rank: int, world_size: int, movers: dict[str, Mover]) -> None:
        self.rank, self.world_size, self._movers = rank, world_size, movers
        # where the last call was made, hence where peers look for a rank whose argument is on no device
        self._device = "cpu"
        self._number = 0
        # what the call was, and its error, that put this rank out of step
        self._failed = ""

    def refuse(self, problem: Exception, *, device: str = "") -> None:
        """Tell the peers that this rank refuses an operator that would have made a call, with ``problem``.

        Waits for nobody: each peer's next call raises ContractError naming this rank, and this rank's next one is in
        step with those after. Over shared memory, and by the board beside NCCL, peers are told at once, of a second
        refusal in a row when this rank makes its next call; over gloo of each one then. Until then they wait, at most
        for the timeout. Between hosts whose ranks use NCCL they wait for the group's timeout. Where a call has failed
        on this rank, peers are told already. See ``rl_contract.communicator.refuse``.

        Args:
            device: type of the device of what the operator was given, where peers make their call; empty: as the last.
        """
        mover = self._movers.get(device) or self._movers[self._device]
        refuse: Callable[[Call], None] | None = getattr(mover, "refuse", None)
        if self.world_size == 1 or self._failed:
            return
        self._number += 1
        if refuse is not None:
            # what traces or transforms the operator must leave alone what is said about it
            with _disable_current_modes(), temporarily_clear_interpreter_stack():
                refuse(replace(REFUSAL, number=self._number))

    def _leave(self, name: str, error: BaseException) -> None:
        """After ``error`` of a call: peers may have met another one, or wait for what this rank will not send."""
        know(error, self)
        if self.world_size == 1 or is_alike(error):
            return
        self._failed = f"{name} ended with {type(error).__name__}: {error}"
        for mover in self._movers.values():
            leave: Callable[[], None] | None = getattr(mover, "leave", None)
            if leave is not None:
                leave()

    def _out_of_step(self) -> Exception:
        return ContractError(
            f"this communicator is out of step since an earlier call on rank {self.rank} failed: {self._failed}; "
            "make new communicators on all ranks, or restart the group"
        )
