"""Wherever a run is killed, what is on disk claims no more than was done, and the run can be finished."""

import json
import shutil

import parity_workers
import pytest
from parity_kills import copies
from parity_sittings import SMALL, contents, resume, start

from rl_parity import cli, rundir, state
from rl_parity.rundir import RunDirectory

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

pytestmark = pytest.mark.usefixtures("inline_workers")


def status(out, name):
    return json.loads((out / name).read_text()).get("status")


@pytest.mark.parametrize("bad", [False, True], ids=["equal", "with a mismatch"])
def test_a_sitting_that_is_killed_shows_nothing_of_the_verdict_before_it(tmp_path, monkeypatch, bad):
    out = tmp_path / "out"
    assert start(out, "--steps", "2", "--save-every", "1") == 0
    before = contents(out / "strict")
    assert "<h1>Equal" in (out / "report.html").read_text()
    generate = parity_workers.FakeRollout.generate

    def differs(self, *args, **more):
        if bad and ":3:" in self.engine.label:
            parity_workers.FAULTS.add("rollout bits")
        return generate(self, *args, **more)

    monkeypatch.setattr(parity_workers.FakeRollout, "generate", differs)
    with copies(out, tmp_path / "killed") as found:
        assert resume(out, "--steps", "4") == int(bad)
    running = [copy for _, copy in found if status(copy, "manifest.json") == "running"]
    assert len(running) > 10
    withdrawn = False
    for copy in running:
        assert not (copy / "report.html").exists()
        now = {path.relative_to(copy): data for path, data in contents(copy / "strict").items()}
        changed = now != {path.relative_to(out): data for path, data in before.items()}
        told = RunDirectory(copy).summary()
        # what the sitting before did is done as long as this one has done nothing, and so is what this one did
        over = told["arms"]["strict"]["steps"] == 4 and told["status"] == ("mismatch" if bad else "finished")
        assert told["status"] == "running" or not (changed or withdrawn) or over, copy
        withdrawn = withdrawn or told["status"] == "running"
    assert withdrawn
    assert over
    if bad:
        assert cli.main(["report", str(running[-1])]) == 0
        page = (running[-1] / "report.html").read_text()
        assert "<h1>Not equal: 4 of 64" in page
        assert "<h1>Equal" not in page


def test_what_a_sitting_is_refused_before_keeps_its_page(tmp_path):
    out = tmp_path / "out"
    assert start(out, "--steps", "2", "--save-every", "1") == 0
    before = contents(out)
    assert resume(out, "--steps", "1") == 2
    assert contents(out) == before


AT_STATE = {
    "first arm": ("native/state/step-00002", "native", 0, []),
    "second arm": ("strict/state/step-00002", "strict", 0, []),
    "second sitting": ("strict/state/step-00003", "strict", 1, ["--steps", "3"]),
}


@pytest.mark.parametrize("case", AT_STATE)
def test_a_run_killed_after_the_last_state_of_an_arm_can_be_finished(case, tmp_path, capsys):
    place, arm, sitting, more = AT_STATE[case]
    whole, out, steps = tmp_path / "whole", tmp_path / "out", more or ["--steps", "2"]
    assert start(whole, "--arm", "both", *steps) == 0
    once = ["--arm", "both", "--steps", "2", "--save-every", "1"]
    assert not more or start(out, *once) == 0
    # before older states are removed, which the new one is beside by then
    with copies(out, tmp_path / "killed", lambda what: what.startswith("os.rename") and place in what) as found:
        assert (resume(out, *more) if more else start(out, *once)) == 0
    ((_, copy),) = found
    (partial,) = (copy / arm / "state").glob(".*.partial")
    partial.rename(partial.with_name(place.rpartition("/")[2]))
    assert state.latest(copy / arm / "state").step == int(steps[1])
    capsys.readouterr()
    if case == "second arm":
        # nothing at all would show which kernels gave equal bits
        assert resume(copy, *steps) == 2
        assert "no sitting of it lived to tell what launched them; ask for more --steps" in capsys.readouterr().err
        assert resume(copy, "--steps", "3") == 0
        assert (
            "Unproven: what 2 of the strict arm's 2 workers and engines launched in sitting 1"
            in capsys.readouterr().err
        )
        return
    assert resume(copy, *steps) == 0
    words = f"Unproven: what 2 of the {arm} arm's 2 workers and engines launched in sitting {sitting + 1}, which did"
    assert words in capsys.readouterr().err
    page = (copy / "report.html").read_text()
    assert words.replace("'", "&#x27;") in page
    assert "<h1>Equal" in page
    assert cli.main(["compare", str(whole), str(copy)]) == 0
    assert f"note: {copy}: {words}" in capsys.readouterr().out
    # and goes on
    assert resume(copy, "--steps", "4") == 0
    # evidence of a sitting that ended by itself is no matter of being killed
    for side in ("train", "rollout"):
        path = copy / arm / "evidence.json"
        held = json.loads(path.read_text())
        path.write_text(json.dumps({**held, side: {}}))
    assert resume(copy, "--steps", "4") == 2


