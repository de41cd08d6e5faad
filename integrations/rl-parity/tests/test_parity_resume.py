"""A run in two sittings is the run in one: every bit, every record, one ledger."""

import json
import shutil
import time
from types import SimpleNamespace

import parity_workers
import pytest
import torch
from parity_rundir import make_older
from parity_sittings import contents, edited, killed, resume, start
from safetensors.torch import load_file

from rl_contract import ContractError
from rl_parity import cli, loop, runner, state
from rl_parity.bound import file_digests
from rl_parity.launch import WorkerFailure
from rl_parity.rundir import RunDirectory
from vime_sync import Manifest, StepLedger

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

pytestmark = pytest.mark.usefixtures("inline_workers")


def test_two_and_two_steps_are_four_steps(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(whole, "--steps", "4", "--arm", "both") == 0
    assert start(parts, "--steps", "2", "--arm", "both", "--save-every", "2") == 0
    first = RunDirectory(parts).steps("strict")
    assert resume(parts, "--steps", "4") == 0
    directory = RunDirectory(parts)
    assert directory.steps("strict")[:2] == first
    assert [s["step"] for s in directory.steps("native")] == [0, 1, 2, 3]
    assert cli.main(["compare", str(whole), str(parts)]) == 0
    assert directory.summary()["arms"]["strict"]["steps"] == 4
    manifest = directory.manifest()
    assert [s.get("from_step") for s in manifest["sittings"]] == [None, {"native": 2, "strict": 2}]
    with StepLedger(parts / "strict" / "ledger.jsonl", run_id=manifest["run_id"]) as ledger:
        assert ledger.check_run(4)["steps"] == 4
        assert ledger.sittings == [(2, directory.steps("strict")[2]["weight_digest"])]
    published = [r for r in json.loads((parts / "strict" / "sync.json").read_text()) if r["state"] == "published"]
    assert len(published) == 4
    # one state is kept, the newest
    assert [p.name for p in (parts / "strict" / "state").iterdir()] == ["step-00004"]
    assert len(directory.evidence("strict")["earlier"]) == 1
    assert "sittings" in (parts / "report.html").read_text()


def test_a_run_whose_time_is_over_saves_its_state_and_goes_on(tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(whole, "--steps", "4") == 0
    clock = type("Clock", (), {"now": 0.0})
    original = loop.Arm._step

    def step(self, *args):
        clock.now += 10.0
        return original(self, *args)

    monkeypatch.setattr(loop.Arm, "_step", step)
    for module in (loop, runner):
        # everything but the hours that steps seem to take
        monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock.now}))
    # two steps begin before 15 s, the third would begin at 20 s; the next multiple of --save-every is far away
    assert start(parts, "--steps", "4", "--save-every", "99", "--limit", "15") == 130
    err = capsys.readouterr().err
    assert "--limit 15 s is over: 2 of 4 steps of the strict arm are done" in err
    assert f"go on with --resume {parts} --steps 4" in err
    directory = RunDirectory(parts)
    assert (directory.manifest()["status"], len(directory.steps("strict"))) == ("interrupted", 2)
    assert directory.summary()["arms"]["strict"]["bitwise_equal"]
    assert [p.name for p in (parts / "strict" / "state").iterdir()] == ["step-00002"]
    # a sitting without time for a step changes nothing
    assert resume(parts, "--steps", "4", "--limit", "1e-300") == 130
    assert len(directory.steps("strict")) == 2
    assert resume(parts, "--steps", "4", "--limit", "0") == 0
    assert cli.main(["compare", str(whole), str(parts)]) == 0


