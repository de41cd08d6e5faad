"""A run directory kept without most of its samples, as for a repository: which steps lack theirs, and how that is said.

``landed.json`` beside the manifest lists them. Their records still have to be those that the ledger has the sha256 of,
and the ledger keeps the sha256 of their samples and tokens, so the missing files can be told from others when found.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rl_contract import ContractError
from rl_parity.jsonfile import REPAIR, read_object, require

LANDED = "landed.json"


def left_out(root: Path, run_id: str) -> dict[str, frozenset[int]]:
    """Arm -> steps whose samples were left out of the directory on purpose; {} where nothing was.

    Raises:
        ContractError: the list is broken, or that of another run.
    """
    path = root / LANDED
    if not path.is_file():
        return {}
    found = read_object(path)
    require(path, found, {"run_id": str, "left_out": dict})
    if found["run_id"] != run_id:
        raise ContractError(f"{path} is that of run {found['run_id']}, the directory holds {run_id}; {REPAIR}")
    for arm, steps in found["left_out"].items():
        if not isinstance(steps, list) or not all(type(step) is int and step >= 0 for step in steps):
            raise ContractError(f"{path}: left_out of {arm} is {steps!r}, supported is a list of steps; {REPAIR}")
    return {arm: frozenset(steps) for arm, steps in found["left_out"].items()}


def sentence(absent: Mapping[str, Sequence[int]]) -> str:
    """Which samples are not there and what is not checked for want of them, "" where all are there."""
    arms = [f"{len(steps)} step(s) of the {arm} arm ({spans(steps)})" for arm, steps in absent.items() if steps]
    if not arms:
        return ""
    return (
        f"Samples not here: {' and '.join(arms)}. Their log-probabilities, tokens and rewards are not compared again: "
        "their counts are those of steps.jsonl, whose records have the sha256 that the ledger keeps of each; the "
        "ledger also keeps that of the samples."
    )


def spans(steps: Sequence[int]) -> str:
    """``1-198, 200`` of the numbers in order."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(sorted(steps)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
