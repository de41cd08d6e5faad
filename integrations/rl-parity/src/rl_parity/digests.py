"""sha256 as people read it: cut, and never cut to where two look alike."""

from typing import Any


def apart(a: Any, b: Any, digits: int = 12) -> tuple[str, str]:
    """Two digests that differ, each cut to so many digits or to as many more as tell them apart."""
    x, y = str(a), str(b)
    if x == y:
        return repr(a), repr(b)
    for end in range(digits, max(len(x), len(y))):
        if x[:end] != y[:end]:
            return x[:end], y[:end]
    return x, y
