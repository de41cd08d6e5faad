"""A step that failed its checks and that a run was ended before it could record: ledger and samples tell of it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_contract import ContractError
from rl_parity.checks import compare_logprobs, describe_mismatch
from rl_parity.jsonfile import lines, read_text
from rl_parity.rundir import RunDirectory, StepSamples


def failed(run: RunDirectory, arm: str, records: Sequence[Mapping[str, Any]]) -> str | None:
    """In words, which step after ``records`` ends the run as one of them would; None where none does.

    The ledger consumes a step that passed its checks before the step is trained and before its samples are kept. So
    samples of a step that it has not consumed are those of one that failed, however little of them was written, and
    so is its record of a step that consumed nothing. One that was trained may differ in the training forward.

    Raises:
        ContractError: the ledger cannot be read.
    """
    path = run.root / arm / "ledger.jsonl"
    if not path.is_file():
        # it is there before the first step; an arm without it was removed
        return None
    text = read_text(path)
    committed = text[: text.rfind("\n") + 1]
    consumed: set[Any] = set()
    unfit: set[Any] = set()
    for _, event in lines(path, committed) if committed else ():
        if event.get("event") == "step":
            consumed.add(event.get("step"))
        elif event.get("event") == "record" and event.get("consumed") is False:
            unfit.add(event.get("step"))
    kept = {*run.sample_steps(arm)}
    for step in sorted(s for s in kept | unfit if type(s) is int and s >= len(records)):
        held = None
        with suppress(ContractError):
            held = StepSamples.load(run.samples_path(arm, step))
        if step not in consumed:
            why = "its samples cannot be read" if held is None else _why(arm, held, step)
        elif arm == "strict" and held is not None and (found := _forward(held, step)):
            why = found
        else:
            continue
        return f"step {step} of the {arm} arm failed its checks, and the run was ended before it could record it: {why}"
    return None


def _why(arm: str, held: StepSamples, step: int) -> str:
    if arm == "strict":
        verdict, first = compare_logprobs(held, held.rollout, held.train, step, ("rollout", "train"))
        if first is not None:
            return describe_mismatch(first)
        if absent := int(held.absent.sum()):
            return f"{absent} log-probabilities are absent"
        if verdict.nonfinite_count or not verdict.valid_count:
            return f"{verdict.valid_count} valid log-probabilities, {verdict.nonfinite_count} nonfinite"
    return "it was not compared, for a reason that was not written down"


def _forward(held: StepSamples, step: int) -> str | None:
    _, first = compare_logprobs(held, held.train, held.forward, step, ("scoring", "training forward"))
    return None if first is None else describe_mismatch(first)
