"""tools/run_page lands what a clone can check, shows what was counted, and refuses what does not bear itself out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "run_page"


@pytest.fixture(scope="module")
def made():
    """Writers of made-up runs, of rl-parity's own tests."""
    sys.path.insert(0, str(ROOT / "integrations" / "rl-parity" / "tests"))
    try:
        import parity_rundir
    finally:
        sys.path.pop(0)

    def write(root, **options):
        run = parity_rundir.write_run(root, **options)
        for arm in run.arms():
            parity_rundir.keep_digests(run, arm)
        return run

    return write


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_landed_run_is_read_again_and_gives_the_same_page(made, tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    from rl_parity.report import render
    from rl_parity.rundir import RunDirectory

    run, out = made(tmp_path / "run", steps=4), tmp_path / "results" / "r"
    command = [sys.executable, str(TOOL), str(run.root), "--out", str(out), "--commit", "c0ffee1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "strict: 4 steps, 192 log-probabilities compared, 0 differ" in done.stdout
    assert {"manifest.json", "summary.json", "landed.json"} < files(out)
    samples = {name for name in files(out) if name.endswith(".npz")}
    assert samples == {f"{arm}/samples/step-0000{n}.npz" for arm in ("native", "strict") for n in (0, 3)}
    assert not [name for name in files(out) if "log" in name or name.endswith(".html")]
    page = out.with_name("r.md").read_text()
    assert "| of these differ | 0 | 96 |" in page
    assert "| log-probabilities compared, rollout with training | 192 | 192 |" in page
    assert "Commit c0ffee" in page
    assert "| strict | run-test |" in page
    assert page.count("| 0, 3 |") == 2
    assert out.with_name("r.png").read_bytes()[:4] == b"\x89PNG"
    assert "Samples not here: 2 step(s) of the native arm (1-2)" in render(RunDirectory(out))
    before = page, files(out)
    again = run_tool("run_page", out, "--out", out)
    assert again.returncode == 0, again.stderr
    assert (out.with_name("r.md").read_text(), files(out)) == before
    assert run_tool("run_page", out, "--out", out, "--commit", "0ddba11").returncode == 1


def test_a_landed_manifest_names_no_path(made, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from run_page_parts.land import without_paths

    config = {"out": "/tmp/x/run", "seed": 1}
    command = ["/usr/bin/rl-parity run --seed 1 --out /tmp/x/run --model '/data/a b'"]
    found = without_paths({"config": config, "command": command, "sittings": [{"command": command}]}, "run200")
    assert found["config"] == {"out": "run200", "seed": 1}
    assert found["command"] == ["rl-parity run --seed 1 --out run200 --model '/data/a b'"]
    assert found["sittings"][0]["command"] == found["command"]


def test_arms_of_two_layouts_are_named_by_them(made, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from run_page_parts.arms import arms_of, settings_that_differ

    from rl_contract import ContractError
    from rl_parity.rundir import write_json

    one, two = made(tmp_path / "one", arms=("strict",)), made(tmp_path / "two", arms=("native",))
    manifest = two.manifest()
    manifest["config"] |= {"train": {"tp": 1, "cp": 1}, "rollout": {"tp": 1, "engines": 1}, "lr": 9.0}
    write_json(two.root / "manifest.json", manifest)
    totals = [{"arms": {arm: {} for arm in run.arms()}, "not_here": {}} for run in (one, two)]
    arms = arms_of(list(zip((one, two), totals)))
    assert [arm.name for arm in arms] == ["strict TP2/CP2 -> TP2 x 2 engines", "native TP1/CP1 -> TP1"]
    assert [line.split(":")[0] for line in settings_that_differ(arms)] == ["lr"]
    with pytest.raises(ContractError, match="holds a second strict"):
        arms_of([(one, totals[0]), (one, totals[0])])


def test_bad_input_a_run_that_does_not_bear_itself_out_lands_nothing(made, tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    run, out = made(tmp_path / "run"), tmp_path / "results" / "r"
    path = run.root / "strict" / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[2]["loss"] += 1.0
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    done = run_tool("run_page", run.root, "--out", out, "--commit", "c0ffee1")
    assert done.returncode == 1
    assert "another record of step 2" in done.stderr
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_bad_input_a_run_is_not_landed_on_itself_nor_without_a_commit(made, tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    run = made(tmp_path / "run", steps=2)
    done = run_tool("run_page", run.root, "--out", run.root, "--commit", "c0ffee1")
    assert done.returncode == 1
    assert "itself, which was not landed" in done.stderr
    assert not (run.root / "landed.json").exists()
    done = run_tool("run_page", run.root, "--out", tmp_path / "page", "--commit", "HEAD")
    assert done.returncode == 2
    assert "'HEAD' is no commit" in done.stderr


def test_bad_input_what_lies_there_is_not_written_over(made, tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    run, out = made(tmp_path / "run"), tmp_path / "r"
    assert "unknown: give the one of all runs with --commit" in run_tool("run_page", run.root, "--out", out).stderr
    out.mkdir()
    (out / "mine").write_text("kept")
    done = run_tool("run_page", run.root, "--out", out, "--commit", "c0ffee1")
    assert done.returncode == 1
    assert "was not written by this tool" in done.stderr
    assert files(tmp_path / "r") == {"mine"}
    assert not (tmp_path / "r.md").exists()


def test_the_page_says_which_sitting_left_no_evidence_and_counts_the_launches_of_all(made, tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    run, out = made(tmp_path / "run", steps=4), tmp_path / "r"
    run.write_manifest({**run.manifest(), "sittings": [{}, {"from_step": {"native": 2, "strict": 2}}]})
    for arm in ("native", "strict"):
        path = run.root / arm / "evidence.json"
        entry = json.loads(path.read_text())
        missing = ["all of sitting 1, which ended before they were asked"]
        first = {"train": {}, "rollout": {}, "missing": missing} if arm == "native" else entry
        earlier = {"earlier": [{**first, "sitting": 0}]}
        path.write_text(json.dumps({**entry, "sitting": 1, **earlier}))
    assert run_tool("run_page", run.root, "--out", out, "--commit", "c0ffee1").returncode == 0
    page = out.with_name("r.md").read_text()
    assert "\nUnproven: what 6 of the native arm's 6 workers and engines launched in sitting 1" in page
    # 40 of each of 4 ranks and 4 workers, twice
    assert "| gemm.row | `rl_gemm.cpu.tree` | 320 | 320 |" in page
    path = run.root / "strict" / "evidence.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "earlier": []}))
    assert run_tool("run_page", run.root, "--out", out, "--commit", "c0ffee1").returncode == 0
    assert "\nUnproven: what the strict arm launched in sitting 1 (steps 0-1)" in out.with_name("r.md").read_text()
