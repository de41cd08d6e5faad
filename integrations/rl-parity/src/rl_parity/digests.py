"""sha256 as people read it: cut, and never cut to where two look alike."""

from typing import Any

_DIGITS = 12


def apart(a: Any, b: Any) -> tuple[str, str]:
    """Two digests that differ, each cut to 12 digits or to as many more as tell them apart; what is none in full."""
    x, y = str(a), str(b)
    if x == y:
        return repr(a), repr(b)
    for digits in range(_DIGITS, max(len(x), len(y))):
        if x[:digits] != y[:digits]:
            return x[:digits], y[:digits]
    return x, y
