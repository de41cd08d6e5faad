"""tools/two_gpus: layouts of parity that are run one after the other, each answering for itself in one file."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

FOUND = Path(__file__).parents[1] / "docs" / "results" / "h200" / "two_gpus.json"
A, B, C = "TP2/CP1 -> TP2", "TP1/CP2 -> TP1 x 2 engines", "TP2/CP1 -> TP1"
GOOD, BAD = ({"steps": 3, "valid_count": 9, "mismatch_count": n, "status": int(n > 0)} for n in (0, 4))


@pytest.fixture
def tool(load_tool):
    yield load_tool("two_gpus")
    for name in [n for n in sys.modules if n.split(".")[0] == "two_gpu_parts"]:
        del sys.modules[name]


@pytest.fixture
def parity(tool):
    return importlib.import_module("two_gpu_parts.parity")


PROGRAM = """
import json, pathlib, sys, time
a = sys.argv[1:]
if a[0] == "compare":
    HOW
o = dict(zip(a[1::2], a[2::2]))
out = pathlib.Path(o["--out"]); out.mkdir()
figures = {"steps": int(o["--steps"]), "valid_count": 7, "mismatch_count": 0}
(out / "summary.json").write_text(json.dumps({"arms": {o["--arm"]: figures}}))
"""


@pytest.mark.parametrize(("how", "said"), [("time.sleep(60)", "late"), ("sys.exit(2)", "status 2")])
def test_a_comparison_that_is_late_or_refused_is_no_success(parity, tmp_path, monkeypatch, how, said):
    run_lanes = parity.run_lanes
    monkeypatch.setattr(parity, "run_lanes", lambda lanes, _: run_lanes(lanes, time.time() + 4))
    program = [sys.executable, "-c", PROGRAM.replace("HOW", how)]
    settings = {"model": "m", "steps": 3, "end": time.time() + 60, "program": program, "options": "", "layouts": "ab"}
    found = {}
    for answer in parity.run(0, str(tmp_path), settings):
        found |= answer
    assert found["errors"] == [f"{B} was not compared ({said}) with {A}"]
    assert found[f"compared with {A}"] == {B: f"not compared ({said})"}


@pytest.fixture
def calls(tool, monkeypatch, tmp_path):
    """``call(letters, commit, answer)`` is a call of the tool in which parity finds this; returns status and file."""
    path = tmp_path / "found" / "x.json"
    where = {"gpu": ["x", "x"], "torch": "t", "nccl": "n"}

    def call(letters, commit, answer, *more, **other):
        monkeypatch.setattr(tool, "machine", lambda number: where | other)
        monkeypatch.setattr(tool, "run_together", lambda names, s, b, note: [note(name, answer) for name in names])
        layouts = ["--layouts", letters] if letters else []
        words = ["two_gpus", "--json", str(path), "--parts", *(more or ["parity"]), *layouts, "--commit", commit]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            tool.main()
        return ended.value.code, json.loads(path.read_text())

    return call


def test_layouts_run_one_after_the_other_answer_each_for_itself(calls):
    wrong = f"{B}: 4 mismatches"
    status, _ = calls("b", "c1", {B: BAD, "errors": [wrong], "ok": False, "seconds": 5.0})
    assert status == 1
    # the second call is fine, what the first found is as wrong as it was
    status, found = calls("a", "c2", {A: GOOD, "errors": [], "ok": True, "seconds": 6.0})
    part = found["parity"]
    assert status == 0
    assert (part["ok"], part["errors"]) == (False, [wrong])
    assert {n: part[n]["commit"] for n in (A, B)} == {A: "c2", B: "c1"}
    assert part[B] == BAD | {k: part[B][k] for k in ("commit", "date", "model")}
    assert (part[A]["model"], part["seconds"], "commit" in part) == ("random:qwen3-small", 6.0, False)
    # run again, it answers anew
    status, found = calls("b", "c3", {B: GOOD, "errors": [], "ok": True})
    part = found["parity"]
    assert (status, part["ok"], part["errors"]) == (0, True, [])
    assert {n: part[n]["commit"] for n in (A, B)} == {A: "c2", B: "c3"}
    # all of them begin anew
    part = calls("", "c4", {C: GOOD, "errors": [], "ok": True})[1]["parity"]
    assert (part["ok"], A in part, part[C]["commit"]) == (True, False, "c4")


def test_comparisons_and_errors_of_two_layouts_go_with_either(calls):
    same = {f"compared with {A}": {B: "equal bit for bit", C: "other"}}
    wrong = f"{C} differs from {A}"
    part = calls("abc", "c1", {A: GOOD, B: GOOD, C: GOOD, **same, "errors": [wrong], "ok": False})[1]["parity"]
    assert "calls that did not end" not in part
    part = calls("d", "c2", {"TP1/CP1 -> TP2": GOOD, "errors": [], "ok": True})[1]["parity"]
    assert (part["ok"], part["errors"], part[f"compared with {A}"]) == (False, [wrong], same[f"compared with {A}"])
    part = calls("c", "c3", {C: GOOD, "errors": [], "ok": True})[1]["parity"]
    assert (part["ok"], part["errors"], part[f"compared with {A}"]) == (True, [], {B: "equal bit for bit"})
    part = calls("a", "c4", {A: GOOD, "errors": [], "ok": True})[1]["parity"]
    assert not [key for key in part if key.startswith("compared")]


def test_a_call_that_did_not_end_is_kept_until_its_layouts_are_run_again(calls):
    late = {A: GOOD, "late": "rank(s) [0] did not end in time", "errors": [], "ok": False}
    part = calls("ab", "c1", late)[1]["parity"]
    assert part["calls that did not end"] == {"ab": late["late"]}
    status, found = calls("c", "c2", {C: GOOD, "errors": [], "ok": True})
    assert (status, found["parity"]["ok"]) == (0, False)
    assert (found["parity"]["calls that did not end"], "late" in found["parity"]) == ({"ab": late["late"]}, False)
    part = calls("a", "c3", {A: GOOD, "errors": [], "ok": True})[1]["parity"]
    assert part["calls that did not end"] == {"b": late["late"]}
    part = calls("b", "c4", {B: GOOD, "errors": [], "ok": True})[1]["parity"]
    assert (part["ok"], "calls that did not end" in part) == (True, False)
    # the tool was killed while the part ran
    part = calls("b", "c5", {"ok": False})[1]["parity"]
    assert part["calls that did not end"] == {"b": "has not ended"}


def test_files_of_earlier_versions_are_merged_with_what_their_layouts_counted(parity):
    merged = parity.merged
    stamp = {"commit": "c2", "date": "today", "model": "m"}
    # as a second call left it, which spoke for both
    before = {"ok": True, "errors": [], A: GOOD, B: BAD, "commit": "c1", "date": "before"}
    part = merged(before, {C: GOOD, "errors": [], "ok": True}, "c", stamp)
    assert (part["ok"], part["errors"]) == (False, [f"{B}: status 1; 4 mismatches"])
    assert [part[n]["commit"] for n in (A, B, C)] == ["c1", "c1", "c2"]
    kept = json.loads(FOUND.read_text())["parity"]
    part = merged(kept, {C: GOOD, "errors": [], "ok": True}, "c", stamp)
    assert part["ok"] is True
    for name in (A, B):
        assert part[name].items() >= kept[name].items()
        assert part[name]["commit"]
    part = merged({"ok": False, "error": "Traceback\nOSError: x", A: GOOD}, {C: GOOD, "ok": True}, "c", stamp)
    assert (part["ok"], part["calls that did not end"]) == (False, {"a": "OSError: x"})


def test_a_file_holds_what_was_found_on_one_kind_of_machine(calls):
    good = {A: GOOD, "errors": [], "ok": True}
    assert calls("a", "c1", good)[0] == 0
    before = calls("a", "c1", good)[1]
    for letters, more in (("b", ()), ("", ("decode",)), ("a", ("parity", "decode"))):
        status, found = calls(letters, "c2", {"ok": True}, *more, torch="u")
        assert "holds parity of torch 't', here is gpu ['x', 'x'], torch 'u'" in status
        assert found == before
    # nothing stays of the other one
    status, found = calls("", "c2", good, "parity", torch="u")
    assert (status, found["meta"]["torch"]) == (0, "u")
