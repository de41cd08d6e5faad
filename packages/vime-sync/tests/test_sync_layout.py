"""Megatron <-> Hugging Face <-> vLLM are permutations: every byte comes back, nothing is guessed or skipped."""

import hashlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contract import ContractError, MissingSupport
from vime_sync import ModelShape, from_hf, from_vllm, shard_digests, tensor_digest, to_hf, vllm_shards
from vime_sync.layout import megatron_shapes

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 101,
}


def weights(shape, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    # every bit pattern but NaN and infinity, so that a cast or an addition on the way would show
    return {
        name: torch.randint(-32768, 32768, size, generator=g, dtype=torch.int16)
        .bitwise_and(-16513)
        .view(torch.bfloat16)
        .to(dtype)
        for name, size in shape.hf_shapes()
    }


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def shape_of(**changes):
    return ModelShape.from_hf_config({**QWEN3, **changes})


@pytest.mark.field_report("R65")
@settings(max_examples=40, deadline=None)
@given(
    architecture=st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    per_group=st.sampled_from([1, 2, 3]),
    head_dim=st.integers(1, 9),
    hidden=st.integers(1, 33),
    ffn=st.integers(1, 5),
    vocab=st.integers(1, 200),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    tp=st.sampled_from([1, 2, 4, 8]),
    norms=st.sampled_from(["local", "fused"]),
    padding=st.integers(0, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_layout_round_trip_hf_megatron_hf_is_bitwise(
    architecture, kv_heads, per_group, head_dim, hidden, ffn, vocab, layers, tied, tp, norms, padding, dtype
):
    heads = kv_heads * per_group
    if heads % tp:
        heads, per_group = kv_heads * 8, 8
    shape = ModelShape.from_hf_config(
        {
            "architectures": [architecture],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": ffn * 8,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        }
    )
    if (shape.q_rows + 2 * shape.kv_rows) % tp:
        return
    hf = weights(shape, dtype)
    padded = (-(-vocab // tp) + padding) * tp
    ranks = [from_hf(hf, shape, rank, tp, padded_vocab=padded, norms=norms) for rank in range(tp)]
    assert {n: tuple(t.shape) for n, t in ranks[0].items()} == megatron_shapes(
        shape, tp, padded_vocab=padded, norms=norms
    )
    back = dict(to_hf(ranks, shape))
    assert list(back) == [name for name, _ in shape.hf_shapes()]
    assert all(same(hf[name], back[name]) for name in hf)


@pytest.mark.field_report("R65")
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_layout_joined_shards_equal_rank_list(tp):
    shape = shape_of(num_key_value_heads=2)
    hf = weights(shape)
    ranks = [from_hf(hf, shape, rank, tp, padded_vocab=128) for rank in range(tp)]
    whole = {}
    for name, first in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        dim = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
        replicated = "norm" in name
        whole["module.module." + name] = first if replicated else torch.cat(parts, dim)
    back = dict(to_hf(whole, shape, tp))
    assert all(same(hf[name], back[name]) for name in hf)


@pytest.mark.field_report("R65")
def test_layout_qkv_is_interleaved_by_group_and_fc1_is_gate_up_per_rank():
    shape = shape_of(num_attention_heads=4, num_key_value_heads=2, head_dim=1, hidden_size=1, intermediate_size=4)
    hf = {name: torch.zeros(size) for name, size in shape.hf_shapes()}
    at = "model.layers.0."
    hf[at + "self_attn.q_proj.weight"] = torch.tensor([[0.0], [1], [2], [3]])
    hf[at + "self_attn.k_proj.weight"] = torch.tensor([[10.0], [11]])
    hf[at + "self_attn.v_proj.weight"] = torch.tensor([[20.0], [21]])
    hf[at + "mlp.gate_proj.weight"] = torch.tensor([[0.0], [1], [2], [3]])
    hf[at + "mlp.up_proj.weight"] = torch.tensor([[10.0], [11], [12], [13]])
    whole = from_hf(hf, shape, 0, 1)
    assert whole["decoder.layers.0.self_attention.linear_qkv.weight"].flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    second = from_hf(hf, shape, 1, 2, padded_vocab=102)
    assert second["decoder.layers.0.self_attention.linear_qkv.weight"].flatten().tolist() == [2, 3, 11, 21]
    assert second["decoder.layers.0.mlp.linear_fc1.weight"].flatten().tolist() == [2, 3, 12, 13]
    # blocks of Q, K, V would be the wrong order, and the round trip alone could not tell
    assert whole["decoder.layers.0.self_attention.linear_qkv.weight"].flatten().tolist() != [0, 1, 2, 3, 10, 11, 20, 21]


def test_layout_padded_vocabulary_is_zero_on_the_way_in_and_trimmed_on_the_way_out():
    shape = shape_of()
    hf = weights(shape)
    ranks = [from_hf(hf, shape, rank, 4, padded_vocab=256) for rank in range(4)]
    assert not ranks[1]["output_layer.weight"][101 - 64 :].any()
    assert not ranks[3]["embedding.word_embeddings.weight"].any()
    ranks[3]["embedding.word_embeddings.weight"].fill_(float("nan"))
    back = dict(to_hf(ranks, shape))
    assert same(back["model.embed_tokens.weight"], hf["model.embed_tokens.weight"])
    with pytest.raises(ContractError, match="multiple of 4"):
        from_hf(hf, shape, 0, 4)


def test_layout_lists_every_wrong_megatron_tensor_before_yielding():
    shape = shape_of()
    ranks = [from_hf(weights(shape), shape, rank, 2, padded_vocab=128) for rank in range(2)]
    ranks[0]["decoder.layers.0.self_attention.linear_qgkv.weight"] = ranks[0].pop(
        "decoder.layers.0.self_attention.linear_qkv.weight"
    )
    ranks[1]["vision_model.patch.weight"] = torch.zeros(1)
    ranks[1]["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(ContractError) as error:
        to_hf(ranks, shape)
    for text in (
        "rank 0: unknown decoder.layers.0.self_attention.linear_qgkv.weight",
        "rank 0: missing decoder.layers.0.self_attention.linear_qkv.weight",
        "rank 1: unknown vision_model.patch.weight",
        "rank 1: decoder.layers.1.mlp.linear_fc2.weight has shape (3, 3), needed is (24, 20)",
    ):
        assert text in str(error.value)


def test_layout_ranks_that_disagree_on_a_replicated_tensor_are_refused():
    shape = shape_of()
    ranks = [from_hf(weights(shape), shape, rank, 2, padded_vocab=128) for rank in range(2)]
    norm = ranks[1]["decoder.final_layernorm.weight"].view(torch.int16)
    norm[3] ^= 1
    with pytest.raises(
        ContractError, match=r"rank 1: decoder.final_layernorm.weight is replicated but its bytes differ"
    ):
        to_hf(ranks, shape)


def test_layout_one_weight_under_two_spellings_is_refused():
    shape = shape_of()
    local = from_hf(weights(shape), shape, 0, 1)
    local["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = torch.zeros(24)
    with pytest.raises(ContractError, match="both name"):
        to_hf([local], shape)


def test_layout_a_tied_head_that_came_apart_is_refused_on_every_side():
    shape = shape_of(tie_word_embeddings=True)
    hf = weights(shape)
    assert "lm_head.weight" not in hf
    local = from_hf(hf, shape, 0, 1)
    local["output_layer.weight"] = local["embedding.word_embeddings.weight"].clone()
    assert "lm_head.weight" not in dict(to_hf([local], shape))
    local["output_layer.weight"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(ContractError, match="ties them"):
        to_hf([local], shape)
    with pytest.raises(ContractError, match="ties them"):
        from_hf({**hf, "lm_head.weight": local["output_layer.weight"]}, shape, 0, 1)
    engine = stack(dict(vllm_shards(hf, shape, 0, 1)), shape)
    with pytest.raises(ContractError, match="ties them"):
        from_vllm({**engine, "lm_head.weight": engine["model.embed_tokens.weight"] + 1}, shape, 0, 1)


def test_layout_an_unknown_spelling_of_the_norms_is_refused():
    for call in (lambda: from_hf({}, shape_of(), 0, 1, norms="x"), lambda: megatron_shapes(shape_of(), 1, norms="x")):
        with pytest.raises(ContractError, match=r"norms='x'; supported: \['fused', 'local'\]"):
            call()


def test_layout_from_hf_lists_missing_unknown_and_mis_shaped():
    shape = shape_of()
    hf = weights(shape)
    del hf["model.norm.weight"]
    hf["visual.merger.weight"] = torch.zeros(1)
    hf["model.layers.1.self_attn.k_norm.weight"] = torch.zeros(7)
    with pytest.raises(ContractError) as error:
        from_hf(hf, shape, 0, 1)
    for text in ("missing model.norm.weight", "unknown visual.merger.weight", "k_norm.weight has shape (7,)"):
        assert text in str(error.value)


STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
STACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def stack(shards, shape):
    """A worker's parameters as vLLM names them, in the order in which vLLM stacks them."""
    engine = {}
    for name, tensor in shards.items():
        parts = [STACKED.get(part, part) for part in name.split(".")]
        engine.setdefault(".".join(parts), []).append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in engine.items()}


@pytest.mark.field_report("R65", "R68")
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_layout_vllm_shards_are_what_a_worker_reports(tp, kv_heads, architecture):
    shape = shape_of(architectures=[architecture], num_key_value_heads=kv_heads)
    hf = weights(shape)
    expected = shard_digests(hf, shape, tp, "sha256")
    assert len(expected) == tp * len(hf)
    for rank in range(tp):
        shards = dict(vllm_shards(hf, shape, rank, tp))
        back = dict(from_vllm(stack(shards, shape), shape, rank, tp))
        assert list(back) == list(shards)
        for name, tensor in back.items():
            assert same(tensor, shards[name])
            assert tensor_digest(tensor) == expected[rank, name]
    # a key/value head is held by tp / kv_heads neighbours, and by nobody else
    key = "model.layers.0.self_attn.k_proj.weight"
    assert len({expected[rank, key] for rank in range(tp)}) == min(tp, kv_heads)


def test_layout_vllm_pads_the_vocabulary_to_64_with_zero_rows():
    shape = shape_of()
    hf = weights(shape)
    shards = [dict(vllm_shards(hf, shape, rank, 2))["lm_head.weight"] for rank in range(2)]
    assert [s.shape[0] for s in shards] == [64, 64]
    assert same(torch.cat(shards)[:101], hf["lm_head.weight"])
    assert not torch.cat(shards)[101:].any()


@pytest.mark.field_report("R57")
def test_layout_an_engine_that_packed_its_weights_away_is_noticed():
    shape = shape_of()
    engine = stack(dict(vllm_shards(weights(shape), shape, 0, 1)), shape)
    engine["model.layers.0.mlp.down_proj.weight"] = torch.empty(0)
    engine["model.layers.1.self_attn.rotary_emb.scale"] = torch.zeros(1)
    del engine["model.layers.1.self_attn.qkv_proj.weight"]
    with pytest.raises(ContractError) as error:
        from_vllm(engine, shape, 0, 1)
    for text in (
        "model.layers.0.mlp.down_proj.weight has shape (0,)",
        "unknown model.layers.1.self_attn.rotary_emb.scale",
        "missing model.layers.1.self_attn.v_proj.weight",
    ):
        assert text in str(error.value)


@pytest.mark.field_report("R55", "R57")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None, "model_type": "mistral"}, "mistral"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention layers"),
        ({"mamba_d_state": 16}, "state-space layers"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_shape_refuses_what_it_does_not_cover_by_name(change, named):
    with pytest.raises(MissingSupport, match=named):
        shape_of(**change)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"])
def test_shape_takes_no_word_and_no_number_for_a_truth_value(key):
    for value in ("false", "true", "no", 0, 1, [False]):
        with pytest.raises(ContractError, match=re.escape(f"{key}={value!r}, supported: true or false")):
            shape_of(**{key: value})
    assert shape_of(**{key: None}) == shape_of(**{key: False})


def test_shape_refuses_sizes_that_do_not_fit():
    for eps in (1e-60, 1e39, 10**400, 0, "1e-6"):
        with pytest.raises(ContractError, match=r"rms_norm_eps=.*, supported: a positive number that fp32 holds"):
            shape_of(rms_norm_eps=eps)
    for config in (None, "config.json", [QWEN3]):
        with pytest.raises(ContractError, match=r"supported: config\.json as a dict"):
            ModelShape.from_hf_config(config)
    with pytest.raises(ContractError, match="lacks vocab_size"):
        shape_of(vocab_size=None)
    with pytest.raises(ContractError, match="do not divide"):
        shape_of(num_key_value_heads=3)
    with pytest.raises(ContractError, match="tensor parallel 3 does not fit 8 heads, 4 key/value heads"):
        shape_of().check_tp(3)
    with pytest.raises(ContractError, match="rank 2 of 2"):
        from_hf({}, shape_of(), 2, 2)
    assert shape_of(num_key_value_heads=1).kv_rows == 6


def test_digest_is_sha256_of_the_bytes():
    x = torch.randn(1000, 7)
    assert tensor_digest(x.t()) == hashlib.sha256(x.numpy().T.tobytes()).hexdigest()
    b = x.to(torch.bfloat16)
    assert tensor_digest(b) == hashlib.sha256(b.view(torch.int16).numpy().tobytes()).hexdigest()
    assert tensor_digest(torch.tensor(-0.0)) != tensor_digest(torch.tensor(0.0))
    assert tensor_digest(torch.empty(0)) == hashlib.sha256(b"").hexdigest()
    with pytest.raises(ContractError, match="meta"):
        tensor_digest(torch.empty(1, device="meta"))


@pytest.mark.field_report("R68")
def test_layout_vllm_rank_holds_the_key_head_that_its_queries_read():
    hf = weights(shape_of(num_key_value_heads=2))
    key = hf["model.layers.0.self_attn.k_proj.weight"]
    for tp, heads in ((2, [0, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])):
        for rank, head in enumerate(heads):
            held = dict(vllm_shards(hf, shape_of(num_key_value_heads=2), rank, tp))
            assert same(held["model.layers.0.self_attn.k_proj.weight"], key[6 * head : 6 * (head + 1)])
