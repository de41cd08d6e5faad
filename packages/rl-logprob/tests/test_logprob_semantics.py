"""What is compared with what: sampling semantics and what strict mode refuses."""

import contextlib

import numpy as np
import pytest
import torch

from rl_contract import ContractError
from rl_logprob import (
    SamplingSemantics,
    SupportIds,
    check_sampling_semantics,
    linear_logprob,
    padded_vocab_size,
    rollout_metrics,
    sampling_support,
    selected_logprob,
)
from rl_logprob.checks import fp32, usable_temperature


@pytest.mark.field_report("R01", "R07")
def test_r01_r07_two_sides_of_different_meaning_are_not_compared():
    rollout = SamplingSemantics(mode="raw", temperature=0.7)
    train = SamplingSemantics(temperature=0.7, top_p=0.95)
    assert rollout.differences(train) == ["mode: 'raw' != 'processed'", "top_p: 1.0 != 0.95"]
    with pytest.raises(ContractError, match=r"mode.*top_p.*give both engines one"):
        rollout.require_same(train)
    train.require_same(SamplingSemantics.from_dict(train.to_dict()))


@pytest.mark.field_report("R04")
def test_r04_strict_refusal_lists_every_violation_at_once():
    with pytest.raises(ContractError) as error:
        check_sampling_semantics(
            temperature=0.0,
            top_p=0.9,
            top_k=20,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={3: 1.0},
            bad_words=["x"],
        )
    for name in (
        "temperature=0.0",
        "top_p=0.9",
        "top_k=20",
        "min_p=0.1",
        "repetition_penalty=1.1",
        "presence_penalty=0.5",
        "frequency_penalty=-0.5",
        "logit_bias for 1 ids",
        "bad_words=['x']",
    ):
        assert name in str(error.value)


@pytest.mark.field_report("R06")
def test_r06_raw_on_both_sides_is_refused_unless_it_is_the_sampling_distribution():
    with pytest.raises(ContractError, match=r"mode='raw' at temperature=0\.6"):
        check_sampling_semantics(mode="raw", temperature=0.6)
    assert check_sampling_semantics(mode="raw").violations() == []


@pytest.mark.parametrize("off", [0, -1])
def test_supported_parameters_give_their_semantics(off):
    got = check_sampling_semantics(temperature=0.7, top_k=off)
    assert got == SamplingSemantics(temperature=0.7)
    assert got.to_dict()["penalties"] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-39, 1e300, float("inf"), float("nan")])
def test_temperature_out_of_range_is_refused(temperature):
    with pytest.raises(ContractError, match=r"temperature=.*; supported: positive and finite, at least 1\.18e-38"):
        check_sampling_semantics(temperature=temperature)
    assert not usable_temperature(temperature)


def test_every_place_takes_the_same_temperatures():
    """One predicate for numbers and tensors: what semantics take is what scoring takes, of what rounds to it, too."""
    tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    x, t = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    for value, good in (
        (tiny, True), (tiny * (1 - 2**-26), True), (tiny * (1 - 2**-22), False), (most, True), (1, True),
        (most * (1 + 2**-26), True), (most * (1 + 2**-22), False), (10**30, True), (np.float16(0.5), True),
    ):  # fmt: skip
        assert usable_temperature(value) is good
        assert usable_temperature(torch.tensor([fp32(value)])).tolist() == [good]
        for call in (
            lambda v: check_sampling_semantics(temperature=v),
            lambda v: selected_logprob(x, t, vocab_size=8, temperature=v),
        ):
            with contextlib.nullcontext() if good else pytest.raises(ContractError, match="temperature"):
                call(value)


LONG = 10**5000


