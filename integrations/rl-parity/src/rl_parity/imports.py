"""What breaks as it is imported, asked in a process of its own: here it would leave half a package behind."""

import os
import subprocess
import sys

_LIMIT_S = 120


def failure(statement: str) -> str | None:
    """The last line of what ``statement``, an import, says as it fails; None where it does not."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", statement]
    try:
        done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{statement!r} takes more than {_LIMIT_S} s; see python -X importtime for what does"
    if not done.returncode:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"{statement!r} ends its process with status {done.returncode}"
