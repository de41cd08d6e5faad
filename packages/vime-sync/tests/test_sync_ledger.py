"""Every token has one version, every sample one step; what was committed survives a crash, what was not never shows."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contract import ContractError
from vime_sync import PolicyVersion, Span, StepLedger, check_spans, spans_from_pauses, tokens_digest

V = [PolicyVersion("run", step, f"{step + 1:064x}"[::-1]) for step in range(8)]


def refused(call, *texts):
    with pytest.raises(ContractError) as error:
        call()
    for text in texts:
        assert text in str(error.value)


def train(ledger, steps, first=0):
    for step in range(first, first + steps):
        ledger.add_version(V[step])
        for i in range(2):
            ledger.add_sample(f"s{step}.{i}", generated=4, spans=[(str(V[step]), 0, 4)], token_ids=[step, i, 7, 8, 9])
        ledger.consume(
            step, [f"s{step}.0", f"s{step}.1"], token_ids={f"s{step}.{i}": [step, i, 7, 8, 9] for i in range(2)}
        )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=9), st.data())
def test_spans_that_cover_exactly_pass_and_any_other_boundary_is_refused(parts, data):
    spans, at = [], 0
    for version, length in parts:
        spans.append((version, at, at + length))
        at += length
    assert check_spans(spans, at) == tuple(Span(*span) for span in spans)
    refused(lambda: check_spans(spans, at + 1), "cover")
    if spans:
        i = data.draw(st.integers(0, len(spans) - 1))
        field, shift = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([-1, 1]))
        broken = [list(span) for span in spans]
        broken[i][field] += shift
        with pytest.raises(ContractError):
            check_spans([tuple(span) for span in broken], at)


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ([("a", 0, 2), ("b", 3, 5)], "gap at token 2"),
        ([("a", 0, 3), ("b", 2, 5)], "overlap at token 3"),
        ([("a", 0, 0), ("b", 0, 5)], "empty span"),
        ([("a", 1, 5)], "gap at token 0"),
        ([("a", 0, 4)], "cover 4 tokens, the sample has 5"),
        ([("a", 0, 6)], "cover 6 tokens, the sample has 5"),
        ([], "cover 0 tokens"),
        (["a"], "no version span"),
    ],
)
def test_spans_with_a_gap_or_overlap_are_refused_at_the_token(spans, named):
    refused(lambda: check_spans(spans, 5), named)


@pytest.mark.parametrize("given", [None, 3, "ab", b"ab"])
def test_what_is_no_list_of_spans_or_samples_is_refused_by_name(given):
    ledger = StepLedger(run_id="run")
    ledger.add_version(V[0])
    refused(lambda: check_spans(given, 2), "version spans are", "supported: ")
    refused(lambda: ledger.add_sample("a", generated=2, spans=given), "version spans are")
    refused(lambda: spans_from_pauses(given, 2), "pause boundaries are")
    refused(lambda: ledger.consume(0, given), "sample ids are")
    refused(lambda: ledger.consume(0, ["a"], token_ids=given or [1]), "token_ids is")
    assert (ledger.samples, ledger.steps) == ({}, [])


def test_a_number_of_steps_that_no_run_has_is_refused():
    ledger = StepLedger(run_id="run")
    train(ledger, 2)
    assert ledger.check_run(2)["steps"] == 2
    for steps in (-1, "2", 2.0, True):
        refused(lambda steps=steps: ledger.check_run(steps), "the number of steps")
    refused(lambda: ledger.check_run(3), "step 2 was not trained")


@pytest.mark.field_report("R62")
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 30))
def test_spans_from_pause_boundaries_give_each_token_the_version_then_serving(cuts, generated):
    starts = [(0, "v0")] + [(min(cut, generated), f"v{i + 1}") for i, cut in enumerate(sorted(cuts))]
    spans = spans_from_pauses(starts, generated)
    for token in range(generated):
        owner = [version for at, version in starts if at <= token][-1]
        assert [span.version for span in spans if span.start <= token < span.end] == [owner]
    assert spans_from_pauses([(0, "a"), (2, "a"), (2, "b"), (3, "b")], 3) == (Span("a", 0, 2), Span("b", 2, 3))
    refused(lambda: spans_from_pauses([(0, "a"), (5, "b")], 3), "do not ascend")


def test_ledger_whole_run_is_continuous_and_counts(tmp_path):
    with StepLedger(tmp_path / "run" / "ledger.jsonl", run_id="run") as ledger:
        train(ledger, 5)
        ledger.add_version(V[5])
        ledger.add_version(V[5])
        ledger.add_sample("late", generated=0, spans=[])
        ledger.add_sample("aborted", generated=1, spans=[(str(V[5]), 0, 1)])
        ledger.drop("aborted", "cancelled")
        counts = ledger.check_run(steps=5)
    assert counts == {
        "steps": 5,
        "samples": 10,
        "tokens": 40,
        "weight_version_mismatch_count": 0,
        "staleness_max": 0,
        "dropped": 1,
        "pending": 1,
    }
    with StepLedger(tmp_path / "run" / "ledger.jsonl", run_id="run") as again:
        assert again.check_run(5) == counts
        assert (again.samples, again.steps, again.versions) == (ledger.samples, ledger.steps, ledger.versions)
        refused(lambda: again.check_run(6), "step 5 was not trained")
        refused(lambda: again.check_run(4), "step 4 is beyond the run's 4 steps")


@pytest.mark.field_report("R62")
def test_ledger_staleness_is_counted_from_the_oldest_token_and_bounded():
    ledger = StepLedger(run_id="run", max_staleness=2)
    train(ledger, 3)
    ledger.add_version(V[3])
    mixed = ledger.add_sample("mixed", generated=9, spans=[(str(V[1]), 0, 2), (str(V[2]), 2, 3), (str(V[3]), 3, 9)])
    assert mixed.spans[0] == Span(str(V[1]), 0, 2)
    ledger.add_sample("fresh", generated=1, spans=[(str(V[3]), 0, 1)])
    # the newest token alone would call this one fresh
    ledger.add_sample("old", generated=5, spans=[(str(V[0]), 0, 1), (str(V[3]), 1, 5)])
    assert [ledger.staleness(i) for i in ("mixed", "fresh", "old")] == [2, 0, 3]
    assert [ledger.mismatched_tokens(i) for i in ("mixed", "fresh", "old")] == [3, 0, 1]
    refused(lambda: ledger.consume(3, ["fresh", "old"]), "sample old is 3 steps stale, the bound is 2")
    report = ledger.consume(3, ["mixed", "fresh"])
    assert (report.weight_version_mismatch_count, report.staleness_max, report.staleness_mean) == (3, 2, 1.0)
    assert report.tokens == 10
    ledger.drop("old", "stale")
    assert ledger.check_run(4)["staleness_max"] == 2


@pytest.mark.field_report("R62")
def test_ledger_unpublished_versions_are_refused():
    ledger = StepLedger(run_id="run")
    refused(lambda: ledger.add_sample("a", generated=1, spans=[("default", 0, 1)]), "never published", "default")
    refused(lambda: ledger.consume(0, ["a"]), "no version is published")
    ledger.add_version(V[0])
    same_step_other_bytes = PolicyVersion("run", 0, "f" * 64)
    refused(lambda: ledger.add_sample("a", generated=1, spans=[(str(same_step_other_bytes), 0, 1)]), "never published")
    refused(lambda: ledger.add_version(same_step_other_bytes), "does not follow")


def test_ledger_versions_and_steps_ascend_by_one():
    ledger = StepLedger(run_id="run")
    refused(lambda: ledger.add_version(V[1]), "the next step is 0")
    refused(lambda: ledger.add_version(PolicyVersion("other", 0, "0" * 64)), "does not belong")
    refused(lambda: ledger.add_version(PolicyVersion("run", 0, "0" * 12)), "12 digits")
    ledger.add_version(V[0])
    refused(lambda: ledger.add_version(V[2]), "the next step is 1")
    refused(lambda: ledger.add_version(V[1]), "before step 0 has consumed")
    ledger.add_sample("a", generated=1, spans=[(str(V[0]), 0, 1)])
    refused(lambda: ledger.consume(1, ["a"]), "the next step is 0", "the version being served is run:0")
    ledger.consume(0, ["a"])
    refused(lambda: ledger.consume(1, ["a"]), "the version being served is run:0", "consumed by step 0")


@pytest.mark.field_report("R66")
def test_ledger_a_sample_is_consumed_once_and_with_its_own_tokens():
    ledger = StepLedger(run_id="run", max_staleness=9)
    ledger.add_version(V[0])
    for name, tokens in (("a", [1, 2]), ("b", [1, 3]), ("c", [4, 4])):
        ledger.add_sample(name, generated=1, spans=[(str(V[0]), 0, 1)], token_ids=tokens)
    refused(lambda: ledger.add_sample("a", generated=1, spans=[(str(V[0]), 0, 1)]), "in the ledger already")
    # prompts and answers of two samples exchanged
    refused(
        lambda: ledger.consume(0, ["a", "b", "b", "x"], token_ids={"a": [1, 3], "b": [1, 2]}),
        "sample a has other tokens",
        "sample b has other tokens",
        "sample b is given twice",
        "sample x is unknown",
    )
    refused(lambda: ledger.consume(0, []), "no sample was given")
    assert all(sample.step is None for sample in ledger.samples.values())
    ledger.drop("c", "too stale")
    refused(lambda: ledger.consume(0, ["c"]), "dropped (too stale)")
    ledger.consume(0, ["a"], token_ids={"a": [1, 2]})
    refused(lambda: ledger.drop("a", "late"), "consumed by step 0")
    refused(lambda: ledger.drop("x", "late"), "unknown")
    ledger.add_version(V[1])
    refused(lambda: ledger.consume(1, ["a"]), "consumed by step 0")
    ledger.consume(1, ["b"], token_ids={"b": [1, 3]})


def test_ledger_token_ids_are_required_where_the_rollout_recorded_them():
    ledger = StepLedger(run_id="run")
    ledger.add_version(V[0])
    for name, tokens in (("a", [1, 2]), ("b", torch.tensor([1, 3])), ("bare", None)):
        ledger.add_sample(name, generated=1, spans=[(str(V[0]), 0, 1)], token_ids=tokens)
    both = {"a": np.array([1, 2]), "b": [1, 3]}
    for tokens_of in (None, {}, {"b": [1, 3]}):
        refused(lambda ids=tokens_of: ledger.consume(0, ["a", "b"], token_ids=ids), "sample a was entered with token")
    refused(lambda: ledger.consume(0, ["a"], token_ids=both), "token ids of b")
    refused(lambda: ledger.consume(0, ["bare"], token_ids={"bare": [1]}), "bare was entered without token ids")
    refused(lambda: ledger.consume(0, ["a"], token_ids={"a": [1, 2.0]}), "token id 2.0 at 1")
    refused(lambda: ledger.consume(0.0, ["bare"]), "step is 0.0")
    assert not ledger.steps
    assert ledger.consume(0, ["a", "b", "bare"], token_ids=both).tokens == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": [4]}, "1 token ids for 2 generated"),
        ({"token_ids": [4, 5.0, 6]}, "token id 5.0 at 1"),
        ({"token_ids": [4, -5, 6]}, "token id -5 at 1"),
        ({"token_ids": [4, True, 6]}, "token id True at 1"),
        ({"token_ids": torch.tensor([4.0, 5.0, 6.0])}, "at 0"),
        ({"token_ids": "456"}, "token ids are '456'"),
        ({"generated": 2.0}, "generated=2.0"),
        ({"generated": -1, "spans": []}, "generated=-1"),
        ({"generated": True}, "generated=True"),
        ({"spans": [(str(V[0]), 0, 2.5)]}, "must be integers"),
        ({"sample_id": 5}, "sample id 5"),
    ],
    ids=str,
)
def test_ledger_samples_that_are_no_token_counts_are_refused_and_not_written(tmp_path, change, named):
    path = tmp_path / "ledger.jsonl"
    with StepLedger(path, run_id="run") as ledger:
        ledger.add_version(V[0])
        before = path.read_bytes()
        call = {"sample_id": "a", "generated": 2, "spans": [(str(V[0]), 0, 2)], "token_ids": [4, 5, 6], **change}
        refused(lambda: ledger.add_sample(call.pop("sample_id"), **call), named)
        assert path.read_bytes() == before
        assert not ledger.samples
    path.write_bytes(before + b'{"event":"sample","id":"a","generated":2.5,"spans":[],"tokens":null}\n')
    refused(lambda: StepLedger(path, run_id="run"), "line 3", "generated=2.5")


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
    "ids",
    [[1.5], [1.0], [True], [-1], ["1"], "12", b"12", None, 7, [[1]], torch.ones(2), torch.tensor([True]),
     torch.tensor([[1], [2]]), np.array([True]), [np.float64(1)], [None]],
)  # fmt: skip
def test_a_digest_of_tokens_that_are_no_integers_is_refused_as_the_ledger_does(ids):
    refused(lambda: tokens_digest(ids), "tokens_digest", "integers of 0 or more")
    with StepLedger(run_id="run") as ledger:
        ledger.add_version(V[0])
        if ids is not None:
            refused(lambda: ledger.add_sample("a", generated=0, spans=[], token_ids=ids), "integers of 0 or more")


def test_a_digest_of_tokens_is_sha256_of_the_decimal_numbers():
    assert tokens_digest([]) == hashlib.sha256(b"").hexdigest()
    want = hashlib.sha256(b"1,20,300").hexdigest()
    for ids in ([1, 20, 300], (1, 20, 300), np.array([1, 20, 300], np.int32), torch.tensor([1, 20, 300])):
        assert tokens_digest(ids) == want
    assert tokens_digest([12]) != tokens_digest([1, 2])


@pytest.mark.parametrize("run_id", ["a b", "", "a:b", "a\n", None, 3])
def test_a_run_id_that_no_version_can_carry_is_refused_by_both(run_id, tmp_path):
    refused(lambda: PolicyVersion(run_id, 0, "0" * 64), "run_id", "letters, digits")
    refused(lambda: StepLedger(tmp_path / "ledger", run_id=run_id), "run_id", "letters, digits")
    assert not list(tmp_path.iterdir())


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