@pytest.mark.parametrize("every", ["1", "0", "9"])
def test_a_run_killed_again_while_it_is_resumed_with_another_save_every_can_be_resumed(tmp_path, every):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start(whole, "--steps", "4") == 0
    # with two records, and no state that was due
    with copies(out, tmp_path / "a", lambda what: what == "open strict/steps.jsonl") as found:
        assert start(out, "--steps", "4", "--save-every", "3") == 0
    first = found[2][1]
    assert (len(RunDirectory(first).steps("strict")), state.latest(first / "strict" / "state")) == (2, None)
    with copies(first, tmp_path / "b") as found:
        assert resume(first, "--steps", "4", "--save-every", every) == 0
    moved = next(i for i, (what, _) in enumerate(found) if what == "os.rename strict .strict.removed")
    manifests = [i for i, (what, _) in enumerate(found) if what.startswith("os.rename manifest.json")]
    saved = next((i for i, (what, _) in enumerate(found) if what.startswith("os.rename strict/state")), manifests[2])
    # before the arm is taken back (twice), while it is, after that, and with a state that was due or at the end
    for at, other in ((moved, "1"), (moved, "3"), (moved + 1, "3"), (manifests[1], "9"), (saved, "1")):
        copy = tmp_path / f"again-{at}-{other}"
        shutil.copytree(found[at][1], copy)
        if at == saved and every != "1":
            # which this sitting did not save, nor had to until the end
            expected = 2 if every == "0" else 0
            assert resume(copy, "--steps", "4", "--save-every", other) == expected
            continue
        assert resume(copy, "--steps", "4", "--save-every", other) == 0
        assert cli.main(["compare", str(whole), str(copy)]) == 0
        assert not list(copy.glob(".*"))
        assert RunDirectory(copy).manifest()["sittings"][-1]["save_every"] == int(other)


def test_a_state_that_was_due_in_the_last_sitting_and_is_gone_is_asked_for(tmp_path, capsys):
    out = tmp_path / "out"
    with copies(out, tmp_path / "a", lambda what: what == "open strict/steps.jsonl") as found:
        assert start(out, "--steps", "6", "--save-every", "5") == 0
    first = found[3][1]
    with copies(first, tmp_path / "b", lambda what: what == "open strict/steps.jsonl") as found:
        assert resume(first, "--steps", "6", "--save-every", "1") == 0
    # three steps are fewer than the five of the sitting before
    again = found[3][1]
    shutil.rmtree(again / "strict" / "state")
    assert resume(again, "--steps", "6", "--save-every", "5") == 2
    err = capsys.readouterr().err
    assert f"strict arm: 3 steps and no saved state; restore {again / 'strict' / 'state'}" in err


def test_a_directory_whose_run_was_killed_before_its_manifest_takes_a_new_one(tmp_path, capsys):
    out = tmp_path / "out"
    with copies(out, tmp_path / "killed") as found:
        assert start(out, "--steps", "1") == 0
    early = [copy for _, copy in found if not (copy / "manifest.json").exists()]
    left = [sorted(path.name[:13] for path in copy.iterdir()) for copy in early]
    assert [".lock", "manifest.json"] in left
    (early[-1] / ".rl-parity-a1b2c3d4").mkdir()
    (early[-1] / ".lock").write_text("1\n")
    for copy in early:
        assert start(copy, "--steps", "1") == 0
        assert not [path for path in copy.iterdir() if path.name.startswith((".", "manifest.json."))]
        assert not [path for path in copy.iterdir() if path.suffix == ".tmp"]


@pytest.mark.parametrize(
    "name", ["manifest.json.tmp", "summary.jsonabcd1234.tmp", "manifest.jsonabcd1234.tmp/", "notes", ".rl-parity-a/x/"]
)
def test_a_directory_with_anything_else_in_it_is_not_taken(tmp_path, capsys, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").touch()
    (out / "manifest.jsonabcd1235.tmp").touch()
    if name.endswith("/"):
        (out / name).mkdir(parents=True)
    else:
        (out / name).touch()
    before = sorted(out.rglob("*"))
    assert cli.main(["run", "--out", str(out), "--steps", "1", *SMALL]) == 2
    assert f"--out {out}: is not empty" in capsys.readouterr().err
    assert sorted(out.rglob("*")) == before


def test_a_page_is_written_whole_or_not_at_all(finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = (out / "report.html").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rundir.os, "replace", full)
        assert cli.main(["report", str(out)]) == 2
    assert (out / "report.html").read_bytes() == before
