"""Two run directories, bit against bit: sampled tokens, log-probabilities and losses."""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_contract import ContractError
from rl_parity.rundir import RunDirectory, StepSamples

_LOGPROBS = ("rollout", "train", "forward")
_FORWARD_FIGURES = ("reward", "loss", "kl_reference", "grad_norm")


@dataclass
class Comparison:
    """Counts of compared and of differing values by quantity; ``first`` says where each quantity differs first."""

    compared: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return sum(self.compared.values()) > 0 and not any(self.different.values())

    def add(self, quantity: str, compared: int, different: int, where: str = "") -> None:
        self.compared[quantity] = self.compared.get(quantity, 0) + compared
        self.different[quantity] = self.different.get(quantity, 0) + different
        if different:
            self.first.setdefault(quantity, where)

    def lines(self) -> list[str]:
        out = []
        for quantity, total in self.compared.items():
            bad = self.different[quantity]
            verdict = "equal" if not bad else f"{bad:,} differ, first at {self.first[quantity]}"
            out.append(f"{quantity:<28} {total:>10,} compared   {verdict}")
        return out


def compare_runs(a: RunDirectory, b: RunDirectory) -> Comparison:
    """Compare every arm and step that both directories have.

    Raises:
        ContractError: nothing in common, or an arm whose step counts differ.
    """
    arms = [arm for arm in a.arms() if arm in b.arms()]
    if not arms:
        raise ContractError(
            f"{a.root} has arms {a.arms()}, {b.root} has {b.arms()}; give two runs with an arm in common"
        )
    out = Comparison()
    for arm in arms:
        mine, theirs = a.steps(arm), b.steps(arm)
        if len(mine) != len(theirs):
            raise ContractError(
                f"arm {arm}: {a.root} has {len(mine)} steps, {b.root} {len(theirs)}; run both with the same --steps"
            )
        for x, y in zip(mine, theirs):
            _samples(out, arm, x["step"], a, b)
            _figures(out, arm, x, y)
    return out


def _samples(out: Comparison, arm: str, step: int, a: RunDirectory, b: RunDirectory) -> None:
    x, y = StepSamples.load(a.samples_path(arm, step)), StepSamples.load(b.samples_path(arm, step))
    if x.tokens.shape != y.tokens.shape or not np.array_equal(x.length, y.length):
        total = max(x.tokens.size, y.tokens.size)
        out.add(f"{arm} tokens", total, total, f"step {step}: {x.tokens.size} tokens against {y.tokens.size}")
        return
    _array(out, f"{arm} tokens", step, x, x.tokens, y.tokens)
    for name in _LOGPROBS:
        _array(
            out, f"{arm} {name} logprob", step, x, getattr(x, name).view(np.uint32), getattr(y, name).view(np.uint32)
        )


def _array(out: Comparison, quantity: str, step: int, samples: StepSamples, a: np.ndarray, b: np.ndarray) -> None:
    differs = a != b
    where = ""
    if differs.any():
        flat = int(differs.argmax())
        sample, position = samples.locate(flat)
        where = f"step {step}, sample {sample}, position {position}: {a[flat]} against {b[flat]}"
    out.add(quantity, int(a.size), int(differs.sum()), where)


def _figures(out: Comparison, arm: str, x: dict[str, Any], y: dict[str, Any]) -> None:
    for name in _FORWARD_FIGURES:
        a, b = x.get(name), y.get(name)
        same = a is b is None or (a is not None and b is not None and struct.pack("d", a) == struct.pack("d", b))
        out.add(f"{arm} {name}", 1, int(not same), f"step {x['step']}: {a!r} against {b!r}")
    same = x["weight_digest"] == y["weight_digest"]
    out.add(f"{arm} weight_digest", 1, int(not same), f"step {x['step']}")
