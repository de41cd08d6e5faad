"""One fused operator against the three it stands for: same bits in the queries and in the cache, on either device."""

import pytest
import torch

import rl_attn
import rl_norm
from rl_contract import launches, reset_launches

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


def _integers(x):
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (32, 8, 128, 128), (5, 1, 64, 64), (6, 3, 96, 48), (4, 2, 256, 64), (40, 20, 128, 128), (4, 2, 128, 96),
        (3, 1, 80, 80),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 37, 1031])
def test_fused_norm_rotary_write_equals_its_three_operators(device, heads, kv_heads, head_dim, rotary_dim, tokens):
    g = torch.Generator().manual_seed(heads + tokens)
    if device == "cpu" and tokens > 100:
        tokens = 131
    page, blocks, eps = 16, 9 + tokens // 16, 1e-6
    # queries, keys and values of a token side by side, as a qkv projection leaves them; sizes spread widely
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=g)
    qkv = torch.ldexp(qkv, torch.randint(-12, 12, (tokens, heads + 2 * kv_heads, 1), generator=g)).bfloat16().to(device)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    q_weight, k_weight = (torch.randn(head_dim, generator=g).bfloat16().to(device) for _ in range(2))
    positions = torch.randint(0, 4000, (tokens,), generator=g).to(device)
    slots = torch.randperm(page * blocks, generator=g)[:tokens].to(device)
    slots[0] = -1 if tokens > 1 else slots[0]
    table = rl_attn.rope_table(4000, rotary_dim, 1e6)
    caches = [torch.full((2, blocks, page, kv_heads, head_dim), torch.nan, dtype=q.dtype, device=device) for _ in "ab"]
    mine, other = (rl_attn.PagedKV.from_vllm_split(x, num_kv_heads=kv_heads, head_dim=head_dim) for x in caches)
    reset_launches()
    found = rl_attn.norm_rotary_write(
        q, k, v, positions, table, mine, slots, q_weight=q_weight, k_weight=k_weight, eps=eps
    )
    assert {"norm", "rotary"} == {x["boundary"] for x in launches()}
    wanted_q, wanted_k = rl_attn.rotary(
        rl_norm.rms_norm(q, q_weight, eps), rl_norm.rms_norm(k, k_weight, eps), positions, table
    )
    rl_attn.write_paged(other, wanted_k, v, slots)
    assert found.is_contiguous()
    assert torch.equal(_integers(found), _integers(wanted_q))
    assert torch.equal(_integers(caches[0]), _integers(caches[1]))
    assert bool(caches[0].isfinite().any())
