"""tools/develop.py installs what is asked for and what that needs, and nothing else."""

import importlib.util
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools" / "develop.py"


def load():
    spec = importlib.util.spec_from_file_location("develop", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_package_brings_the_packages_that_it_needs():
    develop = load()
    assert develop.needed(["rl-logprob"]) == ["rl-contract", "rl-gemm", "rl-logprob"]
    assert develop.needed(["vime-sync", "rl-norm"]) == ["rl-contract", "rl-norm", "vime-sync"]
    assert develop.needed(["rl-parity"]) == list(develop.projects())


def test_named_packages_come_with_their_dependencies(monkeypatch):
    develop, calls = load(), []
    monkeypatch.setattr(develop.subprocess, "call", lambda command: calls.append(command[5:]) or 0)
    for names in (["rl-gemm"], []):
        monkeypatch.setattr(sys, "argv", ["develop.py", *names])
        assert develop.main() == 0
    assert [Path(x).name for x in calls[0]] == ["-e", "rl-contract", "-e", "rl-gemm"]
    assert calls[1][0] == "--no-deps"
    assert len(calls[1]) == 1 + 2 * len(develop.projects())


def test_bad_input_unknown_package_installs_nothing():
    done = subprocess.run([sys.executable, str(TOOL), "rl-gem"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such package: rl-gem; there are rl-attn" in done.stderr
