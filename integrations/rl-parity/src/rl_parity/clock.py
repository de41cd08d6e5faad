"""Where the seconds of a step go, by phase."""

import time


class Clock:
    """``seconds`` of each phase that was lapped; laps of one name add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """What passed since the last lap was spent in phase ``name``."""
        now = time.monotonic()
        spent = round(self.seconds.get(name, 0.0) + now - self._last, 4)
        # phases that this run does not have stay out of its records
        if name not in ("wake", "sleep") or spent >= 0.001:
            self.seconds[name] = spent
        self._last = now
