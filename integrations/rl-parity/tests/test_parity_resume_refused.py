"""What must not be resumed is not: a run that was edited, that lost its state, or that is asked to become another."""

import json
import shutil

import parity_workers
import pytest
from parity_rundir import make_older
from parity_sittings import SMALL, contents, edited, killed, resume, start

from rl_parity import cli, state
from rl_parity.bound import file_digests
from rl_parity.rundir import RunDirectory, StepSamples

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "4", "--lr", "0.1", "--seed", "3"], ["--lr 0.1 differs from the run's 0.0004", "--seed 3"]),
        (["--steps", "4", "--train", "tp=2"], ["--train tp=2,cp=1 differs from the run's tp=1,cp=1"]),
        (["--steps", "4", "--out", "/tmp/elsewhere"], ["--out /tmp/elsewhere is another directory"]),
        ([], ["--steps is missing"]),
        (["--steps", "1"], ["2 steps are done, --steps 1 asks for fewer"]),
        (["--steps", "4", "--weights", "paper"], []),
    ],
)
def test_a_run_goes_on_as_it_began_or_not_at_all(tmp_path, capsys, options, words):
    assert start(tmp_path / "out", "--steps", "2", "--save-every", "1") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    if not words:
        with pytest.raises(SystemExit):
            resume(tmp_path / "out", *options)
        return
    assert resume(tmp_path / "out", *options) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


def test_a_run_without_a_saved_state_cannot_be_resumed(tmp_path, capsys):
    assert start(tmp_path / "out", "--steps", "2") == 0
    assert resume(tmp_path / "out", "--steps", "4") == 2
    assert "2 steps and no saved state; save with --save-every" in capsys.readouterr().err
    assert cli.main(["run", "--resume", str(tmp_path / "nothing"), "--steps", "4"]) == 2


@pytest.mark.parametrize(("every", "ended"), [("3", True), ("1", False)], ids=["finished", "killed"])
def test_an_arm_whose_state_was_due_and_is_gone_does_not_begin_anew(tmp_path, capsys, every, ended):
    out = tmp_path / "out"
    assert start(out, "--steps", "2", "--save-every", every) == 0
    if not ended:
        killed(out)
    shutil.rmtree(out / "strict" / "state")
    before = contents(out)
    assert resume(out, "--steps", "4") == 2
    assert f"strict arm: 2 steps and no saved state; restore {out / 'strict' / 'state'}" in capsys.readouterr().err
    assert contents(out) == before


def test_a_run_with_a_mismatch_cannot_be_resumed(tmp_path, capsys):
    parity_workers.FAULTS.add("rollout bits")
    assert start(tmp_path / "out", "--steps", "2", "--save-every", "1") == 1
    assert resume(tmp_path / "out", "--steps", "4") == 2
    assert "ended with a mismatch" in capsys.readouterr().err


def test_a_state_with_another_bit_or_of_another_model_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    (file,) = (out / "strict" / "state" / "step-00001").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert resume(out, "--steps", "2") == 2
    assert "state.json says" in capsys.readouterr().err
    file.write_bytes(whole)
    model = out / "model" / "model.safetensors"
    held = model.read_bytes()
    model.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    assert resume(out, "--steps", "2") == 2
    assert "give the same checkpoint" in capsys.readouterr().err
    # a built-in model that is gone is made again
    for path in (out / "model").iterdir():
        path.unlink()
    assert resume(out, "--steps", "2") == 0


