"""A restart gives the same bits, with an empty, a warm and a deleted kernel cache; and no choice is timed."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNEL_PACKAGES = ("rl-contract", "rl-gemm", "rl-norm", "rl-attn", "rl-logprob")


def start(cache: Path) -> dict:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name("restart_worker.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.field_report("R32")
def test_repeat_after_restart_with_deleted_and_warm_kernel_cache(tmp_path):
    cold = start(tmp_path / "cache")
    assert cold["compiled"] > 5
    warm = start(tmp_path / "cache")
    assert warm["compiled"] == 0
    assert warm["loaded"] > 5
    shutil.rmtree(tmp_path / "cache")
    again = start(tmp_path / "cache")
    assert again["compiled"] == cold["compiled"]
    for run in (cold, warm, again):
        assert run["digests"] == run["again"] == cold["digests"]
    assert len(set(cold["digests"].values())) == len(cold["digests"])


def timing_names(source: str) -> set[str]:
    """What a module could time or search with: clocks it imports or calls, and the names of known searches."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=found):
                names |= {alias.name.split(".")[0] for alias in found}
            case ast.ImportFrom(module=module, names=found):
                names |= {(module or "").split(".")[0], *(alias.name for alias in found)}
            case ast.Attribute(attr=name) | ast.Name(id=name):
                names.add(name)
    return names & {"time", "timeit", "perf_counter", "autotune", "Autotuner", "do_bench", "elapsed_time"}


@pytest.mark.field_report("R32")
def test_no_operator_reads_a_clock_or_searches():
    """Launch choices are files or constants: a package that cannot time anything cannot choose by time."""
    files = [f for name in KERNEL_PACKAGES for f in (ROOT / "packages" / name / "src").rglob("*.py")]
    assert len(files) > 30
    assert {str(f): found for f in files if (found := timing_names(f.read_text()))} == {}
    assert timing_names("import triton\n@triton.autotune(configs=[], key=[])\ndef f(): pass") == {"autotune"}
    assert timing_names("from time import perf_counter\nperf_counter()") == {"time", "perf_counter"}
