"""Every file of an ended run is bound: what was taken away or altered is named by report and resume, nothing starts."""

import contextlib
import json
import shutil

import numpy as np
import parity_workers
import pytest
from parity_rundir import write_run

from rl_contract import ContractError
from rl_parity import cli, preflight
from rl_parity.bound import file_digests
from rl_parity.report import render
from rl_parity.rundir import RunDirectory, StepSamples, record_digests, summarize, write_json

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

SMALL = ["--batch", "2", "--group", "2", "--max-new-tokens", "4", "--device", "cpu"]
STEPS = 4


@pytest.fixture(scope="module")
def workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_parity.fleet.make_launcher", lambda kind, logs: parity_workers.InlineLauncher())
        memory = preflight.psutil.virtual_memory()
        patch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))
        parity_workers.FAULTS.clear()
        yield
        parity_workers.FAULTS.clear()


@pytest.fixture(scope="module")
def finished(workers, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    options = ["--arm", "both", "--steps", str(STEPS), "--save-every", "1"]
    assert cli.main(["run", "--out", str(out), *options, *SMALL]) == 0
    return out


@pytest.fixture(scope="module")
def ended(workers, tmp_path_factory):
    """With a mismatch in its second step."""
    out = tmp_path_factory.mktemp("ended") / "out"
    generate = parity_workers.FakeRollout.generate

    def wrong_later(self, *args, **kwargs):
        found = generate(self, *args, **kwargs)
        if ":1:" in self.engine.label:
            found[0]["logprobs"][1] = float(np.nextafter(np.float32(found[0]["logprobs"][1]), np.float32(0)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity_workers.FakeRollout, "generate", wrong_later)
        assert cli.main(["run", "--out", str(out), "--steps", "4", *SMALL]) == 1
    return out


def records(out, change, arm="strict"):
    path = out / arm / "steps.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    found = change(found) or found
    path.write_text("".join(json.dumps(record) + "\n" for record in found))


def one(step, **figures):
    return lambda out: records(out, lambda found: found[step].update(figures))


def manifest(**changes):
    def change(out):
        found = {**json.loads((out / "manifest.json").read_text()), **changes}
        write_json(out / "manifest.json", {k: v for k, v in found.items() if v is not ...})

    return change


def ledger(keep):
    def change(out):
        path = out / "strict" / "ledger.jsonl"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if keep(json.loads(line))))

    return change


def cut(name, last):
    return lambda out: (out / name).write_text((out / name).read_text()[:-last])


def without(*steps):
    """Records and samples, as if these steps had never been; the summary is recounted."""

    def change(out):
        records(out, lambda found: [r for r in found if r["step"] not in steps])
        for step in steps:
            RunDirectory(out).samples_path("strict", step).unlink()

    return change


def swapped(out):
    records(out, lambda found: [found[0], found[2], found[1], found[3]])


def evidence(change, arm="strict"):
    def edit(out):
        path = out / arm / "evidence.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return edit


def kernels(name):
    def change(found):
        for rows in (*found["train"].values(), *found["rollout"].values()):
            rows[:] = [{**row, "kernel": name} for row in rows]

    return change


def of_native(out):
    shutil.copy(out / "native" / "evidence.json", out / "strict" / "evidence.json")


def summary(**changes):
    def change(out):
        found = json.loads((out / "summary.json").read_text())
        found["arms"]["strict"] |= changes
        write_json(out / "summary.json", found)

    return change


def recount(out):
    path = out / "summary.json"
    found = json.loads(path.read_text())
    for arm, totals in found["arms"].items():
        found["arms"][arm] = {**totals, **summarize(RunDirectory(out).steps(arm), totals["seconds"])}
    write_json(path, found)


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


def pushes(change):
    def edit(out):
        path = out / "strict" / "sync.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return edit


