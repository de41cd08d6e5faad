"""Every sample is consumed by one step, with the tokens it was entered with and versions that were served."""

import hashlib

import numpy as np
import pytest
import torch
from ledger_runs import V, refused, train

from vime_sync import PolicyVersion, Span, StepLedger, check_spans, spans_from_pauses, tokens_digest


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
