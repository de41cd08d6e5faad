"""Which sample belongs to which step, and which version of the weights produced each of its tokens.

An append-only file of JSON lines, one event a line, on the disk before the call (or ``batch``) returns. An event whose
line has no newline was never committed: resuming drops it. Reading a ledger replays every check that writing it made.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rl_contract import ContractError
from vime_sync.files import path_of, reading
from vime_sync.spans import check_spans, token_ids_of, tokens_digest, whole_number
from vime_sync.timeline import Event, Sample, StepReport, Timeline
from vime_sync.version import PolicyVersion, check_version


class StepLedger(Timeline):
    """The timeline of one run.

    Args:
        path: JSONL file, resumed when it exists, made with its folders when it does not; None keeps the ledger in
            memory. One ledger holds a file at a time: until ``close`` or the end of the process, every other one on it
            is refused.
        run_id: the run that all versions must belong to.
        max_staleness: largest allowed (step of the version served - step of the version of the oldest token).

    Raises:
        ContractError: a run id that no version can have; the file is held by another ledger or belongs to another run,
            or a committed line breaks a rule.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, run_id: str, max_staleness: int = 0) -> None:
        super().__init__(run_id, max_staleness)
        self._file: BinaryIO | None = None
        self._owner: int | None = None
        self._closed = False
        self._batched = False
        if path is not None:
            self._open(path_of("StepLedger", path))

    def add_version(self, version: PolicyVersion) -> None:
        """Say that engines now serve ``version``: step 0 first, step s+1 once step s has consumed its samples.

        Repeating the version being served (after a heal) changes nothing.

        Raises:
            ContractError: no PolicyVersion, another run, a step out of order or repeated with other bytes, or a
                shortened digest.
        """
        check_version("StepLedger.add_version", version)
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
        if isinstance(sample_ids, (str, bytes)) or not isinstance(sample_ids, Iterable):
            raise ContractError(f"step {step}: sample ids are {sample_ids!r:.80}; supported: a sequence of str")
        if token_ids is not None and not isinstance(token_ids, Mapping):
            raise ContractError(
                f"step {step}: token_ids is {token_ids!r:.80}; supported: a mapping of sample id to ids"
            )
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

    def record(self, step: int, digests: Mapping[str, str], *, consumed: bool = True) -> None:
        """Keep the sha256, by name, of what was written down about the step that consumed last.

        It reaches the disk with the next event that waits for it.

        Args:
            consumed: False for the step after it, which was sampled and will consume nothing, as one that failed its
                checks: no version and no step follows it.

        Raises:
            ContractError: another step, one recorded before, or what is no sha256.
        """
        given = dict(digests) if isinstance(digests, Mapping) else digests
        event: Event = {"event": "record", "step": step, "digests": given}
        self._commit(event if consumed else {**event, "consumed": False}, wait=False)

    def drop(self, sample_id: str, reason: str) -> None:
        """Say that a sample will never be consumed (aborted, too stale)."""
        self._commit({"event": "drop", "id": sample_id, "reason": reason})

    def resume(self, step: int, digest: str) -> None:
        """Say that another sitting goes on at ``step`` with weights of this digest, which its version must have.

        Raises:
            ContractError: ``step`` is not the next one, or the digest is shortened.
        """
        self._commit({"event": "resume", "step": int(step) if whole_number(step) else step, "digest": digest})

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

    def _commit(self, event: Event, *, wait: bool = True) -> None:
        # check first, write second, change the state last: neither a refused nor a half-written event is ever seen
        if self._closed:
            raise ContractError("the ledger is closed; open it again on its path to enter more")
        change = self._checked(event)
        if self._file is not None:
            at = self._file.tell()
            try:
                self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
                self._file.flush()
                if wait and not self._batched:
                    os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(at)
                self._file.seek(at)
                raise
        self._apply(change)

    def _open(self, path: Path) -> None:
        with reading(f"ledger {path} cannot be opened", "give the path of a file"):
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
                with reading(f"{path} line {number}", "restore the file, or give another"):
                    event = json.loads(line)
                    if (event["event"] == "run") != (number == 1):
                        raise ContractError("the run's line must be the first, and only the first")
                    self._apply(self._checked(event))
            except ContractError:
                self.close()
                raise
        if committed < len(data):
            self._file.truncate(committed)
        self._file.seek(0, os.SEEK_END)
        if committed == 0:
            self._commit({"event": "run", "run": self.run_id, "max_staleness": self.max_staleness})
        if fresh:
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
