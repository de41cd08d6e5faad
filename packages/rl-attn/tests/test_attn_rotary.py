"""Rotary: an fp32 table that nothing casts, exact steps, scaling rules, and the inverse as gradient."""

import copy
import math

import numpy as np
import pytest
import torch

import rl_attn
from rl_attn import rope_table
from rl_attn.reference import rotary_reference
from rl_attn.rope import inverse_frequencies
from rl_contract import ContractError, launches

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def exact_cos(position, theta, dim, i):
    return math.cos(position * theta ** (-2 * i / dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(4, 2, 32, 32), (3, 7, 40, 16), (1, 1, 8, 2)]
)
def test_rotation_equals_reference(heads, kv_heads, head_dim, rotary_dim, dtype):
    g = torch.Generator().manual_seed(0)
    table = rope_table(5000, rotary_dim, 1e4)
    at = torch.randint(0, 5000, (2000,), generator=g)
    q, k = (torch.randn(2000, h, head_dim, generator=g).to(dtype) for h in (heads, kv_heads))
    for mine, x in zip(rl_attn.rotary(q, k, at, table), (q, k)):
        assert torch.equal(mine, rotary_reference(x, at, table.cos, table.sin))
        assert torch.equal(mine[..., rotary_dim:], x[..., rotary_dim:])
    assert [row["kernel"] for row in launches()] == ["rl_attn.cpu_rotary.rotate"]


def test_a_million_outputs_and_a_contracted_product_is_caught():
    g = torch.Generator().manual_seed(0)
    table = rope_table(4096, 64, 1e6)
    at = torch.arange(4096)
    x = torch.randn(4096, 4, 64, generator=g)
    mine, _ = rl_attn.rotary(x, x, at, table)
    c, s = table.cos[:, None].double(), table.sin[:, None].double()
    # x1 * cos kept exact, as a fused multiply-add would
    fused = (x[..., :32].double() * c - (x[..., 32:] * table.sin[:, None]).double()).float()
    plain = x[..., :32] * table.cos[:, None] - x[..., 32:] * table.sin[:, None]
    assert mine.numel() > 1_000_000
    assert torch.equal(mine[..., :32], plain)
    assert int((mine[..., :32] != fused).sum()) > 10_000
    assert float((mine[..., :32].double() - (x[..., :32].double() * c - x[..., 32:].double() * s)).abs().max()) < 1e-6


def test_batch_row_alone_equals_row_in_batch_and_strided():
    table = rope_table(600, 32, 1e4)
    qkv = torch.randn(600, 9, 40).bfloat16()
    q, k = qkv[:, 1:5, 3:35], qkv[:, 6:8, 3:35]
    at = torch.arange(600)
    whole_q, whole_k = rl_attn.rotary(q, k, at, table)
    for t in (0, 255, 599):
        one_q, one_k = rl_attn.rotary(q[t : t + 1], k[t : t + 1], at[t : t + 1].int(), table)
        assert torch.equal(one_q[0], whole_q[t])
        assert torch.equal(one_k[0], whole_k[t])


def test_gradient_is_the_inverse_rotation():
    table = rope_table(300, 24, 1e4)
    at = torch.randint(0, 300, (50,))
    q, k = torch.randn(50, 4, 32, requires_grad=True), torch.randn(50, 2, 32, requires_grad=True)
    gq, gk = torch.randn(50, 4, 32), torch.randn(50, 2, 32)
    out_q, out_k = rl_attn.rotary(q, k, at, table)
    (out_q * gq).sum().backward(retain_graph=True)
    (out_k * gk).sum().backward()
    assert torch.equal(q.grad, rotary_reference(gq, at, table.cos, -table.sin))
    assert torch.equal(k.grad, rotary_reference(gk, at, table.cos, -table.sin))


