"""Install every package of this checkout, editable and without dependencies, into the running interpreter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def projects() -> list[Path]:
    """Packages first, then integrations, each sorted by name."""
    return [p.parent for room in ("packages", "integrations") for p in sorted(ROOT.glob(f"{room}/*/pyproject.toml"))]


if __name__ == "__main__":
    editable = [a for p in projects() for a in ("-e", str(p))]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *editable]
    sys.exit(subprocess.call(command))
