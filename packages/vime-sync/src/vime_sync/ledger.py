"""Which sample belongs to which step, and which version of the weights produced each of its tokens.

An append-only file of JSON lines, one event a line, on the disk before the call (or ``batch``) returns. An event whose
line has no newline was never committed: resuming drops it. Reading a ledger replays every check that writing it made.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from rl_contract import ContractError
from vime_sync.spans import Span, check_spans, token_ids_of, tokens_digest, whole_number
from vime_sync.version import PolicyVersion

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


class StepLedger:
    """The timeline of one run.

    Args:
        path: JSONL file, resumed when it exists; None keeps the ledger in memory. One ledger holds a file at a time:
            until ``close`` or the end of the process, every other one on it is refused.
        run_id: the run that all versions must belong to.
        max_staleness: largest allowed (step of the version served - step of the version of the oldest token).

    Raises:
        ContractError: the file is held by another ledger or belongs to another run, or a committed line breaks a rule.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, run_id: str, max_staleness: int = 0) -> None:
        if not whole_number(max_staleness) or max_staleness < 0:
            raise ContractError(f"max_staleness is {max_staleness!r}; give 0 (on-policy) or more")
        self.run_id, self.max_staleness = run_id, max_staleness
        self.versions: dict[str, PolicyVersion] = {}
        self.samples: dict[str, Sample] = {}
        self.steps: list[StepReport] = []
        self.served: PolicyVersion | None = None
        # (step, digest) of every sitting but the first: where it went on, and from which weights
        self.sittings: list[tuple[int, str]] = []
        self._file: BinaryIO | None = None
        self._owner: int | None = None
        self._closed = False
        self._batched = False
        if path is not None:
            self._open(Path(path))

    def add_version(self, version: PolicyVersion) -> None:
        """Say that engines now serve ``version``: step 0 first, step s+1 once step s has consumed its samples.

        Repeating the version being served (after a heal) changes nothing.

        Raises:
            ContractError: another run, a step out of order or repeated with other bytes, or a shortened digest.
        """
        if self.served is not None and version == self.served:
            return
        self._commit({"event": "version", "run": version.run_id, "step": version.step, "digest": version.digest})

    def add_sample(
        self, sample_id: str, *, generated: int, spans: Iterable[Any], token_ids: Sequence[int] | None = None
    ) -> Sample:
        """Enter a finished sample; ``token_ids`` (prompt and answer) let ``consume`` check the trainer's.

        Args:
            generated: tokens the engine made, the last of ``token_ids``.
            token_ids: integers of 0 or more.

        Raises:
            ContractError: the id was entered before, the spans do not cover the tokens, one names a version that was
                never published, a token id is no integer of 0 or more, or there are fewer ids than generated tokens.
        """
        if not isinstance(sample_id, str):
            raise ContractError(f"sample id {sample_id!r} is no string; give str, unique in the run")
        found = check_spans(spans, generated)
        tokens = None if token_ids is None else token_ids_of(f"sample {sample_id}", token_ids)
        if tokens is not None and len(tokens) < generated:
            raise ContractError(
                f"sample {sample_id} has {len(tokens)} token ids for {generated} generated tokens; give the ids of the "
                "prompt and of the whole answer"
            )
        event: Event = {"event": "sample", "id": sample_id, "generated": int(generated)}
        event["spans"] = [[span.version, span.start, span.end] for span in found]
        event["tokens"] = None if tokens is None else tokens_digest(tokens)
        self._commit(event)
        return self.samples[sample_id]

    def staleness(self, sample_id: str) -> int:
        """Steps between the version being served and the version of the sample's oldest token."""
        sample = self._sample(sample_id)
        served = self._served()
        return max((served.step - self.versions[span.version].step for span in sample.spans), default=0)

    def mismatched_tokens(self, sample_id: str) -> int:
        """Tokens that another version than the one being served produced."""
        served = str(self._served())
        return sum(span.end - span.start for span in self._sample(sample_id).spans if span.version != served)

    def consume(
        self, step: int, sample_ids: Iterable[str], *, token_ids: Mapping[str, Sequence[int]] | None = None
    ) -> StepReport:
        """Give samples to training step ``step``, which starts from the version being served.

        All or nothing; on an error the ledger is as before.

        Args:
            token_ids: what the trainer scored, by sample id: of every sample that was entered with token ids, and of no
                other.

        Raises:
            ContractError: not the next step, a version of another step is served, no sample; and for each sample:
                unknown, given twice, consumed or dropped before, staler than the bound, entered with token ids
                that are missing or differ here, or entered without any and given some.
        """
        if not whole_number(step):
            raise ContractError(f"step is {step!r}; give the number of the training step, an integer")
        ids = [str(i) for i in sample_ids]
        scored = {str(i): token_ids_of(f"step {step}, sample {i}", given) for i, given in (token_ids or {}).items()}
        if others := sorted(scored.keys() - set(ids)):
            raise ContractError(
                f"step {step}: token ids of {', '.join(others)}, which it does not consume; leave them out"
            )
        event: Event = {"event": "step", "step": int(step), "ids": ids}
        event["tokens"] = {i: tokens_digest(given) for i, given in scored.items()}
        self._commit(event)
        return self.steps[-1]

    def drop(self, sample_id: str, reason: str) -> None:
        """Say that a sample will never be consumed (aborted, too stale)."""
        self._commit({"event": "drop", "id": sample_id, "reason": reason})

    def resume(self, step: int, digest: str) -> None:
        """Say that another sitting goes on at ``step`` with weights of this digest, which its version must have.

        Raises:
            ContractError: ``step`` is not the next one, or the digest is shortened.
        """
        self._commit({"event": "resume", "step": step, "digest": digest})

    def check_run(self, steps: int | None = None) -> dict[str, int]:
        """Prove that the run is continuous, and count.

        Args:
            steps: how many steps the run must have.

        Returns:
            steps, samples, tokens, weight_version_mismatch_count, staleness_max, dropped, and pending: entered, not yet
            consumed.

        Raises:
            ContractError: listing every step that is missing, has no version with a known digest, or no sample.
        """
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

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Events entered inside reach the disk together, when the block ends: one wait instead of one for each.

        Each is checked and takes effect at once; if the machine fails inside, the last ones may be missing in the file.
        """
        self._batched = True
        try:
            yield
        finally:
            self._batched = False
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file; what was entered stays readable, nothing more can be entered."""
        self._closed = True
        if self._file is not None:
            # a forked child shares the lock: it must neither keep it past this call nor drop it for its parent
            if self._owner == os.getpid():
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None

    def __enter__(self) -> "StepLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self, event: Event) -> None:
        # check first, write second, change the state last: neither a refused nor a half-written event is ever seen
        if self._closed:
            raise ContractError("the ledger is closed; open it again on its path to enter more")
        change = self._checked(event)
        if self._file is not None:
            at = self._file.tell()
            try:
                self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
                self._file.flush()
                if not self._batched:
                    os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(at)
                self._file.seek(at)
                raise
        self._apply(change)

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

    def _open(self, path: Path) -> None:
        fresh = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            # the kernel lets go of it when the file is closed, also by the end of the process
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._owner = os.getpid()
        except OSError as error:
            self.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise ContractError(
                f"{path} is held by another open ledger; one writer at a time is supported: close that one first"
            ) from error
        self._file.seek(0)
        data = self._file.read()
        committed = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:committed].splitlines(), 1):
            try:
                event = json.loads(line)
                if (event["event"] == "run") != (number == 1):
                    raise ContractError("the run's line must be the first, and only the first")
                self._apply(self._checked(event))
            except (ValueError, KeyError, TypeError) as error:
                self.close()
                raise ContractError(f"{path} line {number}: {error}") from error
        if committed < len(data):
            self._file.truncate(committed)
        self._file.seek(0, os.SEEK_END)
        if committed == 0:
            self._commit({"event": "run", "run": self.run_id, "max_staleness": self.max_staleness})
        if fresh:
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)


def _fate(sample: Sample) -> str:
    return f"consumed by step {sample.step}" if sample.step is not None else f"dropped ({sample.dropped})"