SHAPES = {
    "reports": (evidence(lambda e: e.update(reports=3)), "strict/evidence.json: 'reports' is 3"),
    "a report": (evidence(lambda e: e["reports"].update({"trainer-0": 3})), "json: 'reports.trainer-0' is 3"),
    "earlier": (evidence(lambda e: e.update(earlier=5)), "strict/evidence.json: 'earlier' is 5"),
    "one earlier": (evidence(lambda e: e.update(earlier=[3])), "strict/evidence.json: 'earlier[0]' is 3"),
    "an earlier report": (evidence(lambda e: e.update(earlier=[{"reports": {"x": 3}}])), "'earlier[0].reports.x' is 3"),
    "missing": (evidence(lambda e: e.update(missing=2)), "strict/evidence.json: 'missing' is 2"),
    "one missing": (evidence(lambda e: e.update(missing=[2])), "strict/evidence.json: 'missing[0]' is 2"),
    "saves": (evidence(lambda e: e.update(saves=[{"step": 1}])), "strict/evidence.json: 'saves[0]' is {'step': 1}"),
    "workers": (evidence(lambda e: e.update(train=[])), "strict/evidence.json: 'train' is []"),
    "substitutions": (
        evidence(lambda e: e["reports"]["trainer-0"].update(substitutions=3), "native"),
        "native/evidence.json: 'reports.trainer-0.substitutions' is 3",
    ),
    "version of a push": (pushes(lambda rows: rows[0].update(version=[1])), "strict/sync.json holds what is no state"),
    "a push": (pushes(lambda rows: rows.append(3)), "strict/sync.json holds what is no state of a push"),
    "sittings": (manifest(sittings=5), "manifest.json: 'sittings' is 5"),
    "a sitting": (manifest(sittings=[3]), "manifest.json: 'sittings[0]' is 3"),
    "first steps": (manifest(sittings=[{"from_step": {"strict": "0"}}]), "'sittings[0].from_step.strict' is '0'"),
    "version of a step": (one(1, weight_version=[1]), "strict/steps.jsonl, line 2: 'weight_version' is [1]"),
    "a count": (one(1, mismatch_count="0"), "step 1 says '0' of mismatch_count where a count belongs"),
    "seconds": (one(1, seconds={"push": "1"}), "step 1 says '1' seconds of push"),
    "seconds below zero": (one(1, seconds={"push": -1.0}), "step 1 says -1.0 seconds of push"),
    "seconds of no number": (one(1, seconds={"push": float("nan")}), "step 1 says nan seconds of push"),
    "seconds of an arm": (summary(seconds=None), "summary.json says seconds None of the strict arm"),
}


SUMMARIES = {
    "seconds of text": (summary(seconds="1"), "says seconds '1' of the strict arm"),
    "fewer tokens": (summary(tokens=3), "says tokens 3 of the strict arm"),
    "another last reward": (summary(reward_last=0.75), "says reward_last 0.75"),
    "another mean difference": (summary(mean_abs_diff=1e-9), "says mean_abs_diff 1e-09"),
    "no warning": (summary(warnings=["x"]), "says warnings ['x']"),
    "a figure of no step": (summary(k3=0.0), "says k3 of the strict arm, which no step bears out"),
    "a plant": (summary(plant="gemm.row"), "says plant gemm.row"),
}


