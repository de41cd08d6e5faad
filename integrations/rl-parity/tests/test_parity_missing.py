"""Evidence that is gone or damaged ends with status 2 and its name, in compare, report and resume; nothing starts."""

import json
import shutil

import numpy as np
import parity_workers
import pytest
from parity_rundir import write_run

from rl_parity import cli, preflight
from rl_parity.report import render
from rl_parity.rundir import StepSamples

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

SMALL = ["--batch", "2", "--group", "2", "--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture
def started(monkeypatch):
    names = []

    class Launcher(parity_workers.InlineLauncher):
        def start(self, name, *args, **kwargs):
            names.append(name)
            return super().start(name, *args, **kwargs)

    monkeypatch.setattr("rl_parity.fleet.make_launcher", lambda kind, logs: Launcher())
    memory = preflight.psutil.virtual_memory()
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))
    parity_workers.FAULTS.clear()
    return names


@pytest.fixture
def out(started, tmp_path):
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--steps", "2", "--save-every", "1", *SMALL]) == 0
    started.clear()
    return out


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def foreign(path):
    run_id = json.loads(path.read_text().splitlines()[0])["run"]
    path.write_text(path.read_text().replace(run_id, "run-foreign"))


def other_token(path):
    s = StepSamples.load(path)
    s.tokens[0] += 1
    s.save(path)


def other_logprob(path):
    s = StepSamples.load(path)
    s.rollout[1] = np.nextafter(s.rollout[1], np.float32(0))
    s.save(path)


NPZ, LEDGER, MODEL = "strict/samples/step-00000.npz", "strict/ledger.jsonl", "model/model.safetensors"
# what, where, how, and which of the three commands must notice
CASES = {
    "ledger missing": (LEDGER, lambda p: p.unlink(), "compare report resume"),
    "ledger empty": (LEDGER, lambda p: p.write_text(""), "compare report resume"),
    "ledger of another run": (LEDGER, foreign, "compare report resume"),
    "ledger not UTF-8": (LEDGER, lambda p: p.write_bytes(b"\xff" + p.read_bytes()), "compare report resume"),
    "ledger short": (
        LEDGER,
        lambda p: p.write_text("".join(p.read_text().splitlines(True)[:3])),
        "compare report resume",
    ),
    "evidence missing": ("strict/evidence.json", lambda p: p.unlink(), "compare report resume"),
    "evidence a list": ("strict/evidence.json", lambda p: p.write_text("[]"), "compare report resume"),
    "sync missing": ("strict/sync.json", lambda p: p.unlink(), "compare report resume"),
    "sync not UTF-8": ("strict/sync.json", lambda p: p.write_bytes(b"\xff"), "compare report resume"),
    "sync an object": ("strict/sync.json", lambda p: p.write_text("{}"), "compare report resume"),
    "steps missing": ("strict/steps.jsonl", lambda p: p.unlink(), "compare report resume"),
    "samples missing": (NPZ, lambda p: p.unlink(), "compare report resume"),
    "samples damaged": (NPZ, lambda p: p.write_bytes(p.read_bytes()[:-30]), "compare report resume"),
    "samples of another token": (NPZ, other_token, "report resume"),
    "samples of another bit": (NPZ, other_logprob, "report resume"),
    "summary missing": ("summary.json", lambda p: p.unlink(), "compare report"),
    "weights damaged": (MODEL, flip, "compare report resume"),
    "weights missing": (MODEL, lambda p: p.unlink(), "compare report resume"),
    "weights torn": (MODEL, lambda p: p.write_bytes(p.read_bytes()[:-30]), "compare report resume"),
    "config of nothing": ("model/config.json", lambda p: p.write_text("{}"), "compare report resume"),
    "config not UTF-8": ("model/config.json", lambda p: p.write_bytes(b"\xff"), "compare report resume"),
    "config missing": ("model/config.json", lambda p: p.unlink(), "compare report resume"),
    "tokenizer config missing": ("model/tokenizer_config.json", lambda p: p.unlink(), "compare report resume"),
    "tokenizer config empty": ("model/tokenizer_config.json", lambda p: p.write_text(""), "compare report resume"),
    "tokenizer config garbled": (
        "model/tokenizer_config.json",
        lambda p: p.write_bytes(b"\xff{"),
        "compare report resume",
    ),
    "tokenizer config of nothing": (
        "model/tokenizer_config.json",
        lambda p: p.write_text("{}"),
        "compare report resume",
    ),
    "tokenizer of nothing": ("model/tokenizer.json", lambda p: p.write_text("{}"), "compare report resume"),
    "a file more": ("model/generation_config.json", lambda p: p.write_text("{}"), "compare report resume"),
    "tokenizer missing": ("model/tokenizer.json", lambda p: p.unlink(), "compare report resume"),
    "state damaged": ("strict/state/step-00002/rank-000.safetensors", flip, "resume"),
    "state missing": ("strict/state/step-00002/rank-000.safetensors", lambda p: p.unlink(), "resume"),
    "state of nothing": ("strict/state/step-00002/state.json", lambda p: p.write_bytes(b"\xff"), "resume"),
}
COMMANDS = [(case, command) for case in CASES for command in CASES[case][2].split()]


