"""Figures and files of another shape than a run writes are named with their place, in newer runs and in older ones."""

import shutil

import pytest
from parity_edits import evidence, fitted, manifest, one, pushes, refused, summary
from parity_rundir import make_older

from rl_parity import cli

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

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
    "the native trainer": (
        evidence(lambda e: e["reports"]["trainer-0"].update(native={"name": 3}), "native"),
        "native/evidence.json: 'reports.trainer-0.native.name' is 3",
    ),
    "native operators": (
        evidence(lambda e: e["reports"]["trainer-0"].update(native={"operators": ["te"]}), "native"),
        "native/evidence.json: 'reports.trainer-0.native.operators' is ['te'], supported is te or local",
    ),
    "versions": (manifest(versions=["vllm"]), "manifest.json: 'versions' is ['vllm'], supported is a mapping"),
    "hardware": (manifest(hardware="a CPU"), "manifest.json: 'hardware' is 'a CPU', supported is a mapping"),
    "versions of a sitting": (manifest(sittings=[{"versions": 3}]), "manifest.json: 'sittings[0].versions' is 3"),
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


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("case", SHAPES)
def test_what_is_of_no_such_shape_is_named_with_its_file(case, old, finished, tmp_path, capsys):
    change, words = SHAPES[case]
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    change(out)
    # an older run has no digests that would tell first
    (make_older if old else fitted)(out)
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
