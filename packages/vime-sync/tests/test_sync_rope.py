"""One reading of a checkpoint's positions: both spellings, their defaults, and every contradiction refused."""

import pytest

from rl_contract import ContractError
from vime_sync import ModelShape
from vime_sync.rope import rope_problems, rope_settings, unsupported_rope

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SIZES = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "vocab_size": 96},
}


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({}, {"theta": 10000.0}),
        ({"rope_theta": 5e5}, {"theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {}}, {"theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 7e5}, {"theta": 5e5}),
        ({"rope_scaling": LLAMA3, "rope_theta": 5e5}, {"theta": 5e5, **LLAMA3}),
        ({"rope_scaling": {**LLAMA3, "type": "llama3"}, "rope_theta": 5e5}, {"theta": 5e5, **LLAMA3}),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, {"theta": 1e4, **LLAMA3}),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 256}, {"theta": 1e4, **LLAMA3}),
    ],
)
def test_rope_rule_is_read_from_either_spelling(config, rope):
    assert rope_settings(config, 16) == {"rotary_dim": 16, **rope}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # the default of one does not hide the rule of the other, whichever is which
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": LLAMA3},
            ["rope_scaling={", "'llama3'", "rope_parameters={", "'default'", "keep the one"],
        ),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"type": "default"}}, ["rope_scaling={'type': 'default'}"]),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": YARN}, ["'yarn'"]),
        ({"rope_parameters": LLAMA3, "rope_scaling": {**LLAMA3, "factor": 4.0}}, ["'factor': 4.0", "'factor': 8.0"]),
        # theta beside rope_scaling is 10000 here
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": LLAMA3}, ["rope_theta included"]),
        ({"rope_scaling": {**LLAMA3, "type": "default"}}, ["rope_type='llama3' and type='default' in rope_scaling"]),
        ({"rope_scaling": {"factor": 2.0}}, ["factor in rope_scaling", "name the rule"]),
        ({"rope_parameters": {"full_attention": LLAMA3}}, ["full_attention in rope_parameters"]),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128},
            ["original_max_position_embeddings=128 and 256 in rope_scaling"],
        ),
    ],
)
def test_rope_contradictions_are_refused_by_every_reader(config, words):
    for read in (lambda: rope_settings(config, 16), lambda: ModelShape.from_hf_config({**SIZES, **config})):
        with pytest.raises(ContractError) as refusal:
            read()
        for word in (*words, "supported"):
            assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"rope_scaling": YARN}, "rope type 'yarn' is not supported; supported: ('default', 'llama3')"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ],
)
def test_rope_rules_no_engine_serves_are_named(config, word):
    assert rope_problems(config) == []
    (found,) = unsupported_rope(config)
    assert word in found
    with pytest.raises(ContractError) as refusal:
        rope_settings(config, 16)
    assert found in str(refusal.value)
