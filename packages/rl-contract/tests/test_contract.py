"""Contracts, profiles, bit comparison and launch evidence."""

import math
import re

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
    SingleRank,
    compare,
    launches,
    record_launch,
    reset_launches,
)
from rl_contract.gradients import add_to_main_grad


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
        ({"norm_eps": math.inf}, "norm_eps=inf"),
        ({"norm_eps": math.nan}, "norm_eps=nan"),
        ({"norm_eps": "1e-6"}, "norm_eps='1e-6'"),
        ({"hidden_size": 1.5}, "hidden_size=1.5"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"leaves": 2.0}, "leaves=2.0"),
        ({"key_tile": 64.0}, "key_tile=64.0"),
        ({"segment": 0}, "segment=0"),
        ({"rope": {}}, r"rope=\{\} lacks \['theta', 'rotary_dim'\]"),
        ({"rope": None}, "rope=None"),
        ({"rope": {"theta": 1e4}}, r"lacks \['rotary_dim'\]"),
        ({"rope": {"theta": math.nan, "rotary_dim": 32}}, "theta=nan"),
        ({"rope": {"theta": math.inf, "rotary_dim": 32}}, "theta=inf"),
        ({"rope": {"theta": 1.0, "rotary_dim": 32}}, "theta=1.0"),
        ({"rope": {"theta": 1e4, "rotary_dim": 31}}, "rotary_dim=31"),
        ({"rope": {"theta": 1e4, "rotary_dim": 32.0}}, "rotary_dim=32.0"),
        ({"rope": {"theta": 1e4, "rotary_dim": 32, "thetta": 5.0}}, "thetta"),
        ({"rope": {"theta": 1e4, "rotary_dim": 32, "rope_type": "yarn", "factor": math.nan}}, "factor=nan"),
    ],
)
def test_settings_refuse_and_name_the_value(change, word):
    with pytest.raises(ContractError, match=word):
        Settings(**{**SETTINGS.to_dict(), **change})


def test_settings_take_the_scaling_rules_of_hugging_face():
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False}
    for rule in (llama3, yarn):
        settings = Settings(**{**SETTINGS.to_dict(), "rope": {"theta": 10000, "rotary_dim": 32, **rule}})
        profile = Profile(name="a", settings=settings)
        assert Profile.from_dict(profile.to_dict()).fingerprint == profile.fingerprint
        assert settings.rope["factor"] == rule["factor"]


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
    # nothing was compared, so nothing is known to be equal
    assert not v.bitwise_equal
    assert not v.to_dict()["bitwise_equal"]
    assert not compare(a[:0], a[:0]).bitwise_equal
    assert compare(a, a).bitwise_equal


def test_compare_refuses_another_dtype():
    with pytest.raises(ContractError, match="bfloat16"):
        compare(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_compare_is_reflexive(values):
    x = torch.tensor(values)
    assert compare(x, x.clone()).bitwise_equal


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.all_reduce(torch.ones(2), out_dtype=torch.int32), "out_dtype=torch.int32"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.bfloat16)), "partial of torch.bfloat16"),
        (lambda c: c.reduce_scatter(torch.ones(2), dim=1), "dim=1"),
        (lambda c: c.reduce_scatter(torch.ones(2), out_dtype=torch.bool), "out_dtype=torch.bool"),
        (lambda c: c.all_gather(torch.ones(2), dim=-2), "dim=-2"),
    ],
)
def test_one_rank_refuses_what_many_refuse(call, words):
    with pytest.raises(ContractError, match=words):
        call(SingleRank())


BAD_MAIN_GRADS = {
    "more rows": (torch.zeros(4, 3), "(4, 3)"),
    "another view": (torch.zeros(3, 2), "(3, 2)"),
    "flat": (torch.zeros(6), "(6,)"),
    "bf16": (torch.zeros(2, 3, dtype=torch.bfloat16), "torch.bfloat16"),
    "meta": (torch.zeros(2, 3, device="meta"), "meta"),
    "a list": ([0.0] * 6, "list"),
}


@pytest.mark.parametrize("name", BAD_MAIN_GRADS)
def test_main_grad_of_another_kind_is_refused_and_left_as_it_was(name):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.main_grad, words = BAD_MAIN_GRADS[name]
    with pytest.raises(ContractError, match=re.escape(words)):
        add_to_main_grad(weight, torch.ones(2, 3))
    if name not in ("meta", "a list"):
        assert not weight.main_grad.any()


def test_main_grad_takes_the_sum_and_without_one_the_gradient_has_the_weight_type():
    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(add_to_main_grad(weight, torch.full((2, 3), 1 / 3)), torch.full((2, 3), 1 / 3).bfloat16())
    weight.main_grad = None
    assert add_to_main_grad(weight, torch.ones(2, 3)).dtype == torch.bfloat16
    weight.main_grad = torch.ones(2, 3)
    assert add_to_main_grad(weight, torch.full((2, 3), 1 / 3)) is None
    assert torch.equal(weight.main_grad, torch.full((2, 3), 1 / 3) + 1)


def test_launches_count_by_kind():
    reset_launches()
    record_launch(Launch("norm", "k"))
    record_launch(Launch("norm", "k"), 2)
    record_launch(Launch("norm", "k", layout="tp2"))
    assert [(r["layout"], r["count"]) for r in launches()] == [("-", 3), ("tp2", 1)]
    reset_launches()
    assert launches() == []
