"""The rules of a run's timeline: what may follow what, and what a step may consume. Nothing here touches a file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_contract import ContractError
from vime_sync.spans import Span, check_spans, whole_number
from vime_sync.version import PolicyVersion, check_run_id

Event = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """``generated`` tokens; ``step`` is the training step that consumed it, ``dropped`` why it never will be."""

    sample_id: str
    generated: int
    spans: tuple[Span, ...]
    tokens_sha256: str | None = None
    step: int | None = None
    dropped: str | None = None


@dataclass(frozen=True)
class StepReport:
    """What a training step consumed; ``weight_version_mismatch_count`` counts tokens of a version it does not train."""

    step: int
    version: str
    sample_ids: tuple[str, ...]
    tokens: int
    weight_version_mismatch_count: int
    staleness_max: int
    staleness_mean: float


@dataclass(frozen=True)
class Recorded:
    """sha256 by name of what was written down about a step."""

    step: int
    digests: Mapping[str, str]


class Timeline:
    """What a run has done so far. An event is checked against it first, and applied when it is known to last.

    Args:
        run_id: the run that all versions must belong to, spelled as ``PolicyVersion`` allows.
        max_staleness: largest allowed (step of the version served - step of the version of the oldest token).
    """

    def __init__(self, run_id: str, max_staleness: int) -> None:
        check_run_id(run_id)
        if not whole_number(max_staleness) or max_staleness < 0:
            raise ContractError(f"max_staleness is {max_staleness!r}; give 0 (on-policy) or more")
        self.run_id, self.max_staleness = run_id, int(max_staleness)
        self.versions: dict[str, PolicyVersion] = {}
        self.samples: dict[str, Sample] = {}
        self.steps: list[StepReport] = []
        self.served: PolicyVersion | None = None
        self.recorded: dict[int, Mapping[str, str]] = {}
        # (step, digest) of every sitting but the first: where it went on, and from which weights
        self.sittings: list[tuple[int, str]] = []

    def staleness(self, sample_id: str) -> int:
        """Steps between the version being served and the version of the sample's oldest token."""
        sample = self._sample(sample_id)
        served = self._served()
        return max((served.step - self.versions[span.version].step for span in sample.spans), default=0)

    def mismatched_tokens(self, sample_id: str) -> int:
        """Tokens that another version than the one being served produced."""
        served = str(self._served())
        return sum(span.end - span.start for span in self._sample(sample_id).spans if span.version != served)

    def check_run(self, steps: int | None = None) -> dict[str, int]:
        """Prove that the run is continuous, and count.

        Args:
            steps: how many steps the run must have.

        Returns:
            steps, samples, tokens, weight_version_mismatch_count, staleness_max, dropped, and pending: entered, not yet
            consumed.

        Raises:
            ContractError: listing every step that is missing, has no version with a known digest, or no sample; or
                ``steps`` is no number of steps.
        """
        if steps is not None and (not whole_number(steps) or steps < 0):
            raise ContractError(f"steps={steps!r}; supported: the number of steps that the run must have, 0 or more")
        wanted = len(self.steps) if steps is None else steps
        known = {version.step for version in self.versions.values()}
        trained = {report.step for report in self.steps}
        problems = [f"step {step} was not trained" for step in range(wanted) if step not in trained]
        problems += [f"step {step} has no published version" for step in sorted(trained) if step not in known]
        problems += [f"step {step} is beyond the run's {wanted} steps" for step in sorted(trained) if step >= wanted]
        if problems:
            raise ContractError(f"run {self.run_id}: " + "; ".join(problems))
        pending = [s for s in self.samples.values() if s.step is None and s.dropped is None]
        return {
            "steps": len(self.steps),
            "samples": sum(len(report.sample_ids) for report in self.steps),
            "tokens": sum(report.tokens for report in self.steps),
            "weight_version_mismatch_count": sum(r.weight_version_mismatch_count for r in self.steps),
            "staleness_max": max((report.staleness_max for report in self.steps), default=0),
            "dropped": sum(s.dropped is not None for s in self.samples.values()),
            "pending": len(pending),
        }

    def _checked(self, event: Event) -> Any:
        match event["event"]:
            case "run":
                return self._checked_run(event)
            case "version":
                return self._checked_version(event)
            case "sample":
                return self._checked_sample(event)
            case "step":
                return self._checked_step(event)
            case "resume":
                return self._checked_resume(event)
            case "record":
                return self._checked_record(event)
            case "drop":
                sample = self._sample(event["id"])
                if sample.step is not None or sample.dropped is not None:
                    raise ContractError(f"sample {sample.sample_id} was {_fate(sample)}; it cannot be dropped")
                return replace(sample, dropped=str(event["reason"]))
            case other:
                raise ContractError(f"ledger event {other!r} is unknown")

    def _apply(self, change: Any) -> None:
        if isinstance(change, PolicyVersion):
            self.versions[str(change)] = self.served = change
        elif isinstance(change, Sample):
            self.samples[change.sample_id] = change
        elif isinstance(change, Recorded):
            self.recorded[change.step] = change.digests
        elif isinstance(change, tuple):
            self.sittings.append(change)
        elif isinstance(change, StepReport):
            for sample_id in change.sample_ids:
                self.samples[sample_id] = replace(self.samples[sample_id], step=change.step)
            self.steps.append(change)

    def _checked_run(self, event: Event) -> None:
        if event["run"] != self.run_id or event["max_staleness"] != self.max_staleness:
            raise ContractError(
                f"the ledger belongs to run {event['run']} with max_staleness {event['max_staleness']}, given were "
                f"{self.run_id} and {self.max_staleness}; resume with the same, or give another file"
            )

    def _checked_version(self, event: Event) -> PolicyVersion:
        version = PolicyVersion(event["run"], event["step"], event["digest"])
        if version.run_id != self.run_id:
            raise ContractError(f"version {version} does not belong to run {self.run_id}")
        if len(version.digest) != 64:
            raise ContractError(f"version {version} carries {len(version.digest)} digits; give the manifest's digest")
        if version.step in self.recorded:
            raise ContractError(
                f"version {version} is of a step that was recorded as one that consumes nothing; such a step ends "
                "its run, begin another"
            )
        expected = 0 if self.served is None else self.served.step + 1
        if version.step != expected:
            raise ContractError(f"version {version} does not follow {self.served}; the next step is {expected}")
        if expected != len(self.steps):
            raise ContractError(f"version {version} comes before step {len(self.steps)} has consumed its samples")
        if self.sittings and self.sittings[-1][0] == version.step and self.sittings[-1][1] != version.digest:
            raise ContractError(
                f"version {version} has other weights than the sitting resumed from ({self.sittings[-1][1][:12]}); "
                "restore the state that step ended with"
            )
        return version

    def _checked_resume(self, event: Event) -> tuple[int, str]:
        step, digest = event["step"], str(event["digest"])
        if not whole_number(step) or step != len(self.steps) or not self.steps:
            raise ContractError(f"a sitting cannot resume at step {step!r}; {len(self.steps)} steps are trained")
        if len(digest) != 64:
            raise ContractError(f"resuming needs the manifest's digest, got {len(digest)} digits")
        return int(step), digest

    def _checked_record(self, event: Event) -> Recorded:
        step, digests = event["step"], event["digests"]
        consumed = event.get("consumed", True)
        expected = len(self.steps) - bool(consumed)
        if not whole_number(step) or step != expected or step < 0 or step in self.recorded:
            what = "after it consumed its samples" if consumed else "as the next one, which will consume nothing"
            raise ContractError(f"step {step!r} cannot be recorded; a step is, once, {what}")
        if not isinstance(digests, Mapping) or not all(isinstance(d, str) and len(d) == 64 for d in digests.values()):
            raise ContractError(f"step {step}: give a sha256 of 64 digits for each name, got {digests!r}")
        return Recorded(int(step), dict(digests))

    def _checked_sample(self, event: Event) -> Sample:
        sample_id, generated = str(event["id"]), event["generated"]
        if sample_id in self.samples:
            raise ContractError(f"sample {sample_id} is in the ledger already; ids are given once in a run")
        spans = check_spans(event["spans"], generated)
        unknown = sorted({span.version for span in spans} - self.versions.keys())
        if unknown:
            raise ContractError(
                f"sample {sample_id} has tokens of {', '.join(unknown)}, which this run never published; published are "
                f"{', '.join(self.versions) or 'none'}"
            )
        return Sample(sample_id, generated, spans, event["tokens"])

    def _checked_step(self, event: Event) -> StepReport:
        step, ids, served = int(event["step"]), [str(i) for i in event["ids"]], self._served()
        expected = self.steps[-1].step + 1 if self.steps else 0
        problems = []
        if step in self.recorded:
            problems.append("it was recorded as one that consumes nothing")
        if step != expected:
            problems.append(f"the next step is {expected}")
        if served.step != step:
            problems.append(f"the version being served is {served}")
        if not ids:
            problems.append("no sample was given")
        problems += [f"sample {i} is given twice" for i in sorted({i for i in ids if ids.count(i) > 1})]
        for sample_id in dict.fromkeys(ids):
            problems += self._unusable(sample_id, event["tokens"])
        if problems:
            raise ContractError(f"step {step}: " + "; ".join(problems))
        stale = [self.staleness(sample_id) for sample_id in ids]
        return StepReport(
            step=step,
            version=str(served),
            sample_ids=tuple(ids),
            tokens=sum(self.samples[i].generated for i in ids),
            weight_version_mismatch_count=sum(self.mismatched_tokens(i) for i in ids),
            staleness_max=max(stale),
            staleness_mean=sum(stale) / len(stale),
        )

    def _unusable(self, sample_id: str, tokens: Mapping[str, str]) -> list[str]:
        sample = self.samples.get(sample_id)
        if sample is None:
            return [f"sample {sample_id} is unknown"]
        found = []
        if sample.step is not None or sample.dropped is not None:
            found.append(f"sample {sample_id} was {_fate(sample)}")
        if (stale := self.staleness(sample_id)) > self.max_staleness:
            found.append(f"sample {sample_id} is {stale} steps stale, the bound is {self.max_staleness}")
        if sample_id in tokens and sample.tokens_sha256 is None:
            found.append(f"sample {sample_id} was entered without token ids, which leaves nothing to check")
        elif sample_id not in tokens and sample.tokens_sha256 is not None:
            found.append(f"sample {sample_id} was entered with token ids; pass what the trainer scored as token_ids")
        elif sample_id in tokens and tokens[sample_id] != sample.tokens_sha256:
            found.append(f"sample {sample_id} has other tokens than the rollout recorded")
        return found

    def _sample(self, sample_id: str) -> Sample:
        if sample_id not in self.samples:
            raise ContractError(f"sample {sample_id} is unknown; enter it with add_sample")
        return self.samples[sample_id]

    def _served(self) -> PolicyVersion:
        if self.served is None:
            raise ContractError("no version is published yet; call add_version after the first push")
        return self.served


def _fate(sample: Sample) -> str:
    return f"consumed by step {sample.step}" if sample.step is not None else f"dropped ({sample.dropped})"
