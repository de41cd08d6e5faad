"""Every file of an ended run is bound: what was taken away or altered is named by report and resume, nothing starts."""

import contextlib
import json
import shutil

import pytest
from parity_edits import (
    SMALL,
    cut,
    evidence,
    fitted,
    kernels,
    ledger,
    manifest,
    of_native,
    one,
    records,
    recount,
    refused,
    swapped,
    without,
)

from rl_contract import ContractError
from rl_parity import cli
from rl_parity.rundir import RunDirectory, StepSamples, record_digests

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

SECTIONS = ("profile", "seeds", "fingerprints", "weight_digest", "reason")

# what is done, what is said, and whether resuming refuses it too, if need be in which words
CASES = {
    "a step said not to be trained": (one(2, loss=None), "step 2 was compared and may be trained", True),
    "the last step said not to be trained": (one(3, loss=None), "step 3 was compared and may be trained", True),
    "a step said not to be compared": (
        one(2, not_compared="why", loss=None),
        "a run ends with a step such as 2",
        "ended with a mismatch",
    ),
    "a step said to differ and be trained": (
        one(2, mismatch_count=1),
        "step 2 must not be trained",
        "ended with a mismatch",
    ),
    "a middle step taken out": (without(2), "step 3 where step 2 belongs", True),
    "records of a middle step": (
        lambda out: records(out, lambda found: [found[0], *found[2:]]),
        "step 2 where step 1 belongs",
        True,
    ),
    "the last step taken out": (without(3), "ledger.jsonl holds step 3", False),
    "the last step and its end of the ledger": (
        lambda out: (without(3)(out), ledger(lambda e: "3" not in (str(e.get("step")), str(e.get("id"))[:1]))(out)),
        "says finished after 4 steps, ",
        "the state is of",
    ),
    "steps in another order": (swapped, "step 2 where step 1 belongs", True),
    "samples of a step beyond": (
        lambda out: shutil.copy(
            RunDirectory(out).samples_path("strict", 3), RunDirectory(out).samples_path("strict", 4)
        ),
        "has no such step",
        True,
    ),
    "status mismatch": (
        manifest(status="mismatch"),
        "says status mismatch, every step in its records is equal",
        "ended with a mismatch",
    ),
    "status running": (manifest(status="running"), "says status running, and finished", True),
    "status of the summary": (manifest(status="interrupted"), "says status finished, manifest.json interrupted", False),
    "no end": (manifest(finished=...), "says status finished with finished None", True),
    "a reason": (manifest(reason="why"), "says status finished with finished", True),
    "a ledger without its last line": (ledger(lambda e: (e["event"], e.get("step")) != ("record", 3)), "step 3", True),
    "a ledger cut in its last line": (cut("strict/ledger.jsonl", 5), "is cut off in its last line", True),
    "a ledger without records": (ledger(lambda e: e["event"] != "record"), "lacks the digests of step 0", True),
    "no evidence": (evidence(lambda found: found.update(train={}, rollout={})), "train names 0 workers", True),
    "no worker, all said to be silent": (
        evidence(lambda found: found.update(train={}, rollout={}, missing=["trainer-0: gone", "engine-0: gone"])),
        "no worker is named, the run had 2",
        True,
    ),
    "a worker gone that is not among the silent": (
        evidence(lambda found: (found["rollout"].clear(), found.update(missing=[]))),
        "rollout names 0 workers, the run had 1",
        True,
    ),
    "one rank without evidence": (
        evidence(lambda found: found["train"].update({"trainer-0": []})),
        "trainer-0 launched no kernel for att",
        True,
    ),
    "other kernels": (evidence(kernels("at::mm")), "launched at::mm for attention, which is no kernel of", True),
    "kernels of another boundary": (evidence(kernels("rl_gemm.fake")), "launched rl_gemm.fake for attention", True),
    "evidence of the other arm": (of_native, "ran in mode native, which the strict arm does not", True),
    "evidence without reports": (evidence(lambda found: found.update(reports={})), "trainer-0 has no report", True),
    "evidence of another contract": (
        evidence(lambda found: found["reports"]["trainer-0"].update(fingerprint="0" * 64)),
        "held contract 0000",
        True,
    ),
    "counts of nothing": (
        evidence(lambda found: found["train"]["trainer-0"][0].update(count=0)),
        "no count of launches",
        True,
    ),
    "native evidence with a contract": (
        evidence(lambda found: found["reports"]["engine-0/worker-0"].update(profile="0" * 64), "native"),
        "the native arm holds none",
        True,
    ),
    "no pushes": (lambda out: (out / "strict" / "sync.json").write_text("[]"), "has no published push of", True),
    **{f"no {name}": (manifest(**{name: ...}), f"lacks {name}", True) for name in SECTIONS},
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_altered_in_a_finished_run_is_named_also_with_the_digests_made_to_fit(
    case, finished, tmp_path, capsys
):
    change, words, resumes = CASES[case]
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    change(out)
    with contextlib.suppress(ContractError):
        recount(out)
    fitted(out)
    refused(out, words, capsys, resumes=resumes)


def test_a_resumed_run_whose_manifest_lost_its_sittings_is_refused(workers, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    assert cli.main(["run", "--resume", str(out), "--steps", "2"]) == 0
    assert cli.main(["report", str(out)]) == 0
    sittings = RunDirectory(out).manifest()["sittings"]
    assert [s.get("from_step") for s in sittings] == [None, {"strict": 1}]
    capsys.readouterr()
    for left in (..., [], sittings[:1]):
        manifest(sittings=left)(out)
        refused(out, "an entry says that it is of sitting 2, manifest.json has 1", capsys, resumes=True)
    manifest(sittings=[sittings[0], {**sittings[1], "from_step": {"native": 1}}])(out)
    refused(out, "manifest.json has no sitting that went on from step 1 of the strict arm", capsys, resumes=False)
    manifest(sittings=sittings)(out)
    assert cli.main(["report", str(out)]) == 0


def test_a_section_that_is_missing_is_named_before_the_weights_are_held_against_another_digest(
    finished, tmp_path, capsys
):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    manifest(weight_digest=...)(out)
    assert cli.main(["compare", str(finished), str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out / 'manifest.json'} lacks weight_digest, which its version writes" in said
    assert "safetensors" not in said


@pytest.mark.parametrize("name", ["strict/steps.jsonl", "strict/evidence.json", "native/sync.json", "summary.json"])
def test_any_other_byte_of_a_file_is_seen_by_its_digest(name, finished, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / name).write_text((out / name).read_text().replace(" ", "  ", 1))
    refused(out, f"{out / name} has sha256", capsys, resumes=True)
    assert cli.main(["compare", str(finished), str(out)]) == 2


def test_a_step_that_ended_the_run_cannot_be_made_equal(ended, tmp_path, capsys):
    first = RunDirectory(ended)
    assert (first.manifest()["status"], len(first.steps("strict"))) == ("mismatch", 2)
    assert cli.main(["report", str(ended)]) == 0
    assert "Not equal: 1 of 32" in (ended / "report.html").read_text()
    out = tmp_path / "out"
    shutil.copytree(ended, out)
    path = RunDirectory(out).samples_path("strict", 1)
    held = StepSamples.load(path)
    held.rollout[:] = held.train
    held.save(path)
    refused(out, "has mismatch_count 0, the record of step 1", capsys, resumes=False)
    one(1, mismatch_count=0, max_abs_diff=0.0, mean_abs_diff=0.0, first_mismatch=None)(out)
    recount(out)
    fitted(out)
    refused(out, "step 1 was compared and may be trained, its loss is None", capsys, resumes=False)
    one(1, loss=0.5, grad_norm=1.0)(out)
    fitted(out)
    refused(out, "ledger.jsonl does not hold step 1", capsys, resumes=False)


def test_the_step_that_ended_the_run_is_in_the_ledger_by_digest(ended, tmp_path, capsys):
    lines = [json.loads(line) for line in (ended / "strict" / "ledger.jsonl").read_text().splitlines()]
    run = RunDirectory(ended)
    record = run.steps("strict")[1]
    expected = record_digests(record, StepSamples.load(run.samples_path("strict", 1)))
    assert lines[-1] == {"event": "record", "step": 1, "digests": expected, "consumed": False}
    out = tmp_path / "out"
    shutil.copytree(ended, out)
    one(1, reward=record["reward"], ratio_mean=2.0)(out)
    recount(out)
    fitted(out)
    refused(out, "has another record of step 1", capsys, resumes=False)
    ledger(lambda event: event != lines[-1])(out)
    fitted(out)
    refused(out, "lacks the digests of step 1, which this run keeps", capsys, resumes=False)