@pytest.mark.field_report("R25")
@pytest.mark.parametrize(("theta", "dim"), [(1e4, 128), (1e6, 64), (5e5, 96)])
def test_table_is_fp64_rounded_once(theta, dim):
    # R25, C11: positions where a bf16 position, table or inverse frequency goes wrong
    table = rope_table(32768, dim, theta)
    for position in (0, 1, 255, 256, 257, 4097, 32767):
        angle = position * theta ** (-np.arange(0, dim, 2) / dim)
        for mine, exact in ((table.cos, np.cos(angle)), (table.sin, np.sin(angle))):
            assert float(np.abs(mine[position].double().numpy() - exact).max()) <= 2**-25 + 1e-11
            # what a bf16 copy would hold is far outside that bound
            if position:
                as_bf16 = mine[position].bfloat16().double().numpy()
                assert float(np.abs(as_bf16 - exact).max()) > 1e-4


def test_table_reaches_two_to_the_twentieth():
    table = rope_table(2**20, 4, 1e4)
    for position in (2**20 - 1, 2**19 + 1, 999_983):
        for i in (0, 1):
            assert abs(float(table.cos[position, i]) - exact_cos(position, 1e4, 4, i)) < 2**-24
    with pytest.raises(ContractError, match="1048577"):
        rope_table(2**20 + 1, 4, 1e4)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 2))
        self.rope = rope_table(512, 128, 1e6)


@pytest.mark.field_report("R25")
def test_table_survives_bf16_deepcopy_and_reload():
    layer = Layer()
    cos = layer.rope.cos.clone()
    layer.to(torch.bfloat16)
    layer.half().float().bfloat16()
    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())
    assert list(layer.state_dict()) == ["weight"]
    for module in (layer, twin):
        assert module.weight.dtype == torch.bfloat16
        assert module.rope.cos.dtype == torch.float32
        assert torch.equal(module.rope.cos, cos)
    for position in (255, 256, 257):
        assert abs(float(layer.rope.cos[position, 1]) - exact_cos(position, 1e6, 128, 1)) < 1e-7


def test_table_survives_a_caster_of_forward_arguments():
    # FSDP casts floating tensors inside lists, dicts and dataclasses that are passed to forward
    from torch.distributed.utils import _apply_to_tensors

    table = rope_table(16, 8, 1e4)
    (cast,) = _apply_to_tensors(lambda x: x.bfloat16(), (table,))
    assert cast.cos.dtype == torch.float32


def test_llama3_scaling_keeps_high_and_divides_low_frequencies():
    plain, _ = inverse_frequencies(128, 5e5)
    scaled, factor = inverse_frequencies(128, 5e5, LLAMA3)
    wavelength = 2 * math.pi / plain
    assert factor == 1.0
    assert (scaled[wavelength < 8192 / 4] == plain[wavelength < 8192 / 4]).all()
    assert (scaled[wavelength > 8192] == plain[wavelength > 8192] / 8).all()
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    smooth = (8192 / wavelength[between] - 1) / 3
    assert between.sum() >= 4
    assert np.allclose(scaled[between], plain[between] * ((1 - smooth) / 8 + smooth), rtol=1e-14)


def test_yarn_scaling_blends_between_the_two_betas():
    plain, _ = inverse_frequencies(128, 1e6)
    scaled, factor = inverse_frequencies(128, 1e6, YARN)
    dim_of = [64 * math.log(32768 / (b * 2 * math.pi)) / math.log(1e6) for b in (32, 1)]
    low, high = math.floor(dim_of[0]), math.ceil(dim_of[1])
    assert (scaled[: low + 1] == plain[: low + 1]).all()
    assert (scaled[high:] == plain[high:] / 4).all()
    assert abs(factor - (0.1 * math.log(4) + 1)) < 1e-15
    assert inverse_frequencies(128, 1e6, {**YARN, "attention_factor": 1.5})[1] == 1.5
    table = rope_table(3, 128, 1e6, YARN)
    assert abs(float(table.cos[0, 0]) - factor) < 1e-7


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope"}, "'longrope'"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({**LLAMA3, "beta_fast": 3}, "beta_fast"),
        ({"rope_type": "default", "factor": 3.0}, "factor"),
    ],
)
def test_unknown_scaling_is_refused_by_name(scaling, message):
    with pytest.raises(ContractError, match=message):
        rope_table(16, 64, 1e4, scaling)


