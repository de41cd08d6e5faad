"""Install packages of this checkout, editable, into the running interpreter.

    python tools/develop.py rl-gemm rl-attn   # these, and all that they need
    python tools/develop.py                   # every one, without dependencies

A package that is not named is not installed: each stands alone.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def projects() -> dict[str, Path]:
    """Folder of each project by name: packages first, then integrations, each sorted."""
    found = [p.parent for room in ("packages", "integrations") for p in sorted(ROOT.glob(f"{room}/*/pyproject.toml"))]
    return {folder.name: folder for folder in found}


def needed(names: list[str]) -> list[str]:
    """``names`` and the projects of this checkout that they depend on, in the order of ``projects``."""
    every, wanted, open_ = projects(), set(), list(names)
    while open_:
        name = open_.pop()
        if name in wanted:
            continue
        wanted.add(name)
        about = tomllib.loads((every[name] / "pyproject.toml").read_text())["project"]
        open_ += [d for d in (re.split(r"[^\w-]", x, maxsplit=1)[0] for x in about["dependencies"]) if d in every]
    return [name for name in every if name in wanted]


def main() -> int:
    every = projects()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}")
    names = parser.parse_args().names
    if unknown := [n for n in names if n not in every]:
        parser.error(f"no such package: {', '.join(unknown)}; there are {', '.join(every)}")
    chosen = needed(names) if names else list(every)
    editable = [a for name in chosen for a in ("-e", str(every[name]))]
    return subprocess.call([sys.executable, "-m", "pip", "install", "-q", *([] if names else ["--no-deps"]), *editable])


if __name__ == "__main__":
    sys.exit(main())
