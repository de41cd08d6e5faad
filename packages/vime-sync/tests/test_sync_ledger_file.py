"""What was committed to a ledger's file survives a crash, what was not never shows; one writer holds it."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_runs import V, refused, train

from rl_contract import ContractError
from vime_sync import PolicyVersion, StepLedger


def test_ledger_one_writer_holds_a_file(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with StepLedger(path, run_id="run") as ledger:
        ledger.add_version(V[0])
        refused(lambda: StepLedger(path, run_id="run"), "held by another open ledger")
        # the refused one neither wrote nor took the lock along
        refused(lambda: StepLedger(path, run_id="run"), "held by another open ledger")
        ledger.add_sample("a", generated=1, spans=[(str(V[0]), 0, 1)])
    refused(lambda: ledger.drop("a", "late"), "closed")
    with StepLedger(path, run_id="run") as again:
        assert list(again.samples) == ["a"]
        assert again.samples["a"].dropped is None


def test_ledger_is_free_after_its_process_was_killed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    code = "import sys, time; from vime_sync import StepLedger; L = StepLedger(sys.argv[1], run_id='run'); "
    code += "print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        refused(lambda: StepLedger(path, run_id="run"), "held by another open ledger")
        process.kill()
        process.wait()
    StepLedger(path, run_id="run").close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ledger_cut_at_any_byte_resumes_at_the_last_whole_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with StepLedger(path, run_id="run") as ledger:
        train(ledger, 2)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    with StepLedger(path, run_id="run") as resumed:
        lines = max(1, whole[:cut].count(b"\n"))
        assert path.read_bytes().count(b"\n") == lines
        assert len(resumed.versions) + len(resumed.samples) + len(resumed.steps) == lines - 1
        # the run goes on from where it was and ends as it would have
        for line in whole.splitlines()[lines:]:
            resumed._commit(json.loads(line))
        assert resumed.check_run(2) == ledger.check_run(2)
    assert path.read_bytes() == whole


def test_ledger_a_failed_write_leaves_file_and_state_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = StepLedger(path, run_id="run")
    train(ledger, 1)
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            ledger.add_version(V[1])
    assert path.read_bytes() == before
    assert ledger.served == V[0]
    train(ledger, 1, first=1)
    ledger.close()
    with StepLedger(path, run_id="run") as again:
        again.check_run(2)


def test_ledger_altered_lines_and_other_runs_are_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with StepLedger(path, run_id="run") as ledger:
        train(ledger, 2)
    refused(lambda: StepLedger(path, run_id="other"), "belongs to run run")
    refused(lambda: StepLedger(path, run_id="run", max_staleness=1), "max_staleness 0")
    lines = path.read_text().splitlines(keepends=True)
    for broken, named in (
        (lines[:2] + lines[3:], "line 4"),
        ([*lines[:3], lines[2], *lines[3:]], "line 4"),
        (lines[1:], "line 1"),
        (lines[:1] + lines, "line 2"),
        ([*lines[:2], "{nonsense\n", *lines[2:]], "line 3"),
        ([*lines[:2], '{"event":"party"}\n', *lines[2:]], "line 3"),
    ):
        path.write_text("".join(broken))
        refused(lambda: StepLedger(path, run_id="run"), named)
    with pytest.raises(ContractError, match="max_staleness is -1"):
        StepLedger(run_id="run", max_staleness=-1)


def test_a_later_sitting_goes_on_from_the_weights_that_the_last_one_left(tmp_path):
    path = tmp_path / "ledger.jsonl"
    left, other = "b" * 64, "c" * 64

    def step(ledger, number, digest):
        version = PolicyVersion("run", number, digest)
        ledger.add_version(version)
        ledger.add_sample(f"{number}", generated=1, spans=[(str(version), 0, 1)])
        ledger.consume(number, [f"{number}"])

    with StepLedger(path, run_id="run") as ledger:
        with pytest.raises(ContractError, match="0 steps are trained"):
            ledger.resume(0, left)
        step(ledger, 0, "a" * 64)
    with StepLedger(path, run_id="run") as ledger:
        with pytest.raises(ContractError, match="resume at step 2"):
            ledger.resume(2, left)
        with pytest.raises(ContractError, match="12 digits"):
            ledger.resume(1, left[:12])
        ledger.resume(1, left)
        with pytest.raises(ContractError, match="other weights than the sitting resumed from"):
            ledger.add_version(PolicyVersion("run", 1, other))
        step(ledger, 1, left)
        step(ledger, 2, other)
    # reading replays the checks
    with StepLedger(path, run_id="run") as ledger:
        assert ledger.sittings == [(1, left)]
        assert ledger.check_run(3)["steps"] == 3
    path.write_text(
        path.read_text().replace(
            f'"step":1,"digest":"{left}"}}\n{{"event":"version"', f'"step":1,"digest":"{other}"}}\n{{"event":"version"'
        )
    )
    with pytest.raises(ContractError, match="other weights"):
        StepLedger(path, run_id="run")


def test_events_of_a_batch_wait_for_the_disk_once_and_are_checked_one_by_one(tmp_path, monkeypatch):
    path, waits = tmp_path / "ledger.jsonl", []
    version = PolicyVersion("run", 0, "a" * 64)
    with StepLedger(path, run_id="run") as ledger:
        monkeypatch.setattr(os, "fsync", waits.append)
        with ledger.batch():
            ledger.add_version(version)
            for i in range(20):
                ledger.add_sample(str(i), generated=1, spans=[(str(version), 0, 1)])
            with pytest.raises(ContractError, match="in the ledger already"):
                ledger.add_sample("3", generated=1, spans=[(str(version), 0, 1)])
            ledger.consume(0, map(str, range(20)))
            assert waits == []
        assert len(waits) == 1
        ledger.add_version(PolicyVersion("run", 1, "b" * 64))
        assert len(waits) == 2
    with StepLedger(path, run_id="run") as ledger:
        assert ledger.check_run(1)["samples"] == 20


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"{", b"7", b"null", b'{"event":"step","step":Infinity,"ids":[],"tokens":{}}', b"[" * 100_000,
     b'{"event":"version","run":1,"step":0,"digest":2}', b'{"event":"drop","id":[],"reason":""}'],
)  # fmt: skip
def test_a_damaged_line_is_named_whatever_the_damage(line, tmp_path):
    path = tmp_path / "ledger"
    StepLedger(path, run_id="run").close()
    whole = path.read_bytes()
    path.write_bytes(whole + line + b"\n")
    refused(lambda: StepLedger(path, run_id="run"), f"{path} line 2")
    # it was not held by the refused one
    path.write_bytes(whole)
    StepLedger(path, run_id="run").close()
    refused(lambda: StepLedger(tmp_path, run_id="run"), "cannot be opened")


def test_digests_of_a_step_are_kept_once_and_only_for_the_step_that_consumed_last(tmp_path):
    digests = {"record": "ab" * 32, "samples": "cd" * 32}
    with StepLedger(tmp_path / "ledger.jsonl", run_id="run") as ledger:
        refused(lambda: ledger.record(0, digests), "step 0 cannot be recorded")
        train(ledger, 2)
        refused(lambda: ledger.record(0, digests), "step 0 cannot be recorded")
        refused(lambda: ledger.record(1, {"record": "ab"}), "give a sha256 of 64 digits")
        for given in (5, None, "ab", ["record"]):
            refused(lambda given=given: ledger.record(1, given), "give a sha256 of 64 digits")
        ledger.record(1, digests)
        refused(lambda: ledger.record(1, digests), "step 1 cannot be recorded")
        train(ledger, 1, first=2)
    with StepLedger(tmp_path / "ledger.jsonl", run_id="run") as again:
        assert again.recorded == {1: digests}
        # a step that was sampled and will consume nothing is the last one
        refused(lambda: again.record(2, digests, consumed=False), "step 2 cannot be recorded")
        refused(lambda: again.record(4, digests, consumed=False), "step 4 cannot be recorded")
        again.record(3, digests, consumed=False)
        refused(lambda: again.record(3, digests, consumed=False), "step 3 cannot be recorded")
        refused(lambda: train(again, 1, first=3), "recorded as one that consumes nothing")
    with StepLedger(tmp_path / "ledger.jsonl", run_id="run") as again:
        assert again.recorded == {1: digests, 3: digests}
        assert again.check_run(3)["steps"] == 3
