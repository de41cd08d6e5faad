"""Norm, rotation and cache write as one operator, on a CPU; against ``rl_norm`` itself in the tests of the whole."""

import pytest
import torch

import rl_attn
from rl_contract import ContractError


def _case(tokens=7, heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, n, head_dim, generator=g).to(dtype) for n in (heads, kv_heads, kv_heads))
    cache = rl_attn.PagedKV.from_vllm_cpu(
        torch.full((4, kv_heads, 16, 2 * head_dim), torch.nan, dtype=dtype), num_kv_heads=kv_heads, head_dim=head_dim
    )
    positions, slots = torch.randint(0, 50, (tokens,), generator=g), torch.randperm(64, generator=g)[:tokens]
    return q, k, v, positions, rl_attn.rope_table(50, 16, 1e4), cache, slots


def _bits(cache):
    return torch.cat([cache.k, cache.v]).contiguous().view(torch.int16)


def test_without_norm_equals_rotary_and_write():
    q, k, v, positions, table, cache, slots = _case()
    slots[2] = -1
    *_, other, _ = _case()
    found = rl_attn.norm_rotary_write(q, k, v, positions, table, cache, slots)
    wanted_q, wanted_k = rl_attn.rotary(q, k, positions, table)
    rl_attn.write_paged(other, wanted_k, v, slots)
    assert torch.equal(found, wanted_q)
    assert torch.equal(_bits(cache), _bits(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_against_fp64(dtype):
    q, k, v, positions, _, cache, slots = _case(dtype=dtype)
    weights = {"q_weight": torch.randn(32).to(dtype), "k_weight": torch.randn(32).to(dtype)}
    table = rl_attn.rope_table(50, 16, 1e4)
    found = rl_attn.norm_rotary_write(q, k, v, positions * 0, table, cache, slots, **weights, eps=1e-6)
    # position 0 rotates nothing
    wanted = q.double() / (q.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["q_weight"].double()
    assert float(((found.double() - wanted).abs() / wanted.abs().clamp(min=1e-3)).max()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.full((7,), 50)}, "positions from 50 to 50"),
        ({"slots": torch.full((7,), 64)}, "slot 64"),
        ({"slots": torch.zeros(6, dtype=torch.int64)}, "slot_mapping"),
        ({"slots": torch.zeros(7)}, "float32"),
        ({"q_weight": torch.ones(32).bfloat16()}, "all three"),
        ({"q_weight": torch.ones(16).bfloat16(), "k_weight": torch.ones(32).bfloat16(), "eps": 1e-6}, "q_weight"),
        ({"q_weight": torch.ones(32).bfloat16(), "k_weight": torch.ones(32).bfloat16(), "eps": 0.0}, "eps=0.0"),
        *(
            ({"q_weight": torch.ones(32).bfloat16(), "k_weight": torch.ones(32).bfloat16(), "eps": eps}, "eps=")
            for eps in (1e-60, 1e39, 1e300, float("nan"), "a", True)
        ),
        ({"q_weight": [1.0], "k_weight": torch.ones(32).bfloat16(), "eps": 1e-6}, "q_weight as list"),
        ({"v": torch.zeros(7, 2, 16).bfloat16()}, "supported for this cache"),
        ({"q": torch.zeros(7, 3, 32).bfloat16()}, "multiple of Hkv"),
        ({"table": rl_attn.rope_table(50, 64, 1e4)}, "rotary_dim=64"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(change, message):
    q, k, v, positions, table, cache, slots = _case()
    call = {"q": q, "k": k, "v": v, "positions": positions, "table": table, "cache": cache, "slots": slots} | change
    before = _bits(cache).clone()
    with pytest.raises(ContractError, match=message):
        rl_attn.norm_rotary_write(
            call.pop("q"), call.pop("k"), call.pop("v"), call.pop("positions"), call.pop("table"), call.pop("cache"),
            call.pop("slots"), **call,
        )  # fmt: skip
    assert torch.equal(before, _bits(cache))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_lies_in_the_cache_is_refused_and_nothing_is_written(name):
    q, k, v, positions, table, cache, slots = _case(heads=2)
    given = {"q": q, "k": k, "v": v} | {name: cache.v[1].transpose(0, 1)[:7]}
    before = _bits(cache).clone()
    with pytest.raises(ContractError, match=f"got {name} .* in the memory of the cache"):
        rl_attn.norm_rotary_write(*given.values(), positions, table, cache, slots)
    assert torch.equal(before, _bits(cache))


def test_kernels_are_launched_without_an_op_around_them_only_where_nobody_traces():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from rl_attn import gpu

    assert not gpu.direct(torch.empty(1))
    with FakeTensorMode():
        traced = torch.empty(1, device="cuda")
        assert traced.is_cuda
        assert not gpu.direct(traced)