@pytest.mark.parametrize(("case", "command"), COMMANDS)
def test_a_missing_or_damaged_file_is_named_and_nothing_starts_or_changes(
    case, command, out, started, tmp_path, capsys
):
    name, damage, _ = CASES[case]
    shutil.copytree(out, tmp_path / "copy")
    damage(out / name)
    (out / "report.html").unlink()
    before = contents(out)
    arguments = {
        "compare": ["compare", str(tmp_path / "copy"), str(out)],
        "report": ["report", str(out)],
        "resume": ["run", "--resume", str(out), "--steps", "3"],
    }[command]
    assert cli.main(arguments) == 2
    assert str(out / name) in capsys.readouterr().err.replace("has no ", f"{out}/")
    assert started == []
    assert contents(out) == before


def test_an_undamaged_run_passes_all_three(out, tmp_path):
    shutil.copytree(out, tmp_path / "copy")
    assert cli.main(["compare", str(tmp_path / "copy"), str(out)]) == 0
    assert cli.main(["report", str(out)]) == 0
    assert cli.main(["run", "--resume", str(out), "--steps", "3"]) == 0


def test_the_verdict_is_that_of_the_records_not_of_the_summary(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    for name in ("steps.jsonl", "evidence.json", "ledger.jsonl", "sync.json"):
        (run.root / "strict" / name).unlink()
    shutil.rmtree(run.root / "strict" / "samples")
    assert cli.main(["report", str(run.root)]) == 2
    assert not (run.root / "report.html").exists()
    run = write_run(tmp_path / "told", arms=("native",))
    summary = run.summary()
    summary["arms"]["native"]["mismatch_count"] = 0
    (run.root / "summary.json").write_text(json.dumps(summary))
    assert cli.main(["report", str(run.root)]) == 2
    assert "says mismatch_count 0 of the native arm, its steps and samples say 96" in capsys.readouterr().err


def test_a_killed_run_has_a_report_of_what_it_did(tmp_path):
    run = write_run(tmp_path / "run", status="running")
    for name in ("summary.json", "strict/evidence.json", "strict/sync.json"):
        (run.root / name).unlink()
    assert "valid tokens compared" in render(run)


@pytest.mark.parametrize("whole", [3, 0])
def test_a_killed_run_whose_last_record_is_torn_has_a_report_of_those_before(tmp_path, whole):
    run = write_run(tmp_path / "run", arms=("strict",), steps=whole + 1, differs=(), status="running")
    path = run.root / "strict" / "steps.jsonl"
    path.write_text(path.read_text()[:-40])
    (run.root / "summary.json").unlink()
    page = render(run)
    assert "<h1>The run has not ended</h1>" in page if whole else "<h1>Nothing was compared</h1>" in page
    assert [record["step"] for record in run.recorded("strict", run.manifest())] == list(range(whole))
    assert cli.main(["compare", str(run.root), str(run.root)]) == 0


@pytest.mark.parametrize("left", ["empty", "gone", "torn"])
@pytest.mark.parametrize("lost", ["nothing more", "ledger", "samples", "half of the ledger"])
def test_a_killed_run_that_lost_all_its_records_is_refused(left, lost, out, started, capsys):
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["finished"]
    (out / "manifest.json").write_text(json.dumps({**manifest, "status": "running", "files_sha256": {}}))
    (out / "summary.json").unlink()
    shutil.rmtree(out / "strict" / "state")
    path, ledger = out / "strict" / "steps.jsonl", out / LEDGER
    path.write_text(path.read_text()[:20] if left == "torn" else "")
    if left == "gone":
        path.unlink()
    named = f"{ledger} holds step 1, {path} has none there"
    if lost == "ledger":
        ledger.unlink()
        named = f"{ledger} is missing, {out / NPZ} is there"
    elif lost == "samples":
        shutil.rmtree(out / "strict" / "samples")
    elif lost == "half of the ledger":
        text = ledger.read_text()
        ledger.write_text(text[: text.index('{"event":"version"', text.index('"event":"record"'))])
        named = f"{out / NPZ}".replace("00000", "00001") + f" is there, {path} has no step 0"
    before = contents(out)
    for command in (["report", str(out)], ["run", "--resume", str(out), "--steps", "3"]):
        assert cli.main(command) == 2
        assert named in capsys.readouterr().err
    assert cli.main(["compare", str(out), str(out)]) == 2
    assert contents(out) == before
    assert started == []


def test_an_ended_run_has_no_torn_record(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    path = run.root / "strict" / "steps.jsonl"
    path.write_text(path.read_text()[:-40])
    assert cli.main(["report", str(run.root)]) == 2
    assert f"{path}, line 4 is not whole JSON" in capsys.readouterr().err
