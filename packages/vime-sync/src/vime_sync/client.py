"""What a rollout engine must offer, so that a push of weights can be verified before it is published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from vime_sync.digest import WEIGHT_DIGEST

ShardDigests = dict[tuple[int, str], str]
"""``{(tensor-parallel rank, Hugging Face name): digest of that rank's bytes}``, see ``layout.shard_digests``."""


@runtime_checkable
class EngineClient(Protocol):
    """One rollout engine (all its tensor-parallel workers).

    The publisher calls ``begin``, ``pause``, ``clear_caches``, ``transfer``, ``shard_digests``, ``finish``,
    ``resume`` in this order. Every method blocks until the engine has done it and raises on failure; none may report
    success early.
    """

    @property
    def name(self) -> str:
        """What error messages call this engine."""
        ...

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        ...

    def begin(self, session: str) -> None:
        """Claim the engine for ``session``; it keeps serving. Raise, changing nothing, if another session holds it."""
        ...

    def cancel(self, session: str) -> None:
        """Give up a claim under which nothing was paused; do nothing when ``session`` does not hold the engine."""
        ...

    def pause(self) -> None:
        """Stop scheduling and wait until the device is idle. Requests in flight are aborted or will be recomputed."""
        ...

    def clear_caches(self) -> bool:
        """Drop prefix, connector and encoder caches, preempting running requests. True only when they are empty now.

        An HTTP status is no answer: some engines say 200 while blocks are still held.
        """
        ...

    def transfer(self, path: Path, version: str) -> None:
        """Load every tensor of the directory ``path`` (see ``write_weights``) into the final storage of every worker.

        Post-load processing is finished on return. The reported version stays what it was. A tensor that is missing,
        unknown or mis-shaped raises; it is never skipped with a warning.
        """
        ...

    def shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> Mapping[tuple[int, str], str]:
        """Digest what each worker holds now, read from its live parameters (``layout.from_vllm`` names the slices).

        Args:
            algorithm: ``sha256-tree``, or ``sha256``, which a push asks for whose manifest names it.
        """
        ...

    def finish(self, version: str) -> None:
        """Publish: label outputs ``version`` from the next token on; close the session, lift an earlier poison."""
        ...

    def weight_version(self) -> str:
        """The published version string; the engine's own default when nothing was published since it started."""
        ...

    def resume(self) -> None:
        """Serve again. Must raise on a poisoned engine or while an update is open."""
        ...

    def poison(self, reason: str) -> None:
        """Refuse to generate and to resume until a later full update has finished. Must work in any state.

        It also drops an open session, so that the full update that heals the engine can begin.
        """
        ...
