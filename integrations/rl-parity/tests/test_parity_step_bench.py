"""The bench of whole steps reads run directories: medians by phase, at equal tokens or not at all."""

import importlib.util
import json
from pathlib import Path

import pytest
from parity_rundir import keep_digests, write_run

from rl_contract import ContractError
from rl_parity import runner
from rl_parity.rundir import RunDirectory, write_json

TOOL = Path(__file__).resolve().parents[3] / "tools" / "benches" / "step.py"
if not TOOL.is_file():
    pytest.skip("the maintainers' tools are not here", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("bench_step", TOOL)
step_bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(step_bench)


def change(run: RunDirectory, arm: str, edit) -> None:
    path = run.root / arm / "steps.jsonl"
    records = run.steps(arm)
    for record in records:
        edit(record)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def slower(record) -> None:
    # the first step warms up, and one later step is an outlier
    record["seconds"] = {"push": 0.5, "rollout": 4.0, "score": 1.0, "train": 2.0, "sleep": 0.25, "other": 0.0}
    if record["step"] in (0, 3):
        record["seconds"]["train"] = 100.0


def test_phases_are_medians_over_settled_steps_and_ratios_are_peer_over_strict(tmp_path):
    run = write_run(tmp_path / "both", steps=6)
    change(run, "strict", slower)
    meta, rows, summary = step_bench.from_runs([run.root], "abc")
    by_case = {row["case"]: row for row in rows}
    assert by_case["rollout"]["strict_us"] == 4.0e6
    assert by_case["rollout"]["peer_us"] == 3.1e6
    assert by_case["rollout"]["ratio"] == 0.775
    assert by_case["train"]["strict_us"] == 2.0e6
    assert by_case["sleep"]["peer_us"] == 0.0
    assert summary["steps compared"] == 5
    assert summary["whole step at equal tokens, strict / native (target <= 1.04)"] == round(7.75 / 7.12, 3)
    assert (meta["commit"], meta["gpu"]) == ("abc", "a CPU")
    two = [write_run(tmp_path / arm, steps=6, arms=(arm,)) for arm in ("strict", "native")]
    change(two[0], "strict", slower)
    assert step_bench.from_runs([r.root for r in two], "abc")[1] == rows


def test_the_page_says_which_native_trainers_ran_in_every_sitting(tmp_path):
    run = write_run(tmp_path / "both", steps=4)

    def method():
        return step_bench.from_runs([run.root], "")[0]["method"].partition("Megatron-core, ")[2]

    workers = {side: run.evidence("native")[side] for side in ("train", "rollout")}

    def write(*entries):
        *earlier, last = ({**workers, "missing": [], **entry} for entry in entries)
        (run.root / "native" / "evidence.json").write_text(json.dumps({**last, "earlier": earlier}))

    def te(version, **more):
        native = {"name": f"native (TransformerEngine {version})", "operators": "te", "attention_asked": "auto"}
        return {"reports": {"engine-0/worker-0": {}, "trainer-0": {"native": native, "substitutions": []}}, **more}

    assert method() == "native (not reported)"
    run.write_manifest({**run.manifest(), "sittings": [{}, {"from_step": {"native": 2}}]})
    told = [f"native (TransformerEngine {version})" for version in ("2.13.0", "2.14.1")]
    for numbers in ([{}, {}], [{"sitting": 0}, {"sitting": 1}]):
        write(te("2.13.0", **numbers[0]), te("2.14.1", **numbers[1]))
        assert method() == ", then ".join(told)
        assert runner._native_notes(run) == [
            f"the native arm's trainer is {name}, attention asked auto" for name in told
        ]
        # it did not answer at the end, or was killed
        write(te("2.14.1", **numbers[0]), {"reports": {}, "missing": ["trainer-0 did not answer"], **numbers[1]})
        assert method() == f"{told[1]}, then native (not reported)"
        assert runner._native_notes(run)[-1] == "the native arm's trainer is native (not reported)"
    # an older manifest may not list its sittings
    run.write_manifest({**run.manifest(), "sittings": None})
    write(te("2.14.1"), {"reports": {}, "missing": ["trainer-0 did not answer"]})
    assert method() == f"{told[1]}, then native (not reported)"
    run.write_manifest({**run.manifest(), "sittings": [{}, {"from_step": {"native": 2}}]})
    write(te("2.14.1", sitting=1))
    assert method() == f"{told[1]}, then native (not reported)"
    write({"reports": {"trainer-0": {"native": {"operators": "te"}, "substitutions": []}}, "sitting": 1})
    assert method() == "native (not reported)"


def test_a_trainer_from_before_there_was_transformer_engine_needs_no_report(tmp_path):
    run = write_run(tmp_path / "both", steps=4)
    manifest = run.manifest()
    del manifest["config"]["native_operators"]
    run.write_manifest(manifest)
    assert step_bench.from_runs([run.root], "")[0]["method"].endswith("Megatron-core, native (no TransformerEngine)")


def test_what_cannot_be_compared_is_refused(tmp_path):
    run = write_run(tmp_path / "both", steps=4)
    with pytest.raises(ContractError, match=r"no settled steps of \['native'\]"):
        step_bench.from_runs([write_run(tmp_path / "one", arms=("strict",)).root], "")
    with pytest.raises(ContractError, match="a second native arm"):
        step_bench.from_runs([run.root, run.root], "")
    with pytest.raises(ContractError, match=r"differ in seed: \[0, 1\]"):
        step_bench.from_runs([run.root, write_run(tmp_path / "other", seed=1).root], "")
    change(run, "native", lambda record: record.update(tokens=record["tokens"] - (record["step"] >= 2)))
    with pytest.raises(ContractError, match=r"2 of 3 steps sampled other numbers of tokens \(first: \[2\]\)"):
        step_bench.from_runs([run.root], "")


def test_steps_of_other_numbers_of_tokens_are_left_out_and_counted(tmp_path):
    run = write_run(tmp_path / "both", steps=6)

    def edit(record):
        if record["step"] == 2:
            record["tokens"] -= 1
            record["seconds"] = {"train": 1000.0}

    change(run, "native", edit)
    meta, rows, summary = step_bench.from_runs([run.root], "")
    assert summary["steps compared"] == 4
    assert "4 steps at equal tokens, 1 of other numbers" in meta["notes"][0]
    assert max(row["peer_us"] for row in rows) < 1e9


def test_a_setting_that_an_older_run_lacks_has_its_default(tmp_path):
    two = [write_run(tmp_path / arm, steps=4, arms=(arm,)) for arm in ("strict", "native")]
    manifest = two[0].manifest()
    del manifest["config"]["sleep"], manifest["config"]["eager"]
    two[0].write_manifest(manifest)
    assert step_bench.from_runs([run.root for run in two], "")[1]
    del manifest["config"]["batch"]
    manifest["config"]["eager"] = True
    two[0].write_manifest(manifest)
    with pytest.raises(ContractError, match=r"differ in eager: \[True, False\]"):
        step_bench.from_runs([run.root for run in two], "")


def test_a_run_that_does_not_bear_itself_out_is_refused_and_what_is_doubtful_is_noted(tmp_path):
    run = write_run(tmp_path / "both", steps=4)
    assert [note.partition(":")[0] for note in step_bench.from_runs([run.root], "")[0]["notes"][1:]] == ["both"] * 2
    for arm in ("strict", "native"):
        keep_digests(run, arm)
    (note,) = step_bench.from_runs([run.root], "")[0]["notes"][1:]
    assert note.startswith("both: Unproven: evidence, pushes")
    run.write_manifest({**run.manifest(), "status": "failed", "reason": "no memory"})
    write_json(run.root / "summary.json", {**run.summary(), "status": "failed"})
    assert "both: status failed: no memory" in step_bench.from_runs([run.root], "")[0]["notes"]
    change(run, "strict", lambda record: record["seconds"].update(rollout=0.31))
    with pytest.raises(ContractError, match="has another record of step 0"):
        step_bench.from_runs([run.root], "")


@pytest.mark.parametrize("edit", [lambda r: r.pop("seconds"), lambda r: r.update(seconds=None)])
def test_a_record_without_times_is_refused(tmp_path, edit):
    run = write_run(tmp_path / "both", steps=4)
    change(run, "strict", edit)
    with pytest.raises(ContractError, match="seconds"):
        step_bench.from_runs([run.root], "")


def test_a_rollout_of_no_time_has_no_rate(tmp_path):
    run = write_run(tmp_path / "both", steps=4)
    change(run, "strict", lambda record: record["seconds"].update(rollout=0.0))
    manifest = run.manifest()
    del manifest["versions"], manifest["hardware"]
    run.write_manifest({**manifest, "sittings": [{"from_step": None}]})
    meta, _, summary = step_bench.from_runs([run.root], "")
    assert (meta["torch"], meta["gpu"]) == (None, "-")
    assert "sampled tokens/s in rollouts, native" in summary
    assert "sampled tokens/s in rollouts, strict" not in summary
    change(run, "strict", lambda record: record.update(seconds={"train": 0.0}))
    with pytest.raises(ContractError, match="steps that took no time"):
        step_bench.from_runs([run.root], "")