def fitted(out):
    """The manifest's digests, made to fit what the files hold now."""
    manifest(files_sha256=file_digests(RunDirectory(out)))(out)


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(out, words, capsys, *, resumes):
    """By report, and by resume before anything starts; nothing is changed."""
    (out / "report.html").unlink(missing_ok=True)
    before = contents(out)
    for command in (["report", str(out)], ["run", "--resume", str(out), "--steps", "5"]):
        if command[0] == "report" or resumes:
            assert cli.main(command) == 2
            said = capsys.readouterr().err
            assert (resumes if command[0] == "run" and isinstance(resumes, str) else words) in said, said
    assert contents(out) == before


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


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("case", SHAPES)
def test_what_is_of_no_such_shape_is_named_with_its_file(case, old, finished, tmp_path, capsys):
    change, words = SHAPES[case]
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    change(out)
    # an older run has no digests that would tell first
    (manifest(files_sha256=...) if old else fitted)(out)
    refused(out, words, capsys, resumes=True)
    assert cli.main(["compare", str(finished), str(out)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("case", SUMMARIES)
def test_a_summary_that_its_steps_do_not_bear_out_is_named(case, finished, tmp_path, capsys):
    change, words = SUMMARIES[case]
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    change(out)
    fitted(out)
    refused(out, words, capsys, resumes=False)


def test_a_resumed_run_whose_manifest_lost_its_sittings_is_refused(workers, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    assert cli.main(["run", "--resume", str(out), "--steps", "2"]) == 0
    assert cli.main(["report", str(out)]) == 0
    sittings = RunDirectory(out).manifest()["sittings"]
    assert [s.get("from_step") for s in sittings] == [None, {"strict": 1}]
    capsys.readouterr()
    for left in (..., [], sittings[:1], [sittings[0], {**sittings[1], "from_step": {"native": 1}}]):
        manifest(sittings=left)(out)
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


def test_an_old_run_says_that_nothing_binds_its_evidence(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert cli.main(["report", str(run.root)]) == 0
    assert "Unproven: evidence, pushes and the ends of the files" in capsys.readouterr().err
    assert "<b>Unproven: evidence, pushes" in (run.root / "report.html").read_text()
    (run.root / "strict" / "sync.json").write_text("[]")
    with pytest.raises(ContractError, match="no published push"):
        render(run)


def test_a_worker_that_did_not_answer_is_said_on_the_page(finished, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    gone = "engine-0: no answer within 60 s"
    evidence(lambda found: (found["rollout"].clear(), found.update(missing=[gone])))(out)
    fitted(out)
    assert cli.main(["report", str(out)]) == 0
    words = "Unproven: what 1 of the strict arm's workers and engines launched, which did not say it: " + gone
    assert words in capsys.readouterr().err
    assert words.replace("'", "&#x27;") in (out / "report.html").read_text()
    assert "did not say it" not in (finished / "report.html").read_text()


def test_as_many_workers_may_be_gone_as_did_not_answer(tmp_path):
    run = write_run(tmp_path / "run", engines=2)
    path = run.root / "strict" / "evidence.json"
    whole = json.loads(path.read_text())

    def left(*names, missing):
        kept = {side: {k: v for k, v in whole[side].items() if k not in names} for side in ("train", "rollout")}
        path.write_text(json.dumps({**whole, **kept, "missing": missing}))
        return render(run)

    engine = ["engine-1/worker-0", "engine-1/worker-1"]
    assert "did not say it: engine-1: gone." in left(*engine, missing=["engine-1: gone"])
    assert "2 of the strict arm" in left(*engine, "trainer-3", missing=["trainer-3: gone", "engine-1: gone"])
    with pytest.raises(ContractError, match="rollout names 2 workers, the run had 4"):
        left(*engine, "trainer-3", missing=["trainer-3: gone"])
    with pytest.raises(ContractError, match="train names 2 workers, the run had 4"):
        left("trainer-2", "trainer-3", missing=["trainer-3: gone"])


def test_a_run_that_has_not_ended_is_not_called_equal(tmp_path):
    page = render(write_run(tmp_path / "run", status="running"))
    assert "<h1>The run has not ended</h1>" in page
    assert "<h1>Equal" not in page


def test_a_run_whose_weights_never_moved_says_so(finished, tmp_path, capsys):
    still = write_run(tmp_path / "still", still=True)
    warnings = still.summary()["arms"]["strict"]["warnings"]
    assert [w.partition(":")[0] for w in warnings] == ["no gradient", "no weight moved"]
    assert "give a --reward that tells them apart" in warnings[0]
    assert cli.main(["report", str(still.root)]) == 0
    assert "rl-parity: Warning: strict arm: no weight moved: all of its 4 steps" in capsys.readouterr().err
    assert "<b>Warning: native arm: no gradient" in (still.root / "report.html").read_text()
    assert RunDirectory(finished).summary()["arms"]["strict"]["warnings"] == []
    assert "Warning" not in (finished / "report.html").read_text()
    # one step shows no movement of its own
    alone = summarize(still.steps("strict")[:1], 1.0)["warnings"]
    assert [w.partition(":")[0] for w in alone] == ["no gradient"]
