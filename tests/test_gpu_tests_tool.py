"""tools/gpu_tests says what passed, failed, was skipped and never ended, also of a run that is cut off."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "gpu_tests"
MIXED = """
import pytest, time
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert 1 == 2, "the reason"
@pytest.mark.skip(reason="no such card")
def test_left_out(): pass
def test_hangs(): time.sleep(600)
def test_behind_it(): pass
"""
GOOD = "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\ndef test_not_for_a_gpu(): assert False\n"


def run(folder, *options):
    command = [sys.executable, str(TOOL), str(folder), "--out", str(folder / "out"), "--workers", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_run_that_is_cut_off_names_failures_and_what_did_not_end(tmp_path):
    (tmp_path / "test_mixed.py").write_text(MIXED)
    done = run(tmp_path, "--limit", "15")
    assert done.returncode == 1
    assert "1 passed    1 failed    1 skipped    2 not ended" in done.stdout
    assert "the reason" in done.stdout
    assert "no such card" in done.stdout
    assert "not ended" in done.stdout.split("test_hangs")[0].splitlines()[-1]


def test_only_marked_tests_run_and_nothing_passed_is_no_success(tmp_path):
    (tmp_path / "test_good.py").write_text(GOOD)
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "-k", "no_such_test").returncode == 1
    (tmp_path / "test_good.py").write_text("import no_such_module\n")
    broken = run(tmp_path)
    assert broken.returncode == 1
    assert "no_such_module" in broken.stdout
