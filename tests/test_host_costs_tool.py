"""tools/host_costs measures what an operator costs the host, also where there is no GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TOOL = Path(__file__).resolve().parents[1] / "tools" / "host_costs"


def test_a_kept_call_takes_few_python_calls():
    """Deciding anew takes some 110 calls of Python for swiglu; whoever puts that back into every call sees it here."""
    command = [sys.executable, str(TOOL), "--device", "pretend", "--only", "swiglu", "--top", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        name.strip(): int(calls) for name, calls in re.findall(r"(?m)^(\w.*?) +[\d.]+ us +(\d+) calls$", done.stdout)
    }
    assert list(found) == ["gate_up_swiglu, 24 rows", "swiglu", "swiglu: forward and backward"]
    assert found["swiglu"] < 80
    assert len(re.findall(r"(?m)^ +[\d.]+ us +\d+ x ", done.stdout)) == 6
