"""A run directory without most of its samples: said, counted from proven records, and never more than that."""

import json
from pathlib import Path

import pytest
from parity_rundir import keep_digests, write_run

from rl_contract import ContractError
from rl_parity import verify
from rl_parity.compare import compare_runs
from rl_parity.landed import LANDED, left_out, spans
from rl_parity.report import render, write_report


def landed(root, steps=(1, 2), proven=True):
    run = write_run(root)
    for arm in ("native", "strict"):
        if proven:
            keep_digests(run, arm)
        for step in steps:
            run.samples_path(arm, step).unlink()
    held = {"run_id": run.manifest()["run_id"], "left_out": {arm: list(steps) for arm in ("native", "strict")}}
    (root / LANDED).write_text(json.dumps(held))
    return run


def test_a_record_that_nothing_bears_out_is_refused(tmp_path):
    run = landed(tmp_path / "run", proven=False)
    with pytest.raises(ContractError, match=r"no digests of step 1, whose samples were left out"):
        verify.totals(run)


def test_report_names_the_samples_that_are_not_there(tmp_path, capsys):
    run = landed(tmp_path / "run")
    found = verify.totals(run)
    assert found["not_here"] == {"native": [1, 2], "strict": [1, 2]}
    assert found["arms"]["strict"]["valid_count"] == 4 * 48
    write_report(run)
    assert "2 step(s) of the strict arm (1-2)" in capsys.readouterr().err
    page = render(run)
    assert "differ, as the records say</h1>" in page
    assert "Samples not here: 2 step(s) of the native arm (1-2)" in page


def test_a_whole_run_says_nothing_of_it(tmp_path):
    run = write_run(tmp_path / "run")
    assert verify.totals(run)["not_here"] == {}
    assert "as the records say" not in render(run)
    # a list says what may be missing, not what is
    (run.root / LANDED).write_text(json.dumps({"run_id": run.manifest()["run_id"], "left_out": {"strict": [1]}}))
    assert verify.totals(run)["not_here"] == {}


def test_records_whose_samples_are_gone_are_still_held_against_the_ledger(tmp_path):
    run = landed(tmp_path / "run")
    path = run.root / "strict" / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["reward"] += 0.25
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(ContractError, match=r"another record of step 1"):
        verify.totals(run)


def test_samples_that_no_list_names_are_missed(tmp_path):
    run = landed(tmp_path / "run")
    run.samples_path("strict", 3).unlink()
    with pytest.raises(ContractError, match=r"step-00003.npz is missing"):
        verify.totals(run)


def test_a_landed_run_is_not_compared_with_another(tmp_path):
    run, other = landed(tmp_path / "run"), write_run(tmp_path / "other")
    with pytest.raises(ContractError, match=r"step-00001.npz is missing"):
        compare_runs(run, other)


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "not whole JSON"), ('{"run_id": "run-test"}', "'left_out'"),
     ('{"run_id": "x", "left_out": {}}', "that of run x"),
     ('{"run_id": "run-test", "left_out": {"strict": ["1"]}}', "supported is a list of steps")],
)  # fmt: skip
def test_bad_input_a_broken_list_is_named(tmp_path, text, why):
    run = write_run(tmp_path / "run")
    (run.root / LANDED).write_text(text)
    with pytest.raises(ContractError, match=why):
        verify.totals(run)


def test_steps_are_named_by_spans():
    assert spans([3, 1, 2, 7]) == "1-3, 7"
    assert left_out(Path("/nowhere"), "run-test") == {}
