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
    rotary = torch.nn.Module()
    rotary.register_buffer("rl_cos", table.cos)
    rotary.register_buffer("rl_sin", table.sin)
    norms = [torch.nn.RMSNorm(head_dim) if qk_norm else None for _ in range(2)]
    for norm in filter(None, norms):
        norm.variance_epsilon = 1e-6
        norm.weight = torch.nn.Parameter(torch.randn(head_dim, generator=g).bfloat16(), requires_grad=False)
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
    assert rotary._buffers["rl_cos"] is not table.cos
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
    assert fuse(torch.nn.ModuleList(good)) == (2, 0)
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


def mlp(**changes):
    """An MLP of 48 columns as vLLM has it, by names; and what it does apart."""
    from rl_vllm.layers import StrictLinearMethod, StrictSiluAndMul

    g = torch.Generator().manual_seed(1)
    made = torch.nn.Module()
    made.gate_up_proj = torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    made.gate_up_proj.weight = torch.nn.Parameter(torch.randn(96, 64, generator=g).bfloat16(), requires_grad=False)
    made.gate_up_proj.quant_method, made.act_fn = StrictLinearMethod(), strict_module(StrictSiluAndMul)
    for name, value in changes.items():
        setattr(made.gate_up_proj, name, value) if name != "act_fn" else setattr(made, name, value)

    def forward(x):
        return made.act_fn.forward_native(made.gate_up_proj.quant_method.apply(made.gate_up_proj, x))

    return made, forward


@pytest.mark.parametrize("rows", [1, 33])
def test_an_mlp_activates_where_it_projects_with_the_same_bits(rows):
    from rl_vllm.fusing import fuse

    made, forward = mlp()
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    apart = forward(x)
    assert fuse(torch.nn.ModuleList([made])) == (0, 1)
    assert made.act_fn.hands_on
    assert type(made.gate_up_proj.quant_method).__name__ == "StrictGateUpMethod"
    assert made.act_fn.forward_native(x) is x
    assert torch.equal(forward(x).view(torch.int16), apart.view(torch.int16))
    assert apart.shape == (rows, 48)
    # once is enough
    assert fuse(torch.nn.ModuleList([made])) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": torch.nn.Parameter(torch.ones(96))}, {"gather_output": True}, {"quant_method": object()},
        {"act_fn": torch.nn.SiLU()},
    ],
    ids=["bias", "gathered", "another method", "another activation"],
)  # fmt: skip
def test_an_mlp_of_another_form_stays_as_it_is(changes):
    from rl_vllm.fusing import fuse

    made, _ = mlp(**changes)
    before = made.gate_up_proj.quant_method
    assert fuse(made) == (0, 0)
    assert made.gate_up_proj.quant_method is before
    assert not getattr(made.act_fn, "hands_on", False)
    # an activation that another MLP has, too, is one of both
    other, _ = mlp()
    if "act_fn" not in changes:
        other.act_fn = made.act_fn
        assert fuse(torch.nn.ModuleList([made, other])) == (0, 0)


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


def batch(lengths, buffer, positions=True):
    """Metadata of a step whose tensors lie in buffers of ``buffer`` rows."""
    from rl_vllm.attention import StrictAttentionMetadata

    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return StrictAttentionMetadata(
        num_actual_tokens=sum(lengths), max_query_len=max(lengths), seq_lens=seq_lens,
        query_start_loc=torch.tensor([0, *seq_lens.cumsum(0).tolist()], dtype=torch.int32),
        block_table=torch.zeros((len(lengths), 4), dtype=torch.int32), slot_mapping=torch.arange(buffer) + 7,
        positions=torch.arange(buffer) if positions else None,
    )  # fmt: skip


def an_attention(**given):
    from rl_vllm.gpu_attention import StrictGPUAttentionImpl

    impl = StrictGPUAttentionImpl.__new__(StrictGPUAttentionImpl)
    impl.num_kv_heads, impl.head_size, impl.scale, impl.layout = 2, 32, 0.5, "vllm_split"
    settings = SimpleNamespace(key_tile=64, segment=1024, attention="segments")
    impl.strict = SimpleNamespace(profile=SimpleNamespace(settings=settings))
    vars(impl).update(given)
    return impl


