"""The name of a set of weights: the label that an engine stamps on tokens carries a digest of the bytes behind it."""

import re
from dataclasses import dataclass

from rl_contract import ContractError

SHORT_DIGEST = 12


def check_run_id(run_id: str) -> None:
    """Raise ContractError for a run id that no version string could carry."""
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9._-]+", run_id):
        raise ContractError(f"run_id {run_id!r} is not usable; use letters, digits, '.', '_' and '-'")


@dataclass(frozen=True)
class PolicyVersion:
    """``step`` is the training step whose samples these weights produce, ``digest`` the manifest's.

    ``str(version)`` is ``run:step:digest12``, the string given to an engine. A version parsed from it knows 12 digits
    only; ``matches`` compares what both sides know.
    """

    run_id: str
    step: int
    digest: str

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if not isinstance(self.step, int) or isinstance(self.step, bool) or self.step < 0:
            raise ContractError(f"step {self.step!r} is not usable; give a whole number from 0 up")
        if not isinstance(self.digest, str) or not re.fullmatch(r"[0-9a-f]{12,64}", self.digest):
            raise ContractError(f"digest {self.digest!r} is not usable; give 12 to 64 lower-case hex digits")

    def __str__(self) -> str:
        return f"{self.run_id}:{self.step}:{self.digest[:SHORT_DIGEST]}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """Read ``run:step:digest``; anything else (an engine's own label, say ``default``) raises ContractError."""
        parts = text.split(":") if isinstance(text, str) else []
        # no run has a step of twenty digits, and Python refuses to read numbers of thousands
        if len(parts) != 3 or not re.fullmatch(r"0|[1-9][0-9]{0,18}", parts[1]):
            raise ContractError(
                f"{text!r} is no policy version; needed is run:step:digest. An engine that still reports its own label "
                "has not been given weights by a publisher"
            )
        return cls(parts[0], int(parts[1]), parts[2])

    def matches(self, other: "PolicyVersion") -> bool:
        """Same run, same step, and digests equal over the digits that both sides know."""
        check_version("PolicyVersion.matches", other)
        known = min(len(self.digest), len(other.digest))
        return (self.run_id, self.step, self.digest[:known]) == (other.run_id, other.step, other.digest[:known])


def check_version(where: str, version: object) -> None:
    """Raise ContractError unless it is a PolicyVersion: a text may carry no digest of the bytes that it labels."""
    if not isinstance(version, PolicyVersion):
        raise ContractError(
            f"{where} got the version {version!r:.80}, a {type(version).__name__}; supported: a PolicyVersion, which "
            "PolicyVersion.parse makes of run:step:digest"
        )