@pytest.mark.parametrize(
    "call",
    [
        lambda x, t, n: selected_logprob(x, t, vocab_size=8, temperature=n),
        lambda x, t, n: selected_logprob(x, t, vocab_size=n),
        lambda x, t, n: selected_logprob(x, t, vocab_size=8, vocab_tile=n),
        lambda x, t, n: selected_logprob(x, t, vocab_size=8, nonfinite=n),
        lambda x, t, n: linear_logprob(x, x, t, vocab_size=2, vocab_tile=2, leaves=n),
        lambda x, t, n: linear_logprob(x, x, t, vocab_size=2, vocab_tile=2, leaves=abs(n) // 10**5000 << 20_000),
        lambda x, t, n: linear_logprob(x, x, t, vocab_size=2, vocab_tile=2, keep_logits=-abs(n)),
        lambda x, t, n: sampling_support(x, vocab_size=8, top_k=n),
        lambda x, t, n: sampling_support(x, vocab_size=8, top_p=n),
        lambda x, t, n: SupportIds.from_lists([[n]]),
        lambda x, t, n: padded_vocab_size(8, -abs(n)),
        lambda x, t, n: check_sampling_semantics(temperature=n),
        lambda x, t, n: check_sampling_semantics(top_k=abs(n)),
        lambda x, t, n: check_sampling_semantics(min_p=n),
        lambda x, t, n: check_sampling_semantics(repetition_penalty=n),
        lambda x, t, n: SamplingSemantics(mode=n),
    ],
)
@pytest.mark.parametrize("number", [LONG, -LONG], ids=["above", "below"])
def test_an_integer_that_python_does_not_write_is_refused_by_name(call, number):
    x, t = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ContractError, match=r"an integer of [0-9]+ bits|a tuple") as told:
        call(x, t, number)
    assert len(str(told.value)) < 400


def test_a_long_number_is_shown_in_part():
    x, t = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ContractError, match=r"temperature=10{79}; needs a number that fp32 holds"):
        selected_logprob(x, t, vocab_size=8, temperature=10**400)


def test_unknown_mode_is_refused():
    with pytest.raises(ContractError, match="mode='processed_logits'"):
        SamplingSemantics(mode="processed_logits")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"penalties": (1, 0)}, r"penalties=\(1, 0\)"),
        ({"penalties": (1, 0, 0, 0)}, r"penalties=\(1, 0, 0, 0\)"),
        ({"penalties": 1.0}, r"penalties=1\.0"),
        ({"penalties": (1, None, 0)}, r"penalties=\(1, None, 0\)"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": None}, "top_p=None"),
        ({"top_k": 1.5}, r"top_k=1\.5"),
        ({"top_k": None}, "top_k=None"),
        ({"min_p": True}, "min_p=True"),
        ({"colour": 1}, r"unknown \['colour'\]"),
    ],
    ids=str,
)
def test_semantics_that_are_no_numbers_are_refused_by_name(change, named):
    with pytest.raises(ContractError, match=named):
        SamplingSemantics.from_dict({"temperature": 1.0, **change})
    assert SamplingSemantics(penalties=[1, 0, 0]) == SamplingSemantics()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x, t: selected_logprob(x, t, vocab_size=8.0), r"vocab_size=8\.0"),
        (lambda x, t: selected_logprob(x, t, vocab_size=8, vocab_tile=4.0), r"vocab_tile=4\.0"),
        (lambda x, t: selected_logprob(x, t, vocab_size=8, temperature="1"), "temperature='1'"),
        (lambda x, t: selected_logprob(x, t, vocab_size=8, temperature=None), "temperature=None"),
        (lambda x, t: padded_vocab_size(8.5), r"vocab_size=8\.5"),
        (lambda x, t: linear_logprob(x, x, t, vocab_size=2, vocab_tile=2, keep_logits=0.5), r"keep_logits=0\.5"),
        (lambda x, t: rollout_metrics(x[0], x[0], x[0] == 0, sample_ids=x[0]), r"sample_ids is torch\.float32"),
    ],
)
def test_sizes_and_ids_that_are_no_integers_are_refused(call, named):
    with pytest.raises(ContractError, match=named):
        call(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64))
