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
        {"boundary": "x"}, {"dependency": "x"}, {"partition": "x"}, {"merge": "x"}, {"precision": {"state": "fp64"}},
        {"rounding": ()}, {"primitives": {"exp2": "x"}}, {"arch": "sm90"},
    ]  # fmt: skip
    prints = {contract(**c).fingerprint for c in changes}
    assert len(prints) == len(changes)
    assert a.fingerprint not in prints


def test_fingerprint_ignores_mapping_order():
    a = contract(precision={"input": "bf16", "accumulator": "fp32"})
    b = contract(precision={"accumulator": "fp32", "input": "bf16"})
    assert a.fingerprint == b.fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounding": "abc"}, "rounding='abc', supported: a list"),
        ({"rounding": ("output", 1)}, r"rounding=\('output', 1\), supported: a list"),
        ({"precision": None, "merge": 3}, "merge=3, supported: a text; precision=None, supported: a mapping"),
        ({"precision": {"speed": "fp32"}, "arch": ""}, r"'arch' is empty.*precision has \['speed'\]"),
        ({"primitives": {"exp2": 1}}, "primitives={'exp2': 1}, supported: a mapping"),
        ({"precision": {}, "merge": " "}, "'merge' is empty.*'precision' is empty"),
        ({"colour": "x", "shape": "y"}, r"unknown keys \['colour', 'shape'\]"),
    ],
)
def test_a_malformed_contract_is_refused_and_lists_all(change, words):
    with pytest.raises(ContractError, match=words):
        Contract.from_dict({**contract().to_dict(), **change})


def test_missing_fields_of_contracts_and_profiles_are_listed():
    with pytest.raises(
        ContractError, match=r"Contract: lacks \['dependency', .*'rounding'\]; has unknown keys \['x'\]"
    ):
        Contract.from_dict({"boundary": "gemm.row", "x": 1})
    with pytest.raises(ContractError, match="Contract: got 'None'"):
        Contract.from_dict(None)
    with pytest.raises(ContractError, match=r"Settings: lacks \['hidden_size', 'vocab_size', 'norm_eps', 'rope'\]"):
        Settings.from_dict({})
    good = Profile(name="p", settings=SETTINGS, contracts={"gemm.row": contract()}).to_dict()
    assert Profile.from_dict(good).to_dict() == good
    for bad, words in (
        ({}, r"Profile: lacks \['name', 'settings'\]"),
        ([], "Profile: got"),
        (good | {"name": None, "colour": 1}, r"unknown keys \['colour'\].*name=None"),
        ({k: v for k, v in good.items() if k != "contracts"}, r"lacks \['contracts'\]"),
        (good | {"contracts": ["gemm.row"]}, r"contracts=\['gemm.row'\], supported: a mapping"),
        (
            good | {"settings": {"leaves": 3}, "contracts": {"norm": {}, "gemm.row": {"boundary": "x"}}},
            "Settings: lacks.*norm: Contract: lacks.*gemm.row: Contract: lacks",
        ),
    ):
        with pytest.raises(ContractError, match=words):
            Profile.from_dict(bad)


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
        ({"norm_eps": 1e-60}, "norm_eps=1e-60"),
        ({"norm_eps": 1e39}, r"norm_eps=1e\+39"),
        ({"norm_eps": 10**400}, "norm_eps=1000"),
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


@pytest.mark.parametrize(
    ("dtype", "low", "high", "diff", "ulp"),
    [
        # bytes, by the tables of the OCP formats: e4m3 0x38 is 1, 0x3a 1.25, e5m2 0x3c is 1, 0x3e 1.5
        (torch.float8_e4m3fn, 0x38, 0x3A, 0.25, 2),
        (torch.float8_e5m2, 0x3C, 0x3E, 0.5, 2),
        (torch.float8_e4m3fn, 0x81, 0x01, 2.0**-8, 2),
        (torch.float8_e8m0fnu, 127, 129, 3.0, 2),
    ],
)
def test_compare_counts_float8_in_its_own_steps(dtype, low, high, diff, ulp):
    a = torch.full((5, 3), low, dtype=torch.uint8)
    b = a.clone()
    b[2, 1] = high
    assert compare(a.view(dtype), a.view(dtype)).bitwise_equal
    verdict = compare(a.view(dtype), b.view(dtype))
    assert (verdict.mismatch_count, verdict.max_abs_diff, verdict.max_ulp) == (1, diff, ulp)
    assert (verdict.first_mismatch.index, verdict.first_mismatch.b_bits) == ((2, 1), f"0x{high:02x}")
    b[0, 0] = 0xFF  # NaN in each of the formats
    assert compare(a.view(dtype), b.view(dtype)).nonfinite_count == 1


