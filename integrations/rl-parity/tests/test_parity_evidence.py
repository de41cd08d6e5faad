"""Each sitting's evidence stands for its own steps: what one shows covers no other, and what nobody told is said."""

import shutil

import pytest
from parity_edits import evidence, fitted, kernels, manifest, refused
from parity_rundir import make_older
from parity_sittings import edited, killed, resume, start

from rl_parity import cli, sittings
from rl_parity.rundir import RunDirectory

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def resumed(workers, tmp_path_factory):
    """Both arms, two steps and one more."""
    out = tmp_path_factory.mktemp("resumed") / "out"
    assert start(out, "--arm", "both", "--steps", "2", "--save-every", "1") == 0
    assert resume(out, "--steps", "3") == 0
    return out


def test_launches_on_the_page_are_those_of_all_sittings(resumed, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(resumed, out)
    row = {"boundary": "norm", "kernel": "rl_norm.only_once", "count": 1000}
    for place in (lambda e: e, lambda e: e["earlier"][0]):
        evidence(lambda e, place=place: place(e)["train"]["trainer-0"].append(row))(out)
    fitted(out)
    assert cli.main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert '<td><code>rl_norm.only_once</code></td><td>-</td><td>-</td><td>-</td><td class="n">2,000</td>' in page
    assert "1 trainer ranks" in page


# what is done to the entry of one sitting, and what is said of it
ENTRIES = {
    "other kernels": (kernels("torch.matmul"), "launched torch.matmul for attention, which is no kernel of"),
    "another mode": (lambda e: e["reports"]["trainer-0"].update(mode="native"), "trainer-0 ran in mode native"),
    "another contract": (
        lambda e: e["reports"]["engine-0/worker-0"].update(profile="0" * 64),
        "engine-0/worker-0 held contract 0000",
    ),
    "no report": (lambda e: e["reports"].clear(), "trainer-0 has no report"),
    "no launches": (lambda e: e["train"]["trainer-0"].clear(), "trainer-0 launched no kernel for attention"),
    "no worker": (lambda e: (e["train"].clear(), e["rollout"].clear()), "train names 0 workers, the run had 1"),
    "one worker gone": (lambda e: e["rollout"].clear(), "rollout names 0 workers, the run had 1"),
    "workers that never were": (lambda e: e["train"].update({"trainer-1": []}), "trainer-1 has no report"),
    "no number": (lambda e: e.pop("sitting"), "an entry does not say which of 2 sittings it is of"),
    "a sitting that never was": (lambda e: e.update(sitting=7), "of sitting 8, manifest.json has 2"),
}


@pytest.mark.parametrize("sitting", [0, 1])
@pytest.mark.parametrize("case", ENTRIES)
def test_one_sound_sitting_does_not_cover_another(case, sitting, resumed, tmp_path, capsys):
    change, words = ENTRIES[case]
    out = tmp_path / "out"
    shutil.copytree(resumed, out)
    evidence(lambda found: change(found if sitting else found["earlier"][0]))(out)
    fitted(out)
    refused(out, words, capsys, resumes=True)
    assert cli.main(["compare", str(resumed), str(out)]) == 2
    assert words in capsys.readouterr().err


ALL = {
    "an entry taken out": (lambda e: e.pop("earlier"), "no entry is of sitting 1 (steps 0-1); in a run of format 3"),
    "both of one sitting": (lambda e: e["earlier"][0].update(sitting=1), "of sitting 2, as another one does"),
    "all said to be silent": (
        lambda e: e.update(train={}, rollout={}, missing=["trainer-0: gone", "engine-0: gone"]),
        "no worker is named, the run had 2",
    ),
}


@pytest.mark.parametrize("case", ALL)
def test_every_sitting_has_an_entry_of_its_own(case, resumed, tmp_path, capsys):
    change, words = ALL[case]
    out = tmp_path / "out"
    shutil.copytree(resumed, out)
    evidence(change)(out)
    fitted(out)
    refused(out, words, capsys, resumes=True)
    assert cli.main(["compare", str(resumed), str(out)]) == 2


@pytest.mark.parametrize("sitting", [0, 1])
@pytest.mark.parametrize("case", ["other kernels", "another mode", "no launches", "no worker", "one worker gone"])
def test_a_run_that_broke_off_has_the_evidence_of_the_steps_it_did(case, sitting, resumed, tmp_path, capsys):
    change, words = ENTRIES[case]
    out = tmp_path / "out"
    shutil.copytree(resumed, out)
    manifest(status="interrupted", reason="why")(out)
    edited(out / "summary.json", status="interrupted")
    fitted(out)
    assert cli.main(["report", str(out)]) == 0
    evidence(lambda found: change(found if sitting else found["earlier"][0]))(out)
    fitted(out)
    refused(out, words, capsys, resumes=True)
    assert cli.main(["compare", str(resumed), str(out)]) == 2


def test_a_sitting_that_was_killed_is_told_of_by_the_next_one(inline_workers, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start(whole, "--steps", "3") == 0
    assert start(out, "--steps", "2", "--save-every", "1") == 0
    killed(out)
    for name in ("evidence.json", "sync.json"):
        (out / "strict" / name).unlink()
    assert resume(out, "--steps", "3") == 0
    found = RunDirectory(out).evidence("strict")
    assert [(e["sitting"], bool(e["train"])) for e in sittings.entries(found)] == [(0, False), (1, True)]
    capsys.readouterr()
    words = (
        "Unproven: what 2 of the strict arm's 2 workers and engines launched in sitting 1, which did not say it: "
        "all of sitting 1"
    )
    assert cli.main(["report", str(out)]) == 0
    assert words in capsys.readouterr().err
    assert cli.main(["compare", str(whole), str(out)]) == 0
    assert f"note: {out}: {words}" in capsys.readouterr().out
    # which must not be taken out
    evidence(lambda e: e.pop("earlier"))(out)
    fitted(out)
    refused(out, "no entry is of sitting 1 (steps 0-1)", capsys, resumes=True)


@pytest.mark.parametrize("version", ["older", "1"])
def test_a_run_of_an_older_version_is_read_and_says_of_which_sitting_it_has_no_evidence(
    version, resumed, tmp_path, capsys
):
    out = tmp_path / "out"
    shutil.copytree(resumed, out)
    if version == "1":
        manifest(format=1)(out)
        edited(out / "summary.json", format=1)
        fitted(out)
    else:
        make_older(out)
    words = "Unproven: what the strict arm launched in sitting 1 (steps 0-1): no evidence of it is there"
    assert cli.main(["report", str(out)]) == 0
    assert words not in capsys.readouterr().err
    evidence(lambda e: e.pop("earlier"))(out)
    if version == "1":
        fitted(out)
    assert cli.main(["report", str(out)]) == 0
    assert words in capsys.readouterr().err
    assert words in (out / "report.html").read_text().replace("&#x27;", "'")
    assert cli.main(["compare", str(resumed), str(out)]) == 0
    said = capsys.readouterr().out
    assert f"note: {out}: {words}" in said
    assert ("note: " + str(out) + ": Unproven: evidence, pushes and the ends" in said) == (version == "older")


def test_entries_that_do_not_say_their_sitting_are_enough_where_there_is_one_for_each(resumed, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(resumed, out)
    make_older(out)
    evidence(lambda e: (e.pop("sitting"), e["earlier"][0].pop("sitting")))(out)
    assert cli.main(["report", str(out)]) == 0
    assert "in sitting" not in capsys.readouterr().err
    # one of them may be of a sitting that had nothing to count, and one must show it all
    evidence(lambda e: e["train"]["trainer-0"].clear())(out)
    assert cli.main(["report", str(out)]) == 0
    evidence(lambda e: e["earlier"][0]["train"]["trainer-0"].clear())(out)
    assert cli.main(["report", str(out)]) == 2
    evidence(lambda e: kernels("torch.matmul")(e["earlier"][0]))(out)
    assert cli.main(["report", str(out)]) == 2
    evidence(lambda e: e.pop("earlier"))(out)
    assert cli.main(["report", str(out)]) == 2


def test_steps_that_a_later_sitting_did_again_are_its_own():
    manifest = {"status": "finished", "sittings": [{}, {"from_step": {"strict": 4}}, {"from_step": {"strict": 2}}]}
    assert sittings.spans(manifest, "strict", 6) == [range(0, 2), range(4, 4), range(2, 6)]
    assert sittings.unheard(manifest, "strict", 6, {"sitting": 2}) == [0]
    assert sittings.unheard({**manifest, "status": "running"}, "strict", 6, {"sitting": 0}) == []
    assert sittings.unheard(manifest, "strict", 6, {"sitting": 0}) == [2]
    assert sittings.spans({}, "strict", 3) == [range(0, 3)]


def test_silent_workers_are_counted_sitting_by_sitting_an_engine_as_one():
    config = {"train": {"tp": 2, "cp": 2}, "rollout": {"tp": 2, "engines": 3}}
    manifest = {"config": config, "sittings": [{}, {}, {}]}
    trainers = {f"trainer-{rank}": [] for rank in range(4)}
    engines = {f"engine-{e}/worker-{w}": [] for e in range(3) for w in range(2)}
    killed = {"sitting": 0, "train": {}, "rollout": {}, "missing": ["all of sitting 1, which ended before"]}
    whole = {"sitting": 1, "train": trainers, "rollout": engines, "missing": []}
    some = {name: [] for name in engines if not name.startswith("engine-1")}
    last = {"sitting": 2, "train": trainers, "rollout": some, "missing": ["engine-1: gone"], "earlier": [killed, whole]}
    found = sittings.silences(manifest, last)
    assert [(one.sitting, one.count, one.of) for one in found] == [(0, 7, 7), (2, 1, 7)]
    assert [list(one.why) for one in found] == [killed["missing"], ["engine-1: gone"]]
    (alone,) = sittings.silences({"config": config}, {**last, "earlier": []})
    assert (alone.sitting, alone.count, alone.of) == (None, 1, 7)
