"""What a log-probability means. Two sides whose semantics differ are not compared: no kernel could make them equal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rl_contract import ContractError
from rl_contract.checks import shown, whole_number
from rl_logprob.checks import FP32_TINY, number, usable_temperature

MODES = ("processed", "raw")


@dataclass(frozen=True, kw_only=True)
class SamplingSemantics:
    """The distribution a log-probability belongs to.

    Attributes:
        mode: ``processed`` is ``log softmax(logits / temperature)``, ``raw`` is ``log softmax(logits)``.
        temperature: what tokens are sampled at.
        top_p: 1.0 is off.
        top_k: 0 and -1 are off, and are held as 0.
        min_p: 0.0 is off.
        penalties: repetition (1.0 is off), presence, frequency (0.0 is off).
    """

    mode: str = "processed"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ContractError(f"mode={shown(self.mode)}; supported: {MODES}")
        for name in ("temperature", "top_p", "min_p"):
            if not number(getattr(self, name)):
                raise ContractError(f"{name}={shown(getattr(self, name))}; supported: a number")
        if not whole_number(self.top_k):
            raise ContractError(f"top_k={shown(self.top_k)}; supported: an integer, 0 or -1 for off")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        penalties = self.penalties
        if not isinstance(penalties, (tuple, list)) or len(penalties) != 3 or not all(map(number, penalties)):
            raise ContractError(
                f"penalties={shown(penalties)}; supported: three numbers, repetition, presence and frequency penalty; "
                "(1.0, 0.0, 0.0) is off"
            )
        repetition, presence, frequency = penalties
        object.__setattr__(self, "penalties", (float(repetition), float(presence), float(frequency)))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "penalties": list(self.penalties)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SamplingSemantics":
        """From ``to_dict``; an unknown field raises ContractError."""
        unknown = sorted(map(str, data.keys() - {field.name for field in fields(cls)}))
        if unknown:
            raise ContractError(f"unknown {unknown}; supported: {[field.name for field in fields(cls)]}")
        return cls(**data)

    def differences(self, other: "SamplingSemantics") -> list[str]:
        """Names of the fields that differ, with both values."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{k}: {shown(mine[k])} != {shown(theirs[k])}" for k in mine if mine[k] != theirs[k]]

    def require_same(self, other: "SamplingSemantics") -> None:
        """Raise ContractError listing every difference."""
        found = self.differences(other)
        if found:
            raise ContractError(
                "log-probabilities of two distributions cannot be compared (" + "; ".join(found) + "); "
                "give both engines one SamplingSemantics"
            )

    def violations(self) -> list[str]:
        """Everything strict mode refuses in these semantics; empty when a trainer can score the same distribution."""
        found = []
        if not usable_temperature(self.temperature):
            found.append(
                f"temperature={shown(self.temperature)}; supported: positive and finite, at least {FP32_TINY:.3g}, and "
                "of fp32 (greedy decoding samples from no distribution a policy gradient could use)"
            )
        elif self.mode == "raw" and self.temperature != 1:
            found.append(
                f"mode='raw' at temperature={self.temperature}; supported: 'processed', since raw values of both sides "
                "could agree while tokens come from another distribution"
            )
        if self.top_p != 1:
            found.append(
                f"top_p={shown(self.top_p)}; supported: 1.0, since no support is stored for the trainer to replay"
            )
        if self.top_k != 0:
            found.append(f"top_k={shown(self.top_k)}; supported: off (0 or -1), for the same reason")
        if self.min_p != 0:
            found.append(f"min_p={shown(self.min_p)}; supported: 0.0, for the same reason")
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name, value, off in zip(names, self.penalties, (1.0, 0.0, 0.0)):
            if value != off:
                found.append(
                    f"{name}={shown(value)}; supported: {off}, since it makes logits depend on the sampled text"
                )
        return found


def check_sampling_semantics(
    *,
    mode: str = "processed",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[str] | None = None,
) -> SamplingSemantics:
    """The semantics of these sampling parameters, if strict mode supports them.

    Raises:
        ContractError: one error that lists every parameter outside strict mode, with what is supported.
    """
    semantics = SamplingSemantics(
        mode=mode,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        penalties=(repetition_penalty, presence_penalty, frequency_penalty),
    )
    found = semantics.violations()
    if logit_bias:
        found.append(f"logit_bias for {len(logit_bias)} ids; supported: none, since the trainer's logits have no bias")
    if bad_words:
        found.append(f"bad_words={list(bad_words)!r}; supported: none, since the trainer's support is the vocabulary")
    if found:
        raise ContractError("strict mode refuses these sampling parameters: " + "; ".join(found))
    return semantics
