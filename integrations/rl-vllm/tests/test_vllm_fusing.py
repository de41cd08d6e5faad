"""Norms, rotation and cache write done by the attention: same bits, every layer or none, a switch. No GPU needed."""

import weakref
from types import SimpleNamespace

import pytest
import torch

import rl_attn
from rl_contract import ContractError, MissingSupport

pytest.importorskip("vllm")
from rl_vllm.gpu_attention import StrictGPUBackend


def parts_of_a_layer(qk_norm, rotary_dim=32, tokens=9, heads=4, kv_heads=2, head_dim=32):
    """(q, k, v, positions, slots, rotary, norms, eps) as a decoder layer has them."""

    g = torch.Generator().manual_seed(3)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=g).bfloat16()
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (x.view(tokens, -1, head_dim) for x in qkv.split(sizes, dim=-1))
    table = rl_attn.rope_table(64, rotary_dim, 1e4)
    rotary = SimpleNamespace(rl_cos=table.cos, rl_sin=table.sin)
    weights = torch.randn(2, head_dim, generator=g).bfloat16()
    norms = [SimpleNamespace(weight=w, variance_epsilon=1e-6) for w in weights] if qk_norm else [None, None]
    slots = torch.randperm(32, generator=g)[:tokens]
    slots[-1] = -1
    return q, k, v, torch.arange(tokens) + 20, slots, rotary, norms, table


