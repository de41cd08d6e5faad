"""Imports rl_megatron beside each broken installation of TransformerEngine, in a process that is a copy of this one.

python broken_te_worker.py FOLDER OUT.json: FOLDER holds one folder a case, which goes in front of the path.
"""

import json
import os
import sys
from pathlib import Path

import rl_megatron  # noqa: F401 - which imports torch, once for all cases


def main(folder: Path, out: Path) -> None:
    found = {}
    for case in sorted(folder.iterdir()):
        said = out.with_suffix(f".{case.name}")
        child = os.fork()
        if child == 0:
            sys.path.insert(0, str(case))
            # as "from rl_megatron import TrainerRank", which loses the error of an attribute that is not there
            try:
                from rl_megatron import TrainerRank  # noqa: F401
            except BaseException as error:
                said.write_text(json.dumps([type(error).__name__, str(error)]))
            os._exit(0)
        os.waitpid(child, 0)
        found[case.name] = json.loads(said.read_text()) if said.exists() else None
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