def test_a_layer_hands_on_what_the_step_has_made_ready(monkeypatch):
    asked, joined = [], []
    monkeypatch.setattr(rl_attn, "attention_paged", lambda *args, **given: asked.append((args, given)))
    cache = torch.zeros((2, 5, 16, 2, 32), dtype=torch.bfloat16)
    # a piecewise graph's rows may be padded beyond those of the batch
    q, out = torch.ones(8, 4, 32), torch.empty(8, 4, 32)
    k, m = torch.ones(8, 2, 32), batch([2, 3], 16)
    assert an_attention().forward(None, q, k, k, cache, m, out) is out
    (((query, paged), given),) = asked
    assert (query.data_ptr(), len(query), paged.k.data_ptr()) == (q.data_ptr(), 5, cache[0].data_ptr())
    assert (given["out"].data_ptr(), len(given["out"])) == (out.data_ptr(), 5)
    assert all(given[name] is getattr(m, name) for name in ("query_start_loc", "seq_lens", "block_table"))
    said = ("max_query_len", "min_query_len", "scale", "key_tile", "segment", "family")
    assert [given[name] for name in said] == [3, 0, 0.5, 64, 1024, "segments"]
    # a joined one's queries come from what stands before it
    impl = an_attention(before=lambda *args: joined.append(args) or "rotated")
    impl.forward(None, q, k, k, cache, m, out)
    ((*rows, positions, _, slots),) = joined
    assert [len(x) for x in rows] == [5, 5, 5]
    assert (positions.tolist(), slots.tolist()) == ([0, 1, 2, 3, 4], [7, 8, 9, 10, 11])
    assert asked[1][0][0] == "rotated"


def test_a_layer_takes_no_slice_and_asks_no_module_where_nothing_is_padded(monkeypatch):
    import sys

    from rl_vllm.fusing import Before

    q, k, v, _, _, rotary, norms, _ = parts_of_a_layer(True)
    monkeypatch.setattr(rl_attn, "attention_paged", lambda *args, **given: None)
    monkeypatch.setattr(rl_attn, "norm_rotary_write", lambda q, *args, **given: q)
    impl, m = an_attention(before=Before(rotary, *norms)), batch([9], 9)
    cache, out, called = torch.zeros((2, 5, 16, 2, 32), dtype=torch.bfloat16), torch.empty_like(q), []

    def note(frame, event, arg):
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else arg.__name__)

    impl.forward(None, q, k, v, cache, m, out)
    sys.setprofile(note)
    impl.forward(None, q, k, v, cache, m, out)
    sys.setprofile(None)
    assert [x for x in called if x != "<lambda>"] == ["forward", "_cache", "data_ptr", "__call__", "cos", "setprofile"]


def test_attention_without_positions_is_refused_where_it_is_joined():
    from rl_vllm.fusing import Before

    q, k, v, _, slots, rotary, norms, _ = parts_of_a_layer(False)
    with pytest.raises(ContractError, match="no positions"):
        Before(rotary, *norms)(q, k, v, batch([9], 9, positions=False).positions, None, slots)


def test_operators_on_a_loaded_projection_call_no_python_of_its_parameter():
    from vllm.model_executor.parameter import ModelWeightParameter

    from rl_vllm.layers import StrictLinearMethod

    made = torch.nn.Module()
    loaded = torch.Tensor._make_subclass(ModelWeightParameter, torch.randn(4, 8))
    made.register_parameter("weight", loaded)
    assert torch.overrides.has_torch_function_unary(made.weight)
    StrictLinearMethod().process_weights_after_loading(made)
    assert not torch.overrides.has_torch_function_unary(made.weight)
    # the memory that was loaded, under the same name, and nothing to train
    assert [name for name, _ in made.named_parameters()] == ["weight"]
    assert made.weight.data_ptr() == loaded.data_ptr()
    assert not made.weight.requires_grad
