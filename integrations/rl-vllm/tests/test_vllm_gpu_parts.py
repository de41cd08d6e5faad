"""Parts of a GPU engine that can be shown without one: samplers, launches of graphs, versions, traces, preflight."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_checkpoint import tiny_config, tiny_weights

import rl_vllm
from rl_contract import ContractError, Launch, build_profile, record_launch, reset_launches
from rl_vllm import graphs, platform, preflight, trace, versions

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


@pytest.mark.parametrize(("mixed", "bound"), [("FULL", 64), ("PIECEWISE", 1)])
def test_graph_of_mixed_batches_is_captured_for_any_number_of_rows(monkeypatch, mixed, bound):
    from vllm.config.compilation import CUDAGraphMode

    from rl_vllm.gpu_attention import StrictGPUMetadataBuilder

    mode = {"FULL": CUDAGraphMode.FULL, "PIECEWISE": CUDAGraphMode.FULL_AND_PIECEWISE}[mixed]
    builder = StrictGPUMetadataBuilder.__new__(StrictGPUMetadataBuilder)
    builder.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "positions")
    common = SimpleNamespace(causal=True, num_actual_tokens=64, max_query_len=1, **dict.fromkeys(names))
    assert builder.build_for_cudagraph_capture(common).max_query_len == bound
    assert builder.build(0, common).max_query_len == 1


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


# versions on a vLLM that stamps none


def step(scheduled, new=(), old=(), finished=()):
    cached = SimpleNamespace(
        req_ids=[name for name, _, _ in old], num_computed_tokens=[c for _, c, _ in old],
        num_output_tokens=[n for _, _, n in old],
    )  # fmt: skip
    added = [
        SimpleNamespace(req_id=name, prompt_token_ids=[0] * prompt, prefill_token_ids=[0] * total,
                        num_computed_tokens=computed)
        for name, prompt, total, computed in new
    ]  # fmt: skip
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_new_reqs=added, scheduled_cached_reqs=cached,
        finished_req_ids=set(finished),
    )  # fmt: skip


def test_sampled_tokens_are_known_from_the_schedule():
    sampled = versions.SampledTokens()
    # a prompt of 10 in chunks of 6 and 4; one of 3 whose first token comes at once
    sampled.observe(step({"a": 6, "b": 3}, new=[("a", 10, 10, 0), ("b", 3, 3, 0)]))
    assert sampled.counts() == {"a": 0, "b": 1}
    sampled.observe(step({"a": 4, "b": 1}, old=[("a", 6, 0), ("b", 3, 1)]))
    assert sampled.counts() == {"a": 1, "b": 2}
    sampled.observe(step({"a": 1}, old=[("a", 10, 1)]))
    assert sampled.counts() == {"a": 2, "b": 2}
    # b was preempted: it comes back with its tokens, recomputed in two chunks
    sampled.observe(step({"b": 4}, new=[("b", 3, 5, 0)], finished=["a"]))
    assert sampled.counts() == {"b": 2}
    sampled.observe(step({"b": 1}, old=[("b", 4, 2)]))
    assert sampled.counts() == {"b": 3}


def test_version_ledger_gives_every_token_its_version():
    ledger = versions.VersionLedger()
    ledger.push("v1", {"a": 4, "b": 0})
    ledger.push("v2", {"a": 4, "c": 2})
    assert [(s.version, s.start, s.end) for s in ledger.spans("a", 9)] == [("default", 0, 4), ("v2", 4, 9)]
    assert [(s.version, s.start, s.end) for s in ledger.spans("b", 3)] == [("v1", 0, 3)]
    # sampled, but thrown away with the request
    assert [(s.version, s.start, s.end) for s in ledger.spans("c", 1)] == [("v1", 0, 1)]
    assert [(s.version, s.start, s.end) for s in ledger.spans("d", 5)] == [("v2", 0, 5)]


def test_version_ledger_stamps_finished_outputs():
    completion = SimpleNamespace(token_ids=[1, 2, 3])
    output = SimpleNamespace(finished=True, outputs=[completion], request_id="mine")
    state = SimpleNamespace(external_req_id="mine")
    engine = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={"mine-1234": state}), step=lambda: [output]
    )
    ledger = versions.VersionLedger()
    versions.attach(engine, ledger.spans)
    ledger.push("v1", {"mine-1234": 2})
    assert engine.step() == [output]
    assert rl_vllm.version_spans(completion) == [("default", 0, 2), ("v1", 2, 3)]


# traces


def event(name, category, start, length, correlation=None, thread=1):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length, "tid": thread, "args": args}


def eager_trace(*more):
    return {
        "traceEvents": [
            event(trace.MODEL, "user_annotation", 0, 100),
            event("rl_gemm::matmul", "cpu_op", 10, 10),
            event("cuLaunchKernelEx", "cuda_driver", 12, 1, 1),
            event("gemm_kernel", "kernel", 200, 5, 1),
            event("rl_gemm::matmul", "cpu_op", 30, 10),
            event("cudaLaunchKernel", "cuda_runtime", 33, 1, 2),
            event("nvjet_tst_128x64", "kernel", 210, 5, 2),
            event("cudaLaunchKernel", "cuda_runtime", 50, 1, 3),
            event("triton_poi_fused_clone_view_3", "kernel", 220, 5, 3),
            # the sampler's, after the model
            event("cudaLaunchKernel", "cuda_runtime", 150, 1, 4),
            event("some_softmax_kernel", "kernel", 230, 5, 4),
            *more,
        ]
    }


def graph_trace(*kernels):
    found = [event("cudaGraphLaunch", "cuda_runtime", 5, 1, 9)]
    return {"traceEvents": found + [event(k, "kernel", 10 + i, 1, 9) for i, k in enumerate(kernels)]}


def test_trace_counts_what_ran_inside_the_model():
    found, replay = trace.check([eager_trace(), graph_trace("gemm_kernel", "nvjet_tst_128x64")], ["gemm_kernel"])
    assert dict(found.ours) == {"gemm_kernel": 1, "nvjet_tst_128x64": 1}
    assert found.library == {"nvjet_tst_128x64"}
    assert dict(found.moves) == {"triton_poi_fused_clone_view_3": 1}
    assert (found.steps, found.graphs, replay.graphs) == (1, 0, 1)


@pytest.mark.field_report("R17")
@pytest.mark.parametrize(
    ("traces", "named"),
    [
        (
            [eager_trace(event("l", "cuda_driver", 60, 1, 7), event("void rms_norm_kernel<x>", "kernel", 300, 1, 7))],
            "stock kernel void rms_norm_kernel",
        ),
        ([eager_trace(event("l", "cuda_driver", 60, 1, 7), event("triton_poi_fused_add_mul_1", "kernel", 300, 1, 7))],
         "triton_poi_fused_add_mul_1"),
        ([eager_trace(event("l", "cuda_driver", 60, 1, 7), event("triton_red_fused_view_1", "kernel", 300, 1, 7))],
         "triton_red_fused_view_1"),
        # a library kernel that no operator of ours was ever seen to launch
        ([graph_trace("gemm_kernel", "nvjet_tst_128x64")], "nvjet_tst_128x64"),
        ([{"traceEvents": [event(trace.MODEL, "user_annotation", 0, 100)]}], "proves nothing"),
    ],
)  # fmt: skip
def test_trace_with_a_stock_kernel_inside_the_model_is_refused(traces, named):
    with pytest.raises(ContractError, match=named):
        trace.check(traces, ["gemm_kernel"])


def test_trace_knows_the_kernels_of_every_package():
    names = trace.our_kernels()
    assert {"attn_fwd_kernel", "attn_segments_kernel", "rotary_kernel", "write_slots_kernel", "sample_kernel"} <= names
    assert not any("reference" in name for name in names)


def test_recording_marks_the_forward_pass_and_our_operators(tmp_path):
    import json

    import rl_gemm

    class Model(torch.nn.Module):
        def forward(self, x):
            return rl_gemm.swiglu(x)

    model, path = Model(), tmp_path / "step.0"
    with trace.recording(str(path), model):
        model(torch.randn(3, 8).bfloat16())
        rl_gemm.swiglu(torch.randn(3, 8).bfloat16())
    found = trace.read(path, [])
    # nothing ran on a GPU
    assert (found.steps, found.graphs, len(found.ours), len(found.stock)) == (1, 0, 0, 0)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    (mark,) = [e for e in events if e["name"] == trace.MODEL and e["cat"] == "user_annotation"]
    inside = [e for e in events if e["name"] == "rl_gemm::swiglu" and mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"]]
    assert inside
    assert all(e["cat"] == "cpu_op" and e["tid"] == mark["tid"] for e in inside)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_bad_input_trace_file(tmp_path, capsys):
    (tmp_path / "t.json").write_text("{")
    assert trace.main([str(tmp_path / "t.json")]) == 1
    assert "give a trace" in capsys.readouterr().out


# sleep and pushes


@pytest.fixture
def worker(monkeypatch):
    """A strict GPU worker around a vLLM worker that only notes what is asked of it."""
    from vllm.v1.worker.gpu_worker import Worker

    from rl_vllm.gpu_worker import StrictGPUWorker

    asked = []

    def note(name):
        return lambda self, *args, **kwargs: asked.append((name, args, kwargs))

    for name in ("sleep", "wake_up", "update_weights", "finish_weight_update", "execute_model"):
        monkeypatch.setattr(Worker, name, note(name))

    # as vLLM 0.24 has it
    def start_weight_update(self, is_checkpoint_format=True):
        asked.append(("start", is_checkpoint_format))

    monkeypatch.setattr(Worker, "start_weight_update", start_weight_update)
    made = StrictGPUWorker.__new__(StrictGPUWorker)
    made._rl_sampled = versions.SampledTokens()
    made._weight_update_active = False
    return made, asked


def test_sleeping_weights_are_neither_read_nor_written(worker):
    made, asked = worker
    made.sleep(1)
    made.rl_begin("a")
    for call in (lambda: made.rl_transfer("p", "v"), made.rl_shard_digests):
        with pytest.raises(ContractError, match="weights are asleep"):
            call()
    made.wake_up(["kv_cache"])
    with pytest.raises(ContractError, match="weights are asleep"):
        made.rl_transfer("p", "v")
    made.wake_up(["weights"])
    made.rl_transfer("p", "v")
    # vLLM's layerwise reload would take the weights apart
    assert ("start", False) in asked
    assert ("update_weights", ({"path": "p", "version": "v"},), {}) in asked
    assert made.rl_finish() == {}


@pytest.mark.field_report("R56")
def test_engine_that_slept_its_weights_away_serves_only_after_a_push(worker):
    made, _ = worker
    made.sleep(2)
    made.wake_up(None)
    schedule = step({"a": 1}, new=[("a", 1, 1, 0)])
    schedule.total_num_scheduled_tokens = 1
    with pytest.raises(RuntimeError, match="sleep level 2 dropped its weights"):
        made.execute_model(schedule)
    made.rl_begin("a")
    with pytest.raises(ContractError, match="brought no weights"):
        made.rl_finish()
    made.rl_transfer("p", "v")
    assert made.rl_finish() == {}
    made.execute_model(schedule)
    assert made._rl_sampled.counts() == {"a": 1}


def test_audited_push_on_0_24_loads_on_the_device_through_the_workers_reload(tmp_path):
    from rl_vllm.transfer import UpdateInfo, VimeSyncTransferEngine
    from vime_sync import Manifest, ModelShape, PolicyVersion, write_weights

    tensors = tiny_weights(CONFIG)
    manifest = Manifest.from_tensors(tensors)
    version = PolicyVersion("run", 1, manifest.digest)
    path = write_weights(tmp_path / "push", tensors, version, manifest)
    engine = VimeSyncTransferEngine.__new__(VimeSyncTransferEngine)
    engine.parallel_config = SimpleNamespace(tensor_parallel_size=1, rank=0)
    engine.received = {}
    hf_config = SimpleNamespace(to_dict=lambda: dict(CONFIG))
    model_config = SimpleNamespace(hf_config=hf_config, dtype=torch.bfloat16)
    engine.bind(SimpleNamespace(model_config=model_config, quant_config=None))
    seen = []
    # the device of the worker, as it calls this
    with torch.device("meta"):
        engine.receive_weights(
            UpdateInfo(path=str(path), version=str(version)),
            load_weights=lambda pairs: seen.append((torch.get_default_device().type, dict(pairs))),
        )
    ((device, loaded),) = seen
    assert device == "meta"
    assert all(torch.equal(loaded[name].view(torch.int16), w.view(torch.int16)) for name, w in tensors.items())
    assert set(engine.received["sha256"]) == {name for name, _ in ModelShape.from_hf_config(CONFIG).hf_shapes()}


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