@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_does_what_stood_before_it_with_the_same_bits(qk_norm):
    import rl_norm
    from rl_vllm.fusing import Before

    q, k, v, positions, slots, rotary, norms, table = parts_of_a_layer(qk_norm)
    stores = [torch.full((2, 2, 16, 2, 32), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    mine, other = (rl_attn.PagedKV.from_vllm_split(x, num_kv_heads=2, head_dim=32) for x in stores)
    found = Before(rotary, *norms)(q, k, v, positions, mine, slots)
    if qk_norm:
        q, k = (rl_norm.rms_norm(x, n.weight, 1e-6) for x, n in zip((q, k), norms))
    q, k = rl_attn.rotary(q, k, positions, table)
    rl_attn.write_paged(other, k, v, slots)
    assert torch.equal(found.view(torch.int16), q.contiguous().view(torch.int16))
    assert torch.equal(stores[0].view(torch.int16), stores[1].view(torch.int16))


@pytest.mark.parametrize("kind", ["segments of one run", "another tensor"])
def test_a_layer_views_its_cache_once_and_lets_it_go_with_the_engine(kind):
    from rl_vllm.gpu_attention import StrictGPUAttentionImpl

    impl = StrictGPUAttentionImpl.__new__(StrictGPUAttentionImpl)
    impl.num_kv_heads, impl.head_size, impl.layout = 2, 32, "vllm_split"
    cache = torch.zeros((2, 3, 16, 2, 32), dtype=torch.bfloat16)
    first = impl._cache(cache)
    assert first.k.data_ptr() == cache[0].data_ptr()
    if kind == "another tensor":
        other = torch.ones_like(cache)
        assert impl._cache(other).v.data_ptr() == other[1].data_ptr()
        # what has gone is not the one that is held
        del cache, first
        assert impl._cache(other).v.data_ptr() == other[1].data_ptr()
        return
    assert impl._cache(cache) is first
    # an engine may give its tensor other memory
    moved = torch.ones_like(cache)
    cache.data = moved
    assert impl._cache(cache).k.data_ptr() == moved.data_ptr()
    storage = weakref.ref(cache.untyped_storage())
    del first, moved, cache
    assert impl._held is None
    assert storage() is None


def test_a_layer_takes_a_new_table_where_its_buffers_are_others():
    from rl_vllm.fusing import Before

    *_, rotary, norms, table = parts_of_a_layer(False)
    before = Before(rotary, *norms)
    q, k, v, positions, slots, *_ = parts_of_a_layer(False)
    store = torch.zeros((2, 2, 16, 2, 32), dtype=torch.bfloat16)
    cache = rl_attn.PagedKV.from_vllm_split(store, num_kv_heads=2, head_dim=32)
    first = before(q, k, v, positions, cache, slots)
    held = before._table
    assert torch.equal(before(q, k, v, positions, cache, slots), first)
    assert before._table is held
    rotary.rl_cos, rotary.rl_sin = torch.ones_like(table.cos), torch.zeros_like(table.sin)
    assert torch.equal(before(q, k, v, positions, cache, slots), q)


class Attention(torch.nn.Module):
    """By its name vLLM's."""

    def __init__(self):
        super().__init__()
        self.impl = SimpleNamespace(before=None)
        self.attn_backend = StrictGPUBackend


def layer(rotary, q_norm=None, k_norm=None):
    owner = torch.nn.Module()
    owner.attn = Attention()
    owner.rotary_emb, owner.q_norm, owner.k_norm = rotary, q_norm, k_norm
    return owner


def strict_module(kind, **attributes):
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_every_attention_of_a_model_is_joined_or_none():
    from rl_vllm.fusing import fuse
    from rl_vllm.layers import StrictRMSNorm, StrictRotaryEmbedding

    rotary = strict_module(StrictRotaryEmbedding)
    norms = [strict_module(StrictRMSNorm, variance_epsilon=1e-6) for _ in range(3)]
    good = [layer(rotary, norms[0], norms[1]), layer(rotary)]
    assert fuse(torch.nn.ModuleList(good)) == 2
    assert good[0].attn.impl.before.q_norm is norms[0]
    assert good[0].attn.attn_backend.forward_includes_kv_cache_update
    assert not StrictGPUBackend.forward_includes_kv_cache_update
    assert rotary.hands_on
    assert norms[1].hands_on
    x = torch.randn(3, 2, 4)
    assert norms[0].forward_native(x) is x
    assert rotary.forward_native(torch.arange(3), x, x)[0] is x
    # another norm of the model, e.g. before the layer, works on
    assert not norms[2].hands_on
    fresh = strict_module(StrictRotaryEmbedding)
    bad = [layer(fresh), layer(torch.nn.Identity())]
    with pytest.raises(MissingSupport, match="has no strict rotary_emb"):
        fuse(torch.nn.ModuleList(bad))
    assert bad[0].attn.impl.before is None
    assert bad[0].attn.attn_backend is StrictGPUBackend
    assert not fresh.hands_on
    with pytest.raises(MissingSupport, match="different eps"):
        fuse(layer(fresh, norms[0], strict_module(StrictRMSNorm, variance_epsilon=1e-5)))


@pytest.mark.parametrize(("given", "joined"), [({}, True), ({"rl_fused": True}, True), ({"rl_fused": False}, False)])
def test_joining_is_decided_in_the_configuration_and_can_be_switched_off(given, joined):
    from rl_vllm import fusing

    config = SimpleNamespace(additional_config={"rl_strict": "f", **given})
    assert fusing.decide(config) is joined
    assert fusing.decided(config) is joined
    assert config.additional_config == {"rl_strict": "f", "rl_fused": joined}


@pytest.mark.parametrize("given", [{"rl_fused": "no"}, {"rl_fused": "False"}, {"rl_fused": 0}, {"rl_fused": None}, "x"])
def test_bad_input_another_word_than_true_or_false_never_decides_about_joining(given):
    from rl_contract import ContractError
    from rl_vllm import fusing

    with pytest.raises(ContractError, match=r"supported: (True or False|a mapping)"):
        fusing.decide(SimpleNamespace(additional_config=given))


def test_operator_that_is_not_there_leaves_the_layers_apart(monkeypatch):
    from rl_vllm import fusing

    monkeypatch.delattr(rl_attn, "norm_rotary_write")
    assert not fusing.decide(SimpleNamespace(additional_config={"rl_fused": True}))


def test_attention_that_is_not_joined_takes_queries_as_they_are_and_one_without_positions_is_refused():
    from rl_vllm.gpu_attention import StrictGPUAttentionImpl

    impl = StrictGPUAttentionImpl.__new__(StrictGPUAttentionImpl)
    q = torch.ones(3, 2, 8)
    assert impl._queries(q, q, q, None, SimpleNamespace(positions=None)) is q
    seen = []
    impl.before = lambda *args: seen.append(args) or q
    with pytest.raises(ContractError, match="no positions"):
        impl._queries(q, q, q, None, SimpleNamespace(positions=None))
    # a captured graph's rows may be padded beyond those of the batch
    batch = SimpleNamespace(positions=torch.arange(5), slot_mapping=torch.arange(5) + 7)
    assert impl._queries(q, q, q, "cache", batch) is q
    ((*_, positions, cache, slots),) = seen
    assert (positions.tolist(), cache, slots.tolist()) == ([0, 1, 2], "cache", [7, 8, 9])
