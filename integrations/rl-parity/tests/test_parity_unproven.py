"""What nothing bears out is said: in runs of older versions, that have not ended, whose workers were silent or idle."""

import json
import shutil

import pytest
from parity_edits import SMALL, evidence, fitted, manifest, refused
from parity_rundir import make_older, write_run

from rl_contract import ContractError
from rl_parity import cli
from rl_parity.report import render
from rl_parity.rundir import RunDirectory, summarize, write_json

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

FORMATS = {
    "no digests": ({"files_sha256": ...}, "lacks files_sha256, which every run of format 3 has from its start: it was"),
    "no format": ({"format": ...}, "says format None, "),
    "neither": ({"format": ..., "files_sha256": ...}, "says format None, "),
    "a later format": ({"format": 4}, "says format 4, this version reads 1, 2, 3 and runs that name none"),
    "a format of another type": ({"format": True}, "says format True, this version reads 1, 2, 3"),
    "neither, said to run": (
        {"format": ..., "files_sha256": ..., "status": "running", "finished": ...},
        "says format None, ",
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_run_that_names_a_format_cannot_lose_its_digests(case, finished, tmp_path, capsys):
    changes, words = FORMATS[case]
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    manifest(**changes)(out)
    refused(out, words, capsys, resumes=True)
    assert cli.main(["compare", str(finished), str(out)]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_format_is_read_and_resumed_as_older_ones_are(workers, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    make_older(out)
    for more in ([], ["--steps", "2"]):
        assert not more or cli.main(["run", "--resume", str(out), *more]) == 0
        capsys.readouterr()
        assert cli.main(["report", str(out)]) == 0
        assert "Unproven: evidence, pushes and the ends of the files" in capsys.readouterr().err
    run = RunDirectory(out)
    assert not {"format", "files_sha256"} & {*run.manifest(), *run.summary()}


def test_a_run_that_is_resumed_keeps_its_format(workers, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    assert cli.main(["run", "--resume", str(out), "--steps", "2"]) == 0
    run = RunDirectory(out)
    assert (run.manifest()["format"], run.summary()["format"]) == (3, 3)
    # one that was killed has a summary without it, or none
    capsys.readouterr()
    manifest(status="running", finished=..., files_sha256={})(out)
    summary = run.summary()
    del summary["format"], summary["status"]
    write_json(out / "summary.json", summary)
    assert cli.main(["report", str(out)]) == 0
    (out / "summary.json").unlink()
    assert cli.main(["report", str(out)]) == 0


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
    words = "Unproven: what 1 of the strict arm's 2 workers and engines launched, which did not say it: " + gone
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
    # four ranks of the trainer and two engines, each of which answers for its two workers
    assert "what 1 of the strict arm&#x27;s 6 workers" in left(*engine, missing=["engine-1: gone"])
    both = left(*engine, "trainer-3", missing=["trainer-3: gone", "engine-1: gone"])
    assert "what 2 of the strict arm&#x27;s 6 workers" in both
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
