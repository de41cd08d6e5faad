"""What a communicator says of a call: the header that ranks compare, its refusal, and the record of what ran."""

from dataclasses import replace
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from rl_comm.header import Call, alike, is_alike
from rl_comm.mover import Mover
from rl_comm.refusals import differentiated, each_problem, list_problem, stored
from rl_comm.steps import InStep, in_step
from rl_contract import ContractError, Launch, record_launch


class Calls(InStep):
    """Between the calls of a communicator and its movers."""

    def _call(self, op: str, x: Any, out_dtype: torch.dtype | None = None, arg: int = 0, operator: str = "") -> Call:
        # what can't be said in a header is refused, so that its words need not tell it apart
        said = arg if isinstance(arg, int) and abs(arg) < 1 << 62 else -1
        if not stored(x):
            device = x.device.type if isinstance(x, torch.Tensor) else self._device
            return Call(op, None, None, said, (), device, said=operator, number=self._number)
        known = out_dtype if isinstance(out_dtype, torch.dtype) else None
        out = known if out_dtype is not None else x.dtype
        return Call(op, x.dtype, out, said, tuple(x.shape), x.device.type, said=operator, number=self._number)

    def _several(self, op: str, tensors: Any) -> tuple[Call, Exception | None]:
        """The call that gathers each of ``tensors``, and why it can't be made, if so."""
        listed, unlisted = [], list_problem(tensors)
        if unlisted is None:
            try:
                listed = list(tensors)
            except Exception as error:
                unlisted = ContractError(f"a gather of several tensors got a sequence that can't be read: {error!r}")
        first, *others = [self._call(op, x) for x in listed] or [self._call(op, None)]
        call = replace(first, beside=tuple(others)) if others else first
        return call, unlisted or each_problem([first, *others], listed)

    def _undifferentiated(self, op: str, x: torch.Tensor) -> Exception | None:
        # a world of one is the identity, also for autograd
        return differentiated(op, x) if self.world_size > 1 else None

    def _mover(self, x: torch.Tensor) -> Mover:
        self._device = x.device.type
        return self._movers.get(x.device.type) or self._movers["cpu"]

    def _record(self, op: str, form: str, x: torch.Tensor, moved_by: str = "") -> None:
        phase = "capture" if x.is_cuda and torch.cuda.is_current_stream_capturing() else "eager"
        kernel = f"rl_comm.{moved_by or self._mover(x).name.partition('+')[0]}.{op}"
        record_launch(Launch("collective", kernel, plan=form, layout=f"world{self.world_size}", phase=phase))

    def _refuse(self, call: Call, problem: Exception | None) -> None:
        """Raise ``problem`` after the peers have seen that this rank refuses, so that all of them raise.

        Raises:
            Exception: ``problem`` where all ranks refuse alike; else the ContractError that all ranks raise, here with
                ``problem`` in it.
        """
        if problem is None:
            return
        if self.world_size > 1:
            mover = self._movers.get(call.device) or self._movers[self._device]
            try:
                # what traces or transforms the call must leave alone what is said about it
                with _disable_current_modes(), temporarily_clear_interpreter_stack():
                    mover.gather(replace(call, refused=True, number=self._number), torch.empty(0, dtype=torch.uint8))
            except ContractError as different:
                if not is_alike(different):
                    raise
                raise alike(ContractError(f"{different}. This rank: {problem}")) from problem
        raise alike(problem)

    @in_step
    def _refuse_alone(self, call: Call, problem: Exception | None) -> None:
        """``_refuse`` as a call of its own."""
        self._refuse(call, problem)