def test_a_state_of_another_step_than_its_folder_is_refused_before_anything_is_cut(tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "3", "--save-every", "2") == 0
    described = out / "strict" / "state" / "step-00003" / state.DESCRIPTION
    whole = json.loads(described.read_text())
    for step in (1, 2, True, "3"):
        described.write_text(json.dumps({**whole, "step": step}))
        before = contents(out)
        assert resume(out, "--steps", "4") == 2
        assert f"says step {step!r}, its folder is step-00003" in capsys.readouterr().err
        assert contents(out) == before
    # the folder renamed to fit: the ledger knows which weights step 1 had
    described.write_text(json.dumps({**whole, "step": 1}))
    described.parent.rename(described.parent.with_name("step-00001"))
    before = contents(out)
    assert resume(out, "--steps", "4") == 2
    assert "ledger.jsonl has weights" in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config__seed": 7}, "seeds has run 0, config 7"),
        ({"config__train": {"tp": 2, "cp": 1}}, "topology has train"),
        ({"config__temperature": 0.5}, "sampling has temperature 1.0, config 0.5"),
        ({"config__plant": "gemm.row"}, "plant is None, in config 'gemm.row'"),
        ({"config__lr": 0.1}, "config is not the one of config_sha256"),
        ({"config__reward": "even"}, "config is not the one of config_sha256"),
        ({"config__steps": -1}, "config is not the one of config_sha256"),
        ({"config__limit": True}, "limit=True, supported: float or int"),
        ({"config__limit": "5"}, "limit='5', supported: float or int"),
        ({"config__train": {"tp": 0}}, "train: tp=0, supported: at least 1"),
        ({"config__train": 3}, "'train' is 3, supported is dict"),
        ({"config__zzz": 3}, "unknown zzz"),
        ({"status": "zzz"}, "'status' is 'zzz', supported are running"),
        ({"fingerprints__norm": "0"}, "fingerprints have norm 0, the profile's is"),
        ({"profile__settings__norm_eps": 1e-5}, "fingerprints have profile"),
    ],
)
def test_an_edited_manifest_is_refused_by_name(tmp_path, capsys, changes, named):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    edited(out / "manifest.json", **changes)
    before = contents(out)
    assert resume(out, "--steps", "2") == 2
    assert named in capsys.readouterr().err
    assert cli.main(["report", str(out)]) == 2
    assert named in capsys.readouterr().err
    assert contents(out) == before


def test_a_manifest_without_a_digest_is_held_against_its_command(tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["config_sha256"]
    manifest["command"] = [f"rl-parity run --out {out} {' '.join(SMALL)} --steps 1 --save-every 1"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    make_older(out)
    assert cli.main(["report", str(out)]) == 0
    edited(out / "manifest.json", config__lr=0.1, config__batch=4)
    assert resume(out, "--steps", "2") == 2
    err = capsys.readouterr().err
    assert "config has batch 4, command 2" in err
    assert "config has lr 0.1, command 0.0004" in err
    edited(out / "manifest.json", config__lr=4e-4, config__batch=2)
    assert resume(out, "--steps", "2") == 0


@pytest.mark.parametrize("value", [None, "x", [], ...])
def test_a_record_whose_figures_have_no_sum_is_refused_before_a_sitting_begins(tmp_path, capsys, value):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    path = out / "strict" / "steps.jsonl"
    record = {**json.loads(path.read_text()), "mean_abs_diff": value}
    path.write_text(json.dumps({name: x for name, x in record.items() if x is not ...}) + "\n")
    before = contents(out)
    assert resume(out, "--steps", "2") == 2
    assert f"{path} lacks or misstates a figure" in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.parametrize("name", ["loss", "reward", "grad_norm", "max_abs_diff", "rewards of samples", "both rewards"])
def test_an_edited_figure_of_a_step_is_refused_by_report_and_resume(tmp_path, capsys, name):
    out = tmp_path / "out"
    assert start(out, "--steps", "2", "--save-every", "1", "--reward", "even") == 0
    assert cli.main(["report", str(out)]) == 0
    directory = RunDirectory(out)
    records, path = directory.steps("strict"), directory.samples_path("strict", 1)
    if "rewards" in name:
        held = StepSamples.load(path)
        held.reward[0] += 0.5
        held.save(path)
        records[1]["reward"] += 0.125 if name == "both rewards" else 0
    else:
        records[1][name] = (records[1][name] or 0.0) + 0.25
    (out / "strict" / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    before = contents(out)
    for command in (["report", str(out)], ["run", "--resume", str(out), "--steps", "3"]):
        assert cli.main(command) == 2
        assert "reward" in capsys.readouterr().err or "rewards" not in name
    assert contents(out) == before


@pytest.mark.parametrize("name", ["sha512", "words128", None, 3])
def test_a_run_whose_weights_have_an_unknown_digest_is_refused_by_name(tmp_path, capsys, name):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    edited(out / "manifest.json", weight_digest=name)
    before = contents(out)
    for command in (["report", str(out)], ["run", "--resume", str(out), "--steps", "2"]):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert f"weight_digest {name!r} is unknown, supported: sha256-tree, sha256" in err
    assert contents(out) == before


def test_a_new_ledger_that_lost_all_digests_of_records_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "2", "--save-every", "1") == 0
    path = out / "strict" / "ledger.jsonl"
    path.write_text("".join(s for s in path.read_text().splitlines(keepends=True) if '"record"' not in s[:20]))
    edited(out / "manifest.json", files_sha256=file_digests(RunDirectory(out)))
    for command in (["report", str(out)], ["run", "--resume", str(out), "--steps", "3"]):
        assert cli.main(command) == 2
        assert "lacks the digests of step 0, which this run keeps" in capsys.readouterr().err
