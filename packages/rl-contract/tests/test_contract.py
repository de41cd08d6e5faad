"""Contracts, profiles, bit comparison and launch evidence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_contract import (
    Contract,
    ContractError,
    Launch,
    Profile,
    Settings,
    compare,
    launches,
    record_launch,
    reset_launches,
)


def contract(**changes):
    base = {
        "boundary": "gemm.row",
        "dependency": "K",
        "partition": "4 leaves",
        "merge": "balanced tree",
        "precision": {"accumulator": "fp32"},
        "rounding": ("output",),
        "primitives": {},
    }
    return Contract(**{**base, **changes})


SETTINGS = Settings(hidden_size=64, vocab_size=100, norm_eps=1e-6, rope={"theta": 1e6, "rotary_dim": 32})


def test_fingerprint_survives_json_and_sees_every_field():
    a = contract()
    assert Contract.from_dict(a.to_dict()).fingerprint == a.fingerprint
    changes = [
        {"boundary": "x"}, {"dependency": "x"}, {"partition": "x"}, {"merge": "x"}, {"precision": {}},
        {"rounding": ()}, {"primitives": {"exp2": "x"}}, {"arch": "sm90"},
    ]  # fmt: skip
    prints = {contract(**c).fingerprint for c in changes}
    assert len(prints) == len(changes)
    assert a.fingerprint not in prints


def test_fingerprint_ignores_mapping_order():
    a = contract(precision={"input": "bf16", "accumulator": "fp32"})
    b = contract(precision={"accumulator": "fp32", "input": "bf16"})
    assert a.fingerprint == b.fingerprint


@pytest.mark.field_report("R44")
def test_profile_names_the_field_that_differs():
    a = Profile(name="a", settings=SETTINGS, contracts={"gemm.row": contract()})
    b = Profile(name="b", settings=SETTINGS, contracts={"gemm.row": contract(merge="left fold")})
    assert a.fingerprint != b.fingerprint
    assert a.differences(b) == ["gemm.row.merge: 'balanced tree' != 'left fold'"]
    assert Profile.from_dict(a.to_dict()).fingerprint == a.fingerprint
    assert Profile(name="other", settings=SETTINGS, contracts=a.contracts).fingerprint == a.fingerprint


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"leaves": 3}, "leaves=3"),
        ({"arch": "sm75"}, "sm75"),
        ({"dtype": "int8"}, "int8"),
        ({"segment": 100}, "segment=100"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_settings_refuse_and_name_the_value(change, word):
    with pytest.raises(ContractError, match=word):
        Settings(**{**SETTINGS.to_dict(), **change})


def test_compare_signed_zero_nan_payload_and_denormal_are_bits():
    a = torch.tensor([0.0, math.nan, 1e-45, math.inf])
    assert compare(a, a.clone()).mismatch_count == 0
    b = a.clone()
    b[0] = -0.0
    v = compare(a, b)
    assert (v.mismatch_count, v.max_abs_diff, v.max_ulp) == (1, 0.0, 0)
    assert v.first_mismatch.index == (0,)
    assert v.first_mismatch.b_bits == "0x80000000"
    c = a.clone()
    c.view(torch.int32)[1] += 1
    assert compare(a, c).mismatch_count == 1
    d = a.clone()
    d[2] = 0.0
    assert compare(a, d).max_ulp == 1


@pytest.mark.field_report("R44", "R99")
def test_compare_one_token_off_by_one_ulp_is_one_mismatch():
    # R99: a KL rounds this to zero, an integer does not
    a = torch.full((4096,), -1.2345)
    b = a.clone()
    b.view(torch.int32)[777] += 1
    v = compare(a, b)
    assert (v.valid_count, v.mismatch_count, v.max_ulp) == (4096, 1, 1)
    assert v.first_mismatch.index == (777,)
    mask = torch.ones(4096, dtype=torch.bool)
    mask[777] = False
    assert compare(a, b, mask).mismatch_count == 0
    assert compare(a, b, mask).valid_count == 4095


@pytest.mark.field_report("R81")
def test_compare_empty_mask_is_zero_valid_not_nan():
    a = torch.zeros(8)
    v = compare(a, a, torch.zeros(8, dtype=torch.bool))
    assert (v.valid_count, v.mismatch_count, v.max_abs_diff) == (0, 0, 0.0)


def test_compare_refuses_another_dtype():
    with pytest.raises(ContractError, match="bfloat16"):
        compare(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_compare_is_reflexive(values):
    x = torch.tensor(values)
    assert compare(x, x.clone()).bitwise_equal


def test_launches_count_by_kind():
    reset_launches()
    record_launch(Launch("norm", "k"))
    record_launch(Launch("norm", "k"), 2)
    record_launch(Launch("norm", "k", layout="tp2"))
    assert [(r["layout"], r["count"]) for r in launches()] == [("-", 3), ("tp2", 1)]
    reset_launches()
    assert launches() == []
