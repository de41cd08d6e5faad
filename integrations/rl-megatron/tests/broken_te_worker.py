"""Imports rl_megatron beside each broken installation of TransformerEngine, in a process that is a copy of this one.

python broken_te_worker.py FOLDER OUT.json: FOLDER holds one folder a case, which goes in front of the path. Beside the
first, modules are imported by their own names too, each in a process that has imported none before.
"""

import json
import os
import sys
from pathlib import Path

NAME = "from rl_megatron import TrainerRank"
# one that imports Megatron itself, ones that import another that does, and one that needs none
MODULES = ("native", "topology", "step_inputs", "trainer", "te")


def said(folder: Path, statement: str, out: Path) -> list[str] | None:
    """Class and words of the statement's error; None where it raised none."""
    child = os.fork()
    if child == 0:
        sys.path.insert(0, str(folder))
        # as it is written, since an attribute that is not there is another error then
        try:
            exec(statement, {})
            out.write_text("null")
        except BaseException as error:
            out.write_text(json.dumps([type(error).__name__, str(error)]))
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(out.read_text())


def main(folder: Path, out: Path) -> None:
    cases = sorted(folder.iterdir())
    found = {case.name: said(case, NAME, out) for case in cases}
    found |= {statement: said(cases[0], statement, out) for statement in (f"import rl_megatron.{x}" for x in MODULES)}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