@pytest.mark.parametrize("ends", ["by its limit", "before any arm"])
def test_an_arm_that_a_sitting_does_not_come_to_keeps_its_totals_and_seconds(tmp_path, monkeypatch, ends):
    out = tmp_path / "out"
    assert start(out, "--arm", "both", "--steps", "2", "--save-every", "1") == 0
    directory = RunDirectory(out)
    summary = directory.summary()
    for name, seconds in (("native", 81.06), ("strict", 68.54)):
        summary["arms"][name]["seconds"] = seconds
    (out / "summary.json").write_text(json.dumps(summary))
    manifest = {**directory.manifest(), "files_sha256": file_digests(directory)}
    (out / "manifest.json").write_text(json.dumps(manifest))
    with monkeypatch.context() as patch:
        if ends == "before any arm":
            patch.setattr(runner, "load_prompts", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert resume(out, "--steps", "5", "--limit", "0.001") == 130
    cut = directory.summary()["arms"]
    assert cut["strict"] == summary["arms"]["strict"]
    assert {**cut["native"], "seconds": 81.06} == summary["arms"]["native"]
    assert 81.06 <= cut["native"]["seconds"] < 100
    assert cli.main(["report", str(out)]) == 0
    assert resume(out, "--steps", "2", "--limit", "0") == 0
    # nothing was left to do
    assert directory.summary()["arms"]["strict"]["seconds"] == pytest.approx(68.54, abs=0.5)


@pytest.mark.parametrize("ends", ["by its limit", "as its workers start"])
def test_a_killed_arm_goes_on_after_a_sitting_that_did_none_of_its_steps(tmp_path, capsys, monkeypatch, ends):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start(whole, "--arm", "both", "--steps", "4") == 0
    assert start(out, "--arm", "both", "--steps", "2", "--save-every", "2") == 0
    # killed in the strict arm, after a step behind its state: nobody was asked what they launched and pushed
    killed(out)
    strict, directory = out / "strict", RunDirectory(out)
    saved = directory.steps("strict")
    for name in ("evidence.json", "sync.json"):
        (strict / name).unlink()
    edited(out / "summary.json", arms={"native": directory.summary()["arms"]["native"]})
    with open(strict / "steps.jsonl", "a") as stream:
        stream.write(json.dumps(RunDirectory(whole).steps("strict")[2]) + '\n{"step": 3, "cut o')
    (strict / "samples" / "step-00002.npz").write_bytes((strict / "samples" / "step-00001.npz").read_bytes())
    with open(strict / "ledger.jsonl", "a") as stream:
        stream.write('{"event":"ver')
    with monkeypatch.context() as patch:
        if ends == "by its limit":
            # in the native arm, which comes first
            assert resume(out, "--steps", "4", "--limit", "0.001") == 130
        else:
            fleet = loop.Fleet

            def none_left(config, arm, *args, **more):
                if arm == "strict":
                    raise WorkerFailure("engine-0: no memory")
                return fleet(config, arm, *args, **more)

            patch.setattr(loop, "Fleet", none_left)
            assert resume(out, "--steps", "4") == 3
    assert directory.steps("strict") == saved
    assert directory.sample_steps("strict") == [0, 1]
    assert directory.summary()["arms"]["strict"]["steps"] == 2
    capsys.readouterr()
    assert cli.main(["report", str(out)]) == 0
    unproven = "Unproven: what 2 of the strict arm's 2 workers and engines launched in sitting 1"
    assert unproven in capsys.readouterr().err
    if ends == "by its limit":
        # there is nothing left to do, and nobody to be asked
        before = contents(out)
        assert resume(out, "--steps", "2", "--limit", "0") == 2
        assert "no sitting of it lived to tell what launched them; ask for more --steps" in capsys.readouterr().err
        assert contents(out) == before
    assert resume(out, "--steps", "4", "--limit", "0") == 0
    assert cli.main(["report", str(out)]) == 0
    assert cli.main(["compare", str(whole), str(out)]) == 0


def test_the_seconds_of_a_killed_sitting_are_those_of_its_steps(tmp_path):
    out = tmp_path / "out"
    assert start(out, "--steps", "2", "--save-every", "1") == 0
    directory = RunDirectory(out)
    of_steps = sum(sum(record["seconds"].values()) for record in directory.steps("strict"))
    (out / "summary.json").unlink()
    killed(out)
    assert resume(out, "--steps", "2") == 0
    assert of_steps - 0.01 <= directory.summary()["arms"]["strict"]["seconds"] < of_steps + 0.5


def test_a_run_whose_time_is_over_says_when_it_saved_nothing(tmp_path, capsys, monkeypatch):
    # and starts no worker for it
    monkeypatch.setattr("rl_parity.fleet.make_launcher", lambda kind, logs: pytest.fail("workers were started"))
    assert start(tmp_path / "out", "--steps", "2", "--limit", "1e-300") == 130
    assert "0 of 2 steps of the strict arm are done; no state was saved" in capsys.readouterr().err
    assert start(tmp_path / "no", "--steps", "2", "--limit", "-1") == 2
    assert "--limit -1.0: must be a finite number of seconds >= 0" in capsys.readouterr().err


def test_steps_after_the_last_saved_state_are_done_again_and_come_out_the_same(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(whole, "--steps", "5") == 0
    assert start(parts, "--steps", "3", "--save-every", "2") == 0
    # as if killed in step 3, after its samples were entered: the state of step 2 is the last one
    last = parts / "strict" / "state" / "step-00003"
    state_of_two = tmp_path / "two"
    assert start(state_of_two, "--steps", "2", "--save-every", "1") == 0
    (state_of_two / "strict" / "state" / "step-00002").rename(last.with_name("step-00002"))
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    described = last.with_name("step-00002") / state.DESCRIPTION
    run_id = RunDirectory(parts).manifest()["run_id"]
    described.write_text(json.dumps({**json.loads(described.read_text()), "run_id": run_id}))
    killed(parts)
    with open(parts / "strict" / "steps.jsonl", "a") as stream:
        stream.write('{"step": 3, "cut o')
    with open(parts / "strict" / "ledger.jsonl", "a") as stream:
        stream.write('{"event":"ver')
    assert resume(parts, "--steps", "5") == 0
    assert cli.main(["compare", str(whole), str(parts)]) == 0
    again = RunDirectory(parts).manifest()["sittings"][-1]["done_again"]["strict"]
    assert again == [{"step": 2, "weight_digest": RunDirectory(whole).steps("strict")[2]["weight_digest"]}]


@pytest.mark.parametrize("every", ["3", "2"], ids=["before", "while"])
def test_an_arm_killed_before_its_first_state_was_saved_begins_anew(tmp_path, capsys, every):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start(whole, "--arm", "both", "--steps", "4") == 0
    assert start(out, "--arm", "both", "--steps", "2", "--save-every", every) == 0
    killed(out)
    shutil.rmtree(out / "strict" / "state")
    model = out / "model" / "model.safetensors"
    held = model.read_bytes()
    model.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    assert resume(out, "--steps", "4") == 2
    assert "the run began with" in capsys.readouterr().err
    model.write_bytes(held)
    assert resume(out, "--steps", "4") == 0
    directory = RunDirectory(out)
    last = directory.manifest()["sittings"][-1]
    assert [record["step"] for record in last["done_again"]["strict"]] == [0, 1]
    assert last["from_step"] == {"native": 2, "strict": 0}
    assert cli.main(["report", str(out)]) == 0
    assert cli.main(["compare", str(whole), str(out)]) == 0


def test_a_run_interrupted_before_its_first_step_begins_again(tmp_path):
    parity_workers.FAULTS.add("interrupt")
    assert start(tmp_path / "out", "--steps", "2", "--save-every", "1") == 130
    parity_workers.FAULTS.clear()
    assert resume(tmp_path / "out", "--steps", "2") == 0
    assert RunDirectory(tmp_path / "out").manifest()["status"] == "finished"


def test_state_of_a_rank_comes_back_whole(tmp_path):
    held = {"steps": 3, "state": {"a.b": {"master": torch.randn(3, 2), "x": torch.tensor(2.5)}, "c": torch.arange(4)}}
    digest = state.write_rank(tmp_path, 1, held)["digest"]
    back = state.read_rank(tmp_path, 1, digest)
    assert back["steps"] == 3
    assert torch.equal(back["state"]["a.b"]["master"], held["state"]["a.b"]["master"])
    assert back["state"]["a.b"]["x"].shape == ()
    with pytest.raises(ContractError, match="says 0000"):
        state.read_rank(tmp_path, 1, "0" * 64)
    with pytest.raises(ContractError, match="cannot be read"):
        state.read_rank(tmp_path, 2, digest)
    with pytest.raises(ContractError, match="slash"):
        state.write_rank(tmp_path, 0, {"a/b": torch.zeros(1)})


def old_run(out, monkeypatch, *, records=True):
    """As versions wrote it that knew plain sha256 alone, the oldest without digests of records."""
    with monkeypatch.context() as patch:
        patch.setattr(runner, "WEIGHT_DIGEST", "sha256")
        assert start(out, "--steps", "2", "--save-every", "1") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest.pop("weight_digest") == "sha256"
    (out / "manifest.json").write_text(json.dumps(manifest))
    make_older(out)
    path = out / "strict" / "ledger.jsonl"
    if not records:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"record"' not in line[:20]))
    return path


def test_a_run_of_plain_sha256_keeps_it(tmp_path, monkeypatch, capsys):
    new, old = tmp_path / "new", tmp_path / "old"
    assert start(new, "--steps", "4") == 0
    old_run(old, monkeypatch)
    assert resume(old, "--steps", "4") == 0
    assert "weight_digest" not in RunDirectory(old).manifest()
    assert cli.main(["report", str(old)]) == 0
    assert "step(s)" not in capsys.readouterr().err
    a, b = (RunDirectory(run).steps("strict") for run in (new, old))
    assert all(x["weight_digest"] != y["weight_digest"] for x, y in zip(a, b))
    weights = load_file(old / "model" / "model.safetensors")
    assert Manifest.from_tensors(weights, algorithm="sha256").digest == b[0]["weight_digest"]
    assert Manifest.from_tensors(weights).digest == a[0]["weight_digest"]
    # the same weights have two names, which says nothing about their bytes: the rest is compared
    assert cli.main(["compare", str(new), str(old)]) == 0
    out = capsys.readouterr().out
    assert "weights are named by sha256-tree against sha256: their digests were not compared" in out
    assert "weight_digest " not in out
    assert cli.main(["compare", str(old), str(old)]) == 0
    assert "strict weight_digest " in capsys.readouterr().out


def test_old_ledgers_without_digests_of_records_go_on_and_a_lost_line_is_missed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    path = old_run(out, monkeypatch, records=False)
    for more in ([], ["--steps", "4"]):
        assert not more or resume(out, *more) == 0
        capsys.readouterr()
        assert cli.main(["report", str(out)]) == 0
        # loudly, on the page too; what the later sitting did is borne out
        assert "rl-parity: Unproven: 2 step(s) of the strict arm" in capsys.readouterr().err
        assert "<b>Unproven: 2 step(s) of the strict arm" in (out / "report.html").read_text()
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"record","step":2' not in line]
    assert len(kept) == len(lines) - 1
    first = [line for line in lines if '"record"' in line[:20]]
    assert len(first) == 2
    path.write_text("".join(line for line in lines if line != first[1]))
    capsys.readouterr()
    assert resume(out, "--steps", "5") == 2
    assert "lacks the digests of step 3, which this run keeps" in capsys.readouterr().err
