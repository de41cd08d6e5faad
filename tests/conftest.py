import subprocess
import sys
import types
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"

# importlib mode puts no test folder on the path; the decoder is shared by the tests of this one
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def load_tool(monkeypatch):
    """Name -> the tool as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(name):
        found, path = types.ModuleType(f"{name}_tool"), TOOLS / name
        found.__file__ = str(path)
        exec(compile(path.read_text(), path, "exec"), found.__dict__)
        return found

    return load


@pytest.fixture
def run_tool(load_tool, monkeypatch, capsys):
    """Name and arguments -> status and output of the tool's ``main``, without a process that imports torch again."""

    def run(name, *arguments):
        main = load_tool(name).main
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        # a text is what Python prints last, with status 1
        last = f"{status}\n" if isinstance(status, str) else ""
        code = 1 if last else status or 0
        return subprocess.CompletedProcess([name, *arguments], code, said.out, said.err + last)

    return run
