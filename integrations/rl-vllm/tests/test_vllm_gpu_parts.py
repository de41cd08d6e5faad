"""Parts of a GPU engine that can be shown without one: samplers, attention, launches of graphs, preflight."""

import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_checkpoint import tiny_config

import rl_vllm
from rl_contract import ContractError, Launch, build_profile, record_launch, reset_launches
from rl_vllm import graphs, platform, preflight

pytest.importorskip("vllm")

CONFIG = tiny_config()
VOCAB = CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def profile():
    return build_profile("tiny", rl_vllm.settings_from_hf(CONFIG, leaves=4))


# samplers


@pytest.fixture
def rows():
    """Logits with a padded column, temperatures (two greedy), seeds (one negative) and positions of five requests."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, VOCAB + 3, generator=g) * 4
    logits[:, VOCAB:] = 1e4
    return logits, torch.tensor([0.7, 0.0, 1.0, 1.3, 0.0]), [11, 12, -13, 14, 15], torch.tensor([5, 6, 7, 800, 9])


def expected(profile, rows):
    import rl_logprob

    logits, temperature, seeds, positions = rows
    scale = torch.where(temperature == 0, 1.0, temperature)
    drawn = rl_logprob.gumbel_sample(logits, torch.tensor(seeds), positions, vocab_size=VOCAB, temperature=scale)
    ids = torch.where(temperature == 0, rl_logprob.greedy_sample(logits, vocab_size=VOCAB), drawn)
    tile = profile.settings.vocab_tile
    return ids, rl_logprob.selected_logprob(logits, ids, vocab_size=VOCAB, temperature=scale, vocab_tile=tile)


def metadata(rows, **changes):
    _, temperature, seeds, _ = rows
    generators = {i: torch.Generator().manual_seed(s) for i, s in enumerate(seeds) if temperature[i]}
    given = {
        "temperature": temperature, "all_greedy": False, "all_random": False, "generators": generators,
        "max_num_logprobs": 0, "logprob_token_ids": None,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


@pytest.fixture
def sampler_v1(profile, rows):
    from rl_vllm.gpu_sampling import StrictGPUSampler

    runner = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"), device=torch.device("cpu"),
        seq_lens=torch.cat((rows[3].int(), torch.zeros(3, dtype=torch.int32))),
    )  # fmt: skip
    return StrictGPUSampler(profile, runner)


def test_v1_runner_samples_by_seed_and_position_from_its_own_tensors(profile, rows, sampler_v1):
    ids, logprobs = expected(profile, rows)
    m = metadata(rows)
    chosen, scored = sampler_v1.sample(rows[0], m)
    assert torch.equal(chosen, ids)
    found = sampler_v1.gather_logprobs(scored, 0, chosen)
    assert torch.equal(found.logprobs[:, 0].view(torch.int32), logprobs.view(torch.int32))
    assert found.logprob_token_ids.dtype == torch.int32
    rank = (rows[0][:, :VOCAB] >= rows[0].gather(1, ids[:, None])).sum(1)
    assert torch.equal(found.selected_token_ranks, rank)
    # seeds are sent once for a batch
    assert sampler_v1._seeds_of(m, 5) is sampler_v1._seeds
    assert sampler_v1._seeds_of(metadata(rows), 5) is not sampler_v1._seeds or sampler_v1._batch is not m
    assert sampler_v1.sample(rows[0], metadata(rows, max_num_logprobs=None))[1] is None


def test_v1_runner_lists_the_most_likely_tokens_where_asked(profile, rows, sampler_v1):
    ids, logprobs = expected(profile, rows)
    chosen, scored = sampler_v1.sample(rows[0], metadata(rows, max_num_logprobs=3))
    found = sampler_v1.gather_logprobs(scored, 3, chosen)
    assert found.logprobs.shape == (5, 4)
    assert torch.equal(found.logprobs[:, 0].view(torch.int32), logprobs.view(torch.int32))
    assert torch.equal(found.logprob_token_ids[:, 1].long(), rows[0][:, :VOCAB].argmax(1))
    assert (found.logprobs[:, 1:].diff(dim=1) <= 0).all()
    # prompt tokens: temperature 1
    prompt = sampler_v1.gather_logprobs(sampler_v1.compute_logprobs(rows[0]), 0, ids)
    assert torch.equal(prompt.logprobs[2].view(torch.int32), logprobs[2:3].view(torch.int32))
    assert not torch.equal(prompt.logprobs[0], logprobs[0:1])


def test_bad_input_rows_without_a_finite_logit_stop_the_engine_a_step_later(rows, sampler_v1):
    logits = rows[0].clone()
    logits[3, 4] = torch.nan
    chosen, scored = sampler_v1.sample(logits, metadata(rows))
    found = sampler_v1.gather_logprobs(scored, 0, chosen)
    assert torch.isnan(found.logprobs[:, 0]).tolist() == [False, False, False, True, False]
    with pytest.raises(ContractError, match="logits of 1 rows held a NaN"):
        sampler_v1.sample(rows[0], metadata(rows))
    sampler_v1.draws.forget()
    sampler_v1.sample(rows[0], metadata(rows))


def sampler_v2(profile, rows):
    from rl_vllm.gpu_sampling import StrictRunnerSampler

    states = SimpleNamespace(
        temperature=SimpleNamespace(np=rows[1].numpy(), gpu=rows[1]), seeds=SimpleNamespace(gpu=torch.tensor(rows[2]))
    )
    return StrictRunnerSampler(profile, SimpleNamespace(sampling_states=states), torch.device("cpu"))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [1, 4], [2], [3, 0], [4, 2, 1, 0]])
def test_v2_runner_samples_the_same_tokens(profile, rows, order):
    from rl_vllm.gpu_sampling import _SAMPLE_ARGUMENTS

    ids, logprobs = expected(profile, rows)
    sampler = sampler_v2(profile, rows)
    index = torch.tensor(order)
    given = {
        "logits": rows[0][index], "expanded_idx_mapping": index, "idx_mapping_np": np.array(order),
        "pos": rows[3][index] - 1,
    }  # fmt: skip
    chosen, logits = sampler.sample(*(given.get(name) for name in _SAMPLE_ARGUMENTS if name != "return_logprobs"))
    assert torch.equal(chosen, ids[index])
    found = sampler._token_logprobs(logits, chosen[:, None])
    assert torch.equal(found[:, 0].view(torch.int32), logprobs[index].view(torch.int32))
    # several columns at once
    both = sampler._token_logprobs(logits, torch.stack((chosen, torch.zeros_like(chosen)), 1))
    assert torch.equal(both[:, 0].view(torch.int32), logprobs[index].view(torch.int32))


def test_v2_runner_scores_by_the_strict_operator_and_puts_its_own_back(profile, rows):
    from vllm.v1.worker.gpu.sample import logprob

    from rl_vllm.gpu_sampling import _scoring

    stock = logprob.compute_token_logprobs

    def use():
        with _scoring(lambda logits, ids: "strict"):
            assert logprob.compute_token_logprobs(None, None) == "strict"
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        use()
    assert logprob.compute_token_logprobs is stock


# attention


@pytest.mark.parametrize(("mixed", "requests", "bound"), [("FULL", 64, 64), ("PIECEWISE", 64, 1), ("PIECEWISE", 8, 64)])
def test_graph_of_mixed_batches_is_captured_for_any_number_of_rows(monkeypatch, mixed, requests, bound):
    from vllm.config.compilation import CUDAGraphMode

    from rl_vllm.gpu_attention import StrictGPUMetadataBuilder

    mode = {"FULL": CUDAGraphMode.FULL, "PIECEWISE": CUDAGraphMode.FULL_AND_PIECEWISE}[mixed]
    builder = StrictGPUMetadataBuilder.__new__(StrictGPUMetadataBuilder)
    builder.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    names = ("query_start_loc", "block_table_tensor", "positions")
    common = SimpleNamespace(
        causal=True, num_actual_tokens=64, max_query_len=1, seq_lens=torch.zeros(requests), **dict.fromkeys(names),
        slot_mapping=torch.zeros(80), query_start_loc_cpu=torch.tensor([0, 3, 5, 9]),
    )  # fmt: skip
    found = builder.build_for_cudagraph_capture(common)
    assert (found.max_query_len, found.min_query_len) == (bound, 0)
    assert (found.batch["max_query_len"], found.batch["min_query_len"]) == (bound, 0)
    assert len(found.slot_mapping) == 64
    assert builder.build(0, common).max_query_len == 1
    # of requests that prefill the least is told too; rows that pad a graph are a request of none
    common.max_query_len = 4
    assert builder.build(0, common).batch["min_query_len"] == builder.build(0, common).min_query_len == 2
    common.query_start_loc_cpu = torch.tensor([0, 3, 5, 9, 9])
    assert builder.build(0, common).min_query_len == 0


# launches of graphs


class Graph:
    """The three methods of ``torch.cuda.CUDAGraph`` that are wrapped."""

    def capture_begin(self):
        pass

    def capture_end(self):
        pass

    def replay(self):
        pass


def test_graph_replays_count_what_their_capture_recorded():
    reset_launches()
    graphs.reset_replays()
    graphs.count_graphs(Graph)
    graphs.count_graphs(Graph)
    before = graphs.summary()["captures"]
    one, two, foreign = Graph(), Graph(), Graph()
    for graph, count in ((one, 3), (two, 1), (foreign, 0)):
        graph.capture_begin()
        record_launch(Launch("gemm.row", "k", "p", "-", "eager"))
        if count:
            record_launch(Launch("gemm.row", "k", "p", "-", "capture"), count)
        graph.capture_end()
    assert graphs.replayed() == []
    for graph in (one, one, two, foreign):
        graph.replay()
    row = {"boundary": "gemm.row", "kernel": "k", "plan": "p", "layout": "-", "phase": "replay", "count": 7}
    assert graphs.replayed() == [row]
    assert graphs.summary() == {"captures": before + 2, "replays": 3}
    # a graph that is gone has still run
    del one, graph
    gc.collect()
    assert graphs.replayed() == [row]
    graphs.reset_replays()
    assert graphs.replayed() == []
    two.replay()
    assert graphs.replayed()[0]["count"] == 1
    reset_launches()


# preflight


def test_gpu_platform_needs_nothing_that_this_vllm_lacks():
    """The hooks of a GPU engine are there in a CPU build too, whatever the version."""
    assert preflight.missing_hooks(platform.CUDA.hooks) == []


@pytest.mark.parametrize("here", [platform.CPU, platform.CUDA], ids=lambda p: p.name)
def test_bad_input_arguments_are_all_listed_at_once(profile, monkeypatch, here):
    from vllm.engine.arg_utils import EngineArgs

    from rl_vllm.arguments import settle

    arguments = EngineArgs(
        **rl_vllm.engine_args(profile, model="m", compilation_config={"pass_config": {"fuse_allreduce_rms": True}}),
        quantization="fp8", enable_lora=True, speculative_config={"method": "ngram"}, pipeline_parallel_size=2,
        enable_expert_parallel=True, kv_cache_dtype="fp8",
    )  # fmt: skip
    monkeypatch.setattr(platform, "current", lambda: here)
    monkeypatch.setattr(arguments, "worker_cls", "auto")
    monkeypatch.setattr(arguments, "dtype", "float16")
    text = "; ".join(settle(arguments))
    for what in ("quantization='fp8'", "LoRA", "speculative decoding", "pipeline parallel 2", "expert parallel",
                 "kv_cache_dtype=fp8", "fusion pass fuse_allreduce_rms", "dtype=float16"):  # fmt: skip
        assert what in text
    assert arguments.worker_cls == here.workers["strict"]
    # an engine's compiled graphs are kept under a name in which the profile takes part
    assert arguments.additional_config["rl_strict"] == profile.fingerprint


def test_gpu_engine_keeps_graphs_and_compilation(profile, monkeypatch):
    monkeypatch.setattr(platform, "current", lambda: platform.CUDA)
    args = rl_vllm.engine_args(profile, model="m")
    assert "enforce_eager" not in args
    assert args["attention_backend"] == "CUSTOM"
    assert args["worker_cls"] == "rl_vllm.gpu_worker.StrictGPUWorker"
    assert not args["logits_processors"]


def test_gpu_requests_are_checked_without_a_logits_processor():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from rl_vllm.plugin import register

    register()
    params = SamplingParams(temperature=0.7, top_p=0.5)
    with pytest.raises(VLLMValidationError, match=r"top_p=0\.5.*seed=None"):
        params.verify(SimpleNamespace(quantization="rl_strict"), None, None, None)


@pytest.mark.parametrize(("page", "fits"), [(None, True), (16, True), (64, True), (32, False), (128, False)])
def test_pages_that_the_attention_library_is_not_certified_for_are_refused(page, fits):
    settings = rl_vllm.settings_from_hf(
        tiny_config(head_dim=128), leaves=4, arch="sm90", attention="nosplit", vocab_tile=128
    )
    model = SimpleNamespace(get_head_size=lambda: 128)
    found = preflight._attention(build_profile("tiny", settings), platform.CUDA, model, page)
    assert found == [] if fits else f"block_size={page}: nosplit got pages of {page} tokens" in found[0]


def test_strict_kernels_are_compiled_once_for_all_engines(monkeypatch, tmp_path):
    # vLLM and Inductor move Triton's directory below the cache of one configuration only where nobody has set it
    from rl_vllm.gpu_worker import share_kernel_cache

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "default"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert share_kernel_cache() == os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "default")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert share_kernel_cache() == os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
