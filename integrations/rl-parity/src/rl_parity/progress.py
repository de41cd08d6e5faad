"""What a run shows while it runs: a bar with live counts on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO


class Progress:
    """One per arm: ``phase`` says what happens, ``step`` what came out; ``done`` are records of earlier sittings."""

    def __init__(
        self, arm: str, steps: int, stream: TextIO | None = None, done: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._arm, self._steps, self._stream = arm, steps, stream or sys.stderr
        self._valid = sum(record["valid_count"] for record in done)
        self._mismatches = sum(record["mismatch_count"] for record in done)
        self._started = time.monotonic()
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps, initial=len(done), desc=arm, unit="step", file=self._stream, dynamic_ncols=True
            )

    def phase(self, name: str) -> None:
        if self._bar is not None:
            self._bar.set_description_str(f"{self._arm} {name}")
        elif name.startswith("start"):
            self._line(name)

    def step(self, record: dict[str, Any]) -> None:
        self._valid += record["valid_count"]
        self._mismatches += record["mismatch_count"]
        counts = f"tokens {self._valid:,}  mismatches {self._mismatches:,}  reward {record['reward']:.3f}"
        if self._bar is not None:
            self._bar.set_postfix_str(counts)
            self._bar.update()
        else:
            worst = record["max_abs_diff"]
            diff = "not compared" if worst is None else f"max |diff| {worst:.3g}"
            loss = "" if record["loss"] is None else f"  loss {record['loss']:+.4f}"
            self._line(f"step {record['step'] + 1}/{self._steps}  {counts}  {diff}{loss}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, text: str) -> None:
        print(f"[{self._arm} {time.monotonic() - self._started:6.1f} s] {text}", file=self._stream, flush=True)
