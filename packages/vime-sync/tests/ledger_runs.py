"""Versions of one run, a ledger that has trained some steps of it, and what a refusal must say."""

import pytest

from rl_contract import ContractError
from vime_sync import PolicyVersion

V = [PolicyVersion("run", step, f"{step + 1:064x}"[::-1]) for step in range(8)]


def refused(call, *texts):
    with pytest.raises(ContractError) as error:
        call()
    for text in texts:
        assert text in str(error.value)


def train(ledger, steps, first=0):
    for step in range(first, first + steps):
        ledger.add_version(V[step])
        for i in range(2):
            ledger.add_sample(f"s{step}.{i}", generated=4, spans=[(str(V[step]), 0, 4)], token_ids=[step, i, 7, 8, 9])
        ledger.consume(
            step, [f"s{step}.0", f"s{step}.1"], token_ids={f"s{step}.{i}": [step, i, 7, 8, 9] for i in range(2)}
        )
