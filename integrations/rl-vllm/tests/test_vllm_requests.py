"""Requests that strict mode does not serve are refused by parameter, before the engine's core sees them."""

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from rl_vllm.sampling import refusals


@pytest.mark.field_report("R04")
def test_bad_input_sampling_refusals_list_everything():
    assert refusals(SamplingParams(temperature=1.0, seed=1, logprobs=0)) == []
    assert refusals(SamplingParams(temperature=0.0, prompt_logprobs=0)) == []
    found = refusals(SamplingParams(temperature=0.8, top_p=0.5, min_p=0.1, bad_words=["a"]))
    assert len(found) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**70, -(2**63) - 1, 1.5, 3.0, True, "3", [3]])
def test_bad_input_a_seed_that_is_no_int64_is_refused_before_the_engine_sees_it(seed, temperature):
    params = SamplingParams(temperature=temperature, seed=1)
    params.seed = seed
    assert refusals(params) == [f"seed={seed!r} (supported: an int from -2**63 to 2**63 - 1, not -1)"]
    for good in (0, -2, 2**63 - 1, -(2**63)):
        params.seed = good
        assert refusals(params) == []


@pytest.mark.parametrize(
    "given",
    [{"max_tokens": 2**70}, {"logprobs": 2**64}, {"stop_token_ids": [1, 2**70]}, {"trace_decode_token_ids": [3]}],
)
def test_bad_input_what_cannot_be_sent_to_the_engine_or_replaces_its_tokens_is_refused(given):
    ((name, value),) = given.items()
    params = SamplingParams(seed=1)
    if not hasattr(params, name):
        pytest.skip(f"this vLLM has no {name}")
    setattr(params, name, value)
    (found,) = refusals(params)
    assert found.startswith(f"{name}={value!r}"[:60])