def test_compare_refuses_what_has_no_bits_to_count():
    for bad, words in (
        (torch.ones(2, dtype=torch.complex64), "complex64.*view_as_real"),
        (torch.ones(2, dtype=torch.uint16), "uint16"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        ([1.0], r"\[1.0\]"),
        (torch.ones(2, device="meta"), "on meta; supported: dense tensors with bytes"),
    ):
        with pytest.raises(ContractError, match=f"compare got.*{words}"):
            compare(bad, bad)
        with pytest.raises(ContractError, match=f"compare got.*{words}"):
            compare(torch.ones(2), torch.ones(2), bad)


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
    "one row twice": (torch.zeros(3).expand(2, 3), "strides (0, 1), in which elements share memory"),
    "rows that overlap": (torch.zeros(4).as_strided((2, 3), (1, 1)), "strides (1, 1), in which elements share memory"),
    "sparse": (torch.zeros(2, 3).to_sparse(), "torch.sparse_coo"),
}


@pytest.mark.parametrize("name", BAD_MAIN_GRADS)
def test_main_grad_of_another_kind_is_refused_and_left_as_it_was(name):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.main_grad, words = BAD_MAIN_GRADS[name]
    with pytest.raises(ContractError, match=re.escape(words)):
        add_to_main_grad(weight, torch.ones(2, 3))
    if name not in ("meta", "a list", "sparse"):
        assert not weight.main_grad.any()


@pytest.mark.parametrize("view", [torch.zeros(3, 2).t(), torch.zeros(2, 8)[:, ::3], torch.zeros(9, 3)[::5]])
def test_main_grad_with_a_place_for_every_element_is_added_to_whatever_its_strides(view):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.main_grad = view
    grad = torch.arange(6.0).view(2, 3)
    assert add_to_main_grad(weight, grad) is None
    assert torch.equal(weight.main_grad, grad)


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
    # no launch is none to claim anything from
    record_launch(Launch("swiglu", "k"), 0)
    assert [(r["layout"], r["count"]) for r in launches()] == [("-", 3), ("tp2", 1)]
    reset_launches()
    assert launches() == []


def test_what_is_no_launch_is_refused_and_leaves_the_counts():
    reset_launches()
    record_launch(Launch("norm", "k"))
    for bad in ("x", None, {"boundary": "norm", "kernel": "k"}):
        with pytest.raises(ContractError, match="supported: a Launch"):
            record_launch(bad)
    for bad in ({"kernel": 3}, {"boundary": None}, {"plan": None}, {"layout": ["x"]}, {"phase": 1}):
        with pytest.raises(ContractError, match="supported: a Launch whose fields are texts"):
            Launch(**{"boundary": "norm", "kernel": "k", **bad})
    for count in (1.5, -1, True, "2"):
        with pytest.raises(ContractError, match="count="):
            record_launch(Launch("norm", "k"), count)
    assert [row["count"] for row in launches()] == [1]
    reset_launches()


def test_a_profile_of_no_settings_and_a_difference_to_no_contract_are_refused_by_name():
    from rl_contract import build_profile

    for settings in ({}, None, "cpu"):
        with pytest.raises(ContractError, match=r"build_profile got settings.*supported: Settings"):
            build_profile("x", settings)
    for name in ("", None, 3):
        with pytest.raises(ContractError, match="build_profile got name="):
            build_profile(name, SETTINGS)
    with pytest.raises(ContractError, match="supported: a Contract"):
        contract().differences(contract().to_dict())


def test_a_profile_that_its_settings_do_not_make_is_refused_by_boundary(monkeypatch):
    from types import SimpleNamespace

    from rl_contract import build_profile, check_built

    made = SimpleNamespace(
        name="gemm.row", load=lambda: lambda settings: contract(partition=f"{settings.leaves} leaves")
    )
    monkeypatch.setattr("rl_contract.profile.entry_points", lambda group: [made])
    whole = build_profile("p", SETTINGS)
    check_built(whole)
    for contracts, named in (
        ({}, "gemm.row: present on one side only"),
        ({"gemm.row": contract(partition="2 leaves")}, "gemm.row.partition: '2 leaves' != '1 leaves'"),
        ({**whole.contracts, "odd": contract(boundary="odd")}, "odd: present on one side only"),
    ):
        with pytest.raises(ContractError, match=named):
            check_built(Profile(name="p", settings=SETTINGS, contracts=contracts))
    with pytest.raises(ContractError, match="got str as a profile"):
        check_built("p.json")
