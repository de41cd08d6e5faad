"""A step that failed its checks ends the run, also where the run was killed before it could record the step."""

import json

import numpy as np
import parity_workers
import pytest
from parity_edits import contents
from parity_kills import copies
from parity_sittings import resume, start

from rl_parity import cli, unrecorded
from rl_parity.launch import WorkerFailure
from rl_parity.rundir import RunDirectory, StepSamples

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

pytestmark = pytest.mark.usefixtures("inline_workers")

# the fault, the arm and step that it strikes, and what is said of it
FAULTS = {
    "bits": ("rollout bits", "strict", 1, "first mismatch: step 1, sample 0, position 1, token "),
    "bits of the first step": ("rollout bits", "strict", 0, "first mismatch: step 0, sample 0, position 1, token "),
    "training forward": ("training forward", "strict", 1, "first mismatch: step 1, sample 1, position 2, token "),
    "an absent value": ("absent value", "strict", 1, "4 log-probabilities are absent"),
    "not compared": ("stale label", "strict", 1, "it was not compared"),
    "not compared, native": ("stale label", "native", 1, "it was not compared"),
}


def faulty(monkeypatch, fault, arm, step):
    """From this step of the arm on."""
    generate = parity_workers.FakeRollout.generate

    def strikes(self, *args, **more):
        if self.arm == arm and f":{step}:" in self.engine.label:
            parity_workers.FAULTS.add(fault)
        return generate(self, *args, **more)

    monkeypatch.setattr(parity_workers.FakeRollout, "generate", strikes)


def killed_at(out, folder, arm, step, *options):
    """The run as SIGKILL leaves it between the ledger's record of the step and that of steps.jsonl."""
    with copies(out, folder, lambda what: what == f"open {arm}/steps.jsonl") as found:
        assert start(out, *options) == 1
    (found[step][1] / ".lock").unlink()
    return found[step][1]


@pytest.mark.parametrize("left", ["all", "no record", "torn samples"])
@pytest.mark.parametrize("case", FAULTS)
def test_a_step_that_failed_and_was_not_recorded_ends_the_run(case, left, tmp_path, monkeypatch, capsys):
    fault, arm, step, words = FAULTS[case]
    with monkeypatch.context() as patch:
        faulty(patch, fault, arm, step)
        out = killed_at(
            tmp_path / "out", tmp_path / "killed", arm, step, "--steps", "3", "--save-every", "1", "--arm", arm
        )
    parity_workers.FAULTS.clear()
    run, ledger = RunDirectory(out), out / arm / "ledger.jsonl"
    assert len(run.steps(arm)) == step
    lines = ledger.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "record"
    consumed = json.loads(lines[-1]).get("consumed", True)
    if left != "all":
        ledger.write_text("".join(lines[:-1]))
    if left == "torn samples":
        if consumed:
            # which nothing else tells of
            return
        whole = run.samples_path(arm, step).read_bytes()
        run.samples_path(arm, step).write_bytes(whole[: len(whole) // 2])
        words = "its samples cannot be read"
    before, sentence = contents(out), f"step {step} of the {arm} arm failed its checks, and the run was ended before"
    capsys.readouterr()
    for more in ([], ["--save-every", "2"]):
        assert resume(out, "--steps", "5", *more) == 2
        err = capsys.readouterr().err
        assert f"{sentence} it could record it: {words}" in err
        assert err.rstrip().endswith("start the run again")
    assert contents(out) == before
    assert cli.main(["report", str(out)]) == 0
    assert f"S{sentence[1:]} it could record it: {words}" in capsys.readouterr().err
    page = (out / "report.html").read_text()
    assert f"<h1>Not equal: a step of the {arm} arm, which the run could not record</h1>" in page
    assert f"S{sentence[1:]}" in page
    assert '<section class="verdict bad">' in page
    if step and left != "torn samples":
        assert cli.main(["compare", str(out), str(out)]) == 0
        assert f"note: {out}: S{sentence[1:]}" in capsys.readouterr().out


def test_a_step_that_passed_and_was_not_recorded_is_done_again(tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start(whole, "--steps", "2", "--arm", "both") == 0
    with copies(out, tmp_path / "killed", lambda what: "samples/" in what or "steps.jsonl" in what) as found:
        assert start(out, "--steps", "2", "--arm", "both", "--save-every", "2") == 0
    # where its samples begin, and where its record does
    assert len([what for what, _ in found if what.startswith("open")]) == 8
    for _, copy in found:
        run = RunDirectory(copy)
        assert not [text for arm in run.arms() if (text := unrecorded.failed(run, arm, run.steps(arm)))]
        assert resume(copy, "--steps", "2") == 0
        assert cli.main(["compare", str(whole), str(copy)]) == 0


def test_a_mismatch_is_recorded_where_a_worker_fails_after_it(tmp_path, monkeypatch, capsys):
    faulty(monkeypatch, "rollout bits", "strict", 1)

    def gone(self):
        raise WorkerFailure("trainer-0: the process ended with status 9")

    monkeypatch.setattr(parity_workers.FakeTrainer, "memory", lambda self: gone(self) if parity_workers.FAULTS else {})
    assert start(tmp_path / "out", "--steps", "3") == 1
    assert RunDirectory(tmp_path / "out").manifest()["status"] == "mismatch"
    assert "first mismatch: step 1" in capsys.readouterr().err


def test_a_mismatch_in_a_run_that_ended_otherwise_is_its_verdict(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    faulty(monkeypatch, "rollout bits", "strict", 1)
    recorded = RunDirectory.append_step

    def interrupted(self, arm, record):
        if record["mismatch_count"]:
            raise KeyboardInterrupt
        recorded(self, arm, record)

    monkeypatch.setattr(RunDirectory, "append_step", interrupted)
    assert start(out, "--steps", "3", "--save-every", "1") == 130
    assert "<h1>Not equal: a step of the strict arm" in (out / "report.html").read_text()
    parity_workers.FAULTS.clear()
    assert resume(out, "--steps", "3") == 2
    assert "step 1 of the strict arm failed its checks" in capsys.readouterr().err
    # one that is recorded and ended the run with another status
    recorded(RunDirectory(out), "strict", _record(out))
    assert cli.main(["report", str(out)]) == 2


def _record(out):
    held = StepSamples.load(RunDirectory(out).samples_path("strict", 1))
    assert np.isnan(held.forward).all()
    return {**RunDirectory(out).steps("strict")[0], "step": 1, "mismatch_count": 4, "loss": None}
