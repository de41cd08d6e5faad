"""tools/curves draws what arms of runs have written, and says what was compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "curves"


def arm(folder, wrong, steps=3):
    folder.mkdir(parents=True)
    lines = [
        {"step": n, "reward": 0.1 * n, "grad_norm": 1.0, "max_abs_diff": 0.01 * wrong, "k3": 1e-4 * wrong,
         "valid_count": 5, "mismatch_count": wrong, "seconds": {"rollout": 1.0, "train": 0.5}}
        for n in range(steps)
    ]  # fmt: skip
    (folder / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "rew')
    return folder


def run(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_curves_count_what_was_compared_and_draw_it(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "pictures" / "x.png"
    done = run(arm(tmp_path / "a" / "strict", 0), arm(tmp_path / "b" / "strict", 2), "--out", out)
    assert done.returncode == 0, done.stderr
    assert "a/strict: 3 steps, 15 log-probabilities compared, 0 differ" in done.stdout
    assert "b/strict: 3 steps, 15 log-probabilities compared, 6 differ" in done.stdout
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_bad_input_no_step_draws_nothing(tmp_path):
    done = run(tmp_path / "nowhere", "--out", tmp_path / "x.png")
    assert done.returncode == 1
    assert "holds no step" in done.stderr
    assert not (tmp_path / "x.png").exists()
