"""Kept ids that are not what they are used for: no ids, other rows, another temperature, none of a row."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from kept_case import TILE, VOCAB, make

import rl_logprob as lp
from rl_contract import ContractError

ROWS = torch.linspace(0.5, 2.0, 37)


def users(logits, h, w, support, temperature, **kw):
    """Every function that takes a support, by name."""
    targets = torch.zeros(len(logits), dtype=torch.int64)
    given_ = {"vocab_size": VOCAB, "temperature": temperature, "support": support}
    return {
        "selected": lambda: lp.selected_logprob(logits, targets, vocab_tile=TILE, **given_, **kw),
        "linear": lambda: lp.linear_logprob(h, w, targets, vocab_tile=TILE, **given_, **kw),
        "gumbel": lambda: lp.gumbel_sample(logits, targets, targets, **given_),
        "ids": lambda: support.ids(logits, vocab_size=VOCAB, temperature=temperature),
    }


def test_refusals():
    logits, targets = torch.randn(3, 20), torch.zeros(3, dtype=torch.int64)
    key = lp.sampling_support(logits, vocab_size=20, top_k=2)
    cases = [
        (lambda: lp.sampling_support(logits, vocab_size=20, top_p=0.0), "top_p=0.0 in row 0"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_p=1.5), "top_p=1.5"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_p=math.nan), "top_p=nan"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_k=-2), "top_k=-2"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_k=2.0), "top_k=2.0; needs an integer"),
        (lambda: lp.sampling_support(logits, vocab_size=20, top_k=torch.ones(3)), "needs integers"),
        (lambda: lp.sampling_support(logits, vocab_size=20, min_p=torch.tensor([0.0, 0.5, 2.0])), "min_p=2.0 in row 2"),
        (lambda: lp.sampling_support(logits, vocab_size=20, min_p=torch.zeros(2)), r"floats \[3\]"),
        (lambda: lp.sampling_support(logits, vocab_size=20, temperature=0.0), "temperature 0.0"),
        (lambda: lp.sampling_support(torch.empty(0, 2**21), vocab_size=2**21), "up to 1048576"),
        (lambda: lp.selected_logprob(logits, targets, vocab_size=20, support=key[:2]), "support has 2 rows"),
        (lambda: lp.selected_logprob(logits, targets, vocab_size=20, support=[1]), "support is a list"),
        (lambda: lp.gumbel_sample(logits, targets, targets, vocab_size=20, support=key[:1]), "support has 1 rows"),
        (
            lambda: lp.selected_logprob(
                logits, targets, vocab_size=20, support=lp.SupportIds.from_lists([[1], [20], [2]])
            ),
            r"ids 1\.\.20; supported: 0\.\.19",
        ),
        (lambda: lp.SupportKey([1], 2), "threshold is list"),
        (lambda: lp.SupportKey(torch.zeros(3), 2), "last_id is int"),
        (lambda: lp.SupportIds([1], torch.tensor([0, 1])), "ids is list"),
        (lambda: lp.SupportIds(torch.zeros(1, dtype=torch.int32), [0, 1]), "starts is list"),
        (lambda: lp.SupportKey(torch.zeros(3), torch.zeros(2, dtype=torch.int64)), "last_id"),
        (lambda: lp.SupportIds(torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2])), "climb from 0"),
        (
            lambda: lp.selected_logprob(
                logits, targets, vocab_size=20, support=lp.SupportKey(torch.full((3,), math.nan), targets)
            ),
            "threshold of row 0 is NaN",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ContractError, match=message):
            call()


def test_lists_of_ids_hold_integers_alone():
    want = lp.SupportIds.from_lists([[1, 5], [7]])
    for rows in ([np.array([1, 5]), torch.tensor([7])], [(1, np.int64(5)), [7]]):
        got = lp.SupportIds.from_lists(rows)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.starts, want.starts)
    for rows, words in (
        ([[1.5], [5.9]], "row 0 lists the id 1.5"),
        ([[1], [5.0]], "row 1 lists the id 5.0"),
        ([[True]], "the id True"),
        ([["1"]], "the id '1'"),
        (["12"], "row 0 of the kept ids is '12'"),
        ([[1], 3], "row 1 of the kept ids is 3"),
        ([[-1]], "the id -1"),
        ([[2**31]], "the id 2147483648"),
        ([np.array([1.5])], "the id 1.5"),
        ([torch.tensor([1.0])], "the id 1.0"),
    ):
        with pytest.raises(ContractError, match=words):
            lp.SupportIds.from_lists(rows)


@pytest.mark.parametrize(
    ("made", "used", "words"),
    [
        (0.5, 1.0, r"made at temperature 0\.5 and is used at 1, in row 0"),
        (1.0, 0.5, r"made at temperature 1 and is used at 0\.5, in row 0"),
        (ROWS, ROWS.flip(0), r"made at temperature 0\.5 and is used at 2, in row 0"),
        (ROWS, 0.5, "is used at 0.5, in row 1"),
        (0.5, ROWS, r"made at temperature 0\.5 and is used at .*in row 1"),
    ],
)
def test_a_key_is_refused_at_another_temperature(made, used, words):
    h, w, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, temperature=made, top_k=5)
    for call in users(logits, h, w, key, used).values():
        with pytest.raises(ContractError, match=words):
            call()
    for call in users(logits, h, w, key, made).values():
        call()


def test_a_temperature_follows_its_rows_and_costs_no_byte_a_row():
    _, _, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, temperature=ROWS, top_k=5)
    assert torch.equal(key.temperature, ROWS)
    assert torch.equal(key[3:9].to("cpu").temperature, ROWS[3:9])
    assert key[4:5].temperature == float(ROWS[4])
    assert torch.equal(key[torch.tensor([7, 2])].temperature, ROWS[[7, 2]])
    again = lp.SupportKey.cat([key[:1], key[1:1], key[1:2], key[2:]])
    assert torch.equal(again.temperature, ROWS)
    same = lp.SupportKey.cat([key[4:5], key[4:5]])
    assert same.temperature == float(ROWS[4])
    bare = lp.SupportKey(key.threshold, key.last_id)
    assert bare.temperature is lp.SupportKey.cat([key, bare]).temperature is None
    assert pickle.loads(pickle.dumps(same)).temperature == same.temperature
    assert pickle.loads(pickle.dumps(key)).temperature is None
    assert len(pickle.dumps(key)) == len(pickle.dumps(bare))
    # 0.8 in fp64 and in fp32 are one temperature, as they are to the kernels
    near = lp.sampling_support(logits, vocab_size=VOCAB, temperature=torch.full((37,), 0.8), top_k=5)
    near.ids(logits, vocab_size=VOCAB, temperature=0.8)
    with pytest.raises(ContractError, match="temperature -1"):
        lp.SupportKey(key.threshold, key.last_id, -1.0)


def test_a_caller_who_divided_names_the_temperature():
    h, w, logits, _ = make()
    key = lp.sampling_support(logits / 0.5, vocab_size=VOCAB, top_k=5)
    key = dataclasses.replace(key, temperature=0.5)
    whole = lp.sampling_support(logits, vocab_size=VOCAB, temperature=0.5, top_k=5)
    want = users(logits, h, w, whole, 0.5)["linear"]()
    assert torch.equal(users(logits, h, w, key, 0.5)["linear"](), want)


def test_a_support_without_an_id_is_refused_by_name():
    h, w, logits, _ = make()
    key = lp.sampling_support(logits, vocab_size=VOCAB, temperature=0.5, top_k=5)
    unknown = lp.SupportKey(key.threshold, key.last_id)
    empty = [not bool(row.any()) for row in logits[:, :VOCAB] >= key.threshold[:, None]]
    first, count = empty.index(True), sum(empty)
    for name, call in users(logits, h, w, unknown, 1.0).items():
        rows = r"\d+" if name == "gumbel" else count
        shown = rf"support of row {first} keeps no id \({rows} such rows\).*another temperature"
        with pytest.raises(ContractError, match=shown):
            call()
    listed_ = lp.SupportIds.from_lists([[], *[[0]] * 36])
    for name, call in users(logits, h, w, listed_, 1.0).items():
        if name != "ids":
            with pytest.raises(ContractError, match="support of row 0 keeps no id"):
                call()
    logp, rescued = users(logits, h, w, unknown, 1.0, nonfinite="nan", return_rescued=True)["selected"]()
    assert bool(rescued[empty].all())
    assert not bool(logp[empty].any())
    # one kept id that equals the target's value is no empty support
    ties = torch.zeros(1, 4)
    only = lp.sampling_support(ties, vocab_size=4, top_k=1)
    got = lp.selected_logprob(ties, torch.tensor([3]), vocab_size=4, support=only)
    torch.testing.assert_close(got, torch.tensor([-math.log(2.0)]))
