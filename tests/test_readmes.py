"""The Python of every README runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = {p.parent.name: p for room in ("packages", "integrations") for p in sorted(ROOT.glob(f"{room}/*/README.md"))}
NEEDS_A_MODEL = {"rl-vllm": READMES["rl-vllm"], "front page": ROOT / "README.md"}


def script_of(readme: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", readme.read_text(), re.S))


def run(script: str, folder: Path, seconds: float) -> None:
    (folder / "readme.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", sorted(set(READMES) - set(NEEDS_A_MODEL) - {"rl-parity"}))
def test_a_readme_runs_as_printed(name, tmp_path):
    script = script_of(READMES[name])
    assert script, f"{name} shows no Python"
    run(script, tmp_path, 120)


@pytest.mark.engine
def test_the_front_page_runs_with_a_checkpoint(tmp_path):
    models = pytest.importorskip("rl_parity.models")
    model = models.write_model("tiny-qwen3", tmp_path / "model")
    scripts = {name: script_of(path) for name, path in NEEDS_A_MODEL.items()}
    assert scripts["rl-vllm"] == scripts["front page"]
    run(scripts["front page"].replace("path/to/checkpoint", str(model)), tmp_path, 400)
