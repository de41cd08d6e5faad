"""The sampling graph on a GPU, without an engine: replays, padding, direct launches, bits of the operators."""

from contextlib import nullcontext

import pytest
import torch
from sampling_helpers import CONFIG, batch, runner_of, wanted

import rl_vllm
from rl_contract import ContractError, build_profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytest.importorskip("vllm")
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.fixture
def made(monkeypatch):
    from rl_vllm import graphs, sampling_graphs

    # no ranks that vLLM would have to know of
    monkeypatch.setattr(sampling_graphs, "_capturing", lambda device: nullcontext())
    graphs.count_graphs(torch.cuda.CUDAGraph)
    arch = "sm{}{}".format(*torch.cuda.get_device_capability())
    profile = build_profile("tiny", rl_vllm.settings_from_hf(CONFIG, leaves=1, arch=arch))
    return profile, *runner_of(profile, **ON_GPU)


def check(profile, runner, requests, seed):
    hidden, given = batch(requests, seed=seed, **ON_GPU)
    with torch.inference_mode():
        output, sampled, rejected = runner.sample(hidden, given, None)
        ids, logp, ranks = wanted(profile, runner, hidden, given)
    assert torch.equal(output.sampled_token_ids, ids[:, None])
    assert torch.equal(output.logprobs_tensors.logprobs[:, 0].view(torch.int32), logp.view(torch.int32))
    assert torch.equal(output.logprobs_tensors.selected_token_ranks, ranks)
    assert sampled.tolist() == [1] * len(requests)
    assert rejected.tolist() == [0] * len(requests)


def test_replays_and_direct_launches_have_the_bits_of_the_operators(made):
    from rl_vllm import graphs

    profile, runner, sampling = made
    check(profile, runner, [3, 0, 2], 1)
    graphs.reset_replays()
    sampling.capture()
    every = [[0], [1, 4], [3, 0, 2], [4, 2, 1, 0], [6], [0, 1, 2, 3, 4]]
    for seed, requests in enumerate(every):
        check(profile, runner, requests, seed)
    assert sampling.report() == {"sizes": [1, 2, 4], "direct": 2, "graph": 5}
    drawn = [x["count"] for x in graphs.replayed() if x["kernel"] == "rl_logprob.triton_draw.draw"]
    assert drawn == [5]


def test_bad_input_row_of_a_replay_stops_the_engine_and_padding_never_does(made):
    _, runner, sampling = made
    sampling.capture()
    hidden, given = batch([0, 1, 2], **ON_GPU)
    hidden[3] = torch.nan
    with torch.inference_mode():
        output = runner.sample(hidden, given)[0]
        assert torch.isnan(output.logprobs_tensors.logprobs[:, 0]).tolist() == [False, True, False]
        torch.cuda.synchronize()
        with pytest.raises(ContractError, match="logits of 1 rows held a NaN"):
            runner.sample(*batch([0], **ON_GPU))
        runner.sampler.draws.forget()
        runner.model.lm_head.weight.fill_(torch.nan)
        sampling.capture()
    torch.cuda.synchronize()
    runner.sampler.draws.check()