NUMBERS = {
    "llama3": (LLAMA3, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": (
        YARN,
        ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale"),
    ),
}


@pytest.mark.parametrize("bad", [0, -1, -1.0, math.nan, math.inf, "8", True])
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, (_, names) in NUMBERS.items() for n in names])
def test_scaling_numbers_that_are_not_positive_and_finite_are_refused(kind, name, bad):
    rule = {**NUMBERS[kind][0], name: bad}
    if name == "mscale" and bad == 0:
        assert inverse_frequencies(128, 1e6, rule)[1] == inverse_frequencies(128, 1e6, YARN)[1]
        return
    with pytest.raises(ContractError, match=f"{name}={bad!r}"):
        rope_table(16, 64, 1e4, rule)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({**LLAMA3, "low_freq_factor": 4.0}, "must be above low_freq_factor=4.0"),
        ({**YARN, "beta_fast": 1.0}, "beta_fast=1.0 must be above beta_slow=1.0"),
        ({**YARN, "beta_slow": 40}, "must be above beta_slow=40.0"),
        ({**YARN, "original_max_position_embeddings": 1}, "original_max_position_embeddings=1.0"),
        ({**YARN, "truncate": "no"}, "truncate='no'"),
        ({**YARN, "type": "llama3"}, "rope_type='yarn' and type='llama3'"),
        ({**YARN, "rope_theta": 5e5}, "rope_theta=500000.0"),
    ],
)
def test_scaling_rules_that_contradict_themselves_are_refused(scaling, message):
    with pytest.raises(ContractError, match=message):
        rope_table(16, 64, 1e4, scaling)


@pytest.mark.parametrize(
    "size", [(16.0, 64, 1e4), (16, 64.0, 1e4), (16, 64, math.inf), (16, 64, math.nan), (16, 64, "9")]
)
def test_table_sizes_that_are_no_numbers_are_refused(size):
    with pytest.raises(ContractError, match="supported"):
        rope_table(*size)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_table_that_is_not_finite_is_refused(bad):
    good, broken = torch.ones(2, 4), torch.ones(2, 4)
    broken[1, 3] = bad
    rl_attn.RopeTable(good, good)
    with pytest.raises(ContractError, match="cos holds a NaN"):
        rl_attn.RopeTable(broken, good)
    with pytest.raises(ContractError, match="sin holds a NaN"):
        rl_attn.RopeTable(good, broken)


@pytest.mark.parametrize("position", [-1, 16])
def test_position_outside_the_table_is_refused(position):
    x = torch.randn(2, 1, 8)
    with pytest.raises(ContractError, match="table holds 0 to 15"):
        rl_attn.rotary(x, x, torch.tensor([0, position]), rope_table(16, 8, 1e4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 1, 8, dtype=torch.bfloat16)}, "dtype"),
        ({"k": torch.zeros(3, 1, 8)}, "supported"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions"),
        ({"positions": torch.zeros(2)}, "float32"),
        ({"table": None}, "rotary_dim=16"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    call = {"q": torch.zeros(2, 1, 8), "k": torch.zeros(2, 1, 8), "positions": torch.zeros(2, dtype=torch.int64)}
    call = {**call, "table": rope_table(4, 8, 1e4), **change}
    call["table"] = call["table"] or rope_table(4, 16, 1e4)
    with pytest.raises(ContractError, match=message):
        rl_attn.rotary(**call)


@pytest.mark.field_report("R54")
def test_compiled_caller_equals_eager():
    table = rope_table(64, 16, 1e4)
    x = torch.randn(64, 2, 16)
    at = torch.arange(64)
    compiled = torch.compile(lambda q, k: rl_attn.rotary(q, k, at, table), backend="aot_eager")
    for a, b in zip(compiled(x, x), rl_attn.rotary(x, x, at, table)):
        assert torch.equal(a, b)
