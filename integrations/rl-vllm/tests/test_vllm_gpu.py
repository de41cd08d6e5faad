"""Promises of a strict engine on a GPU: graph, batch, phase, pushed weights, sleep, evidence from launches.

Every engine is compared with ``hf_reference.rollout``: the operators alone, one packed forward pass for each token. So
all modes and both model runners have one another's bits, and those of a trainer.
"""

import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_helpers import assert_same, engine, generate, metric, prompt, raw_generate, sampled, tokens_and_logprobs
from hf_reference import packed_logprobs, rollout
from tiny_checkpoint import tiny_config, tiny_weights, write_checkpoint

import rl_vllm
from rl_contract import ContractError, build_profile
from vime_sync import Manifest, ModelShape, PolicyVersion, write_weights

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

CONFIG = tiny_config(
    hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, head_dim=128, vocab_size=4096,
    max_position_embeddings=4096,
)  # fmt: skip
SHAPE = ModelShape.from_hf_config(CONFIG)
WEIGHTS = tiny_weights(CONFIG)
TOKENS = 12
# up to three segments of 1,024 keys; one begins its second while it decodes
LENGTHS = [1, 2, 17, 63, 130, 511, 1018, 1100, 2500]
REQUESTS = [(prompt(i, n, 4096), 100 + i, (0.7, 1.0, 0.0, 1.3)[i % 4]) for i, n in enumerate(LENGTHS)]
PROMPTS = [p for p, _, _ in REQUESTS]
PARAMS = [sampled(seed, tokens=TOKENS, temperature=t) for _, seed, t in REQUESTS]
SMALL = {
    "max_model_len": 4096, "block_size": 16, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.04, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
}  # fmt: skip
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 256]}
ARCH = "sm{}{}".format(*torch.cuda.get_device_capability())
MODES = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": GRAPHS},
    "full": {"compilation_config": {**GRAPHS, "cudagraph_mode": "FULL"}},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), CONFIG, WEIGHTS)


def profile_of(checkpoint, family="segments"):
    return build_profile("gpu", rl_vllm.settings_from_hf(checkpoint, leaves=2, arch=ARCH, attention=family))


@pytest.fixture(scope="module")
def weights():
    return {name: w.cuda() for name, w in WEIGHTS.items()}


@contextmanager
def started(checkpoint, runner, family="segments", **changes):
    """An engine with one of vLLM's model runners."""
    profile = profile_of(checkpoint, family)
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[runner]
    try:
        with engine(profile, checkpoint, **{**SMALL, **changes}) as llm:
            yield llm, profile
    finally:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER")
        if before is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before


def answer(weights, profile, requests=REQUESTS, tokens=TOKENS):
    return rollout(weights, SHAPE, profile.settings, requests, tokens)


def decoded(llm, prompts, params):
    """What was generated, and attention's launches of the steps after the last prompt's: (kernel, plan) -> count."""
    names = [f"decoded-{i}" for i in range(len(prompts))]
    for name, ids, asked in zip(names, prompts, params):
        llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, asked)
    started, done = set(), {}
    while llm.llm_engine.has_unfinished_requests():
        before = len(started)
        for output in llm.llm_engine.step():
            started.add(output.request_id)
            if output.finished:
                done[output.request_id] = tokens_and_logprobs(output)
        if before < len(started) == len(names):
            rl_vllm.reset_launches(llm)
    report, *_ = rl_vllm.report(llm)
    counts = Counter()
    for row in report["launches"]:
        if row["boundary"] == "attention" and row["phase"] != "capture":
            counts[row["kernel"], row["plan"]] += row["count"]
    return [done[name] for name in names], counts


@pytest.mark.field_report("R54")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("runner", "family"), [("v2", "segments"), ("v1", "segments"), ("v2", "nosplit")])
def test_graph_eager_compiled_and_captured_engines_equal_the_operators(checkpoint, weights, runner, family, mode):
    with started(checkpoint, runner, family, **MODES[mode]) as (llm, profile):
        rl_vllm.reset_launches(llm)
        found = generate(llm, PROMPTS, PARAMS)
        (report,) = rl_vllm.assert_strict(llm, profile)
        assert_same(found, answer(weights, profile))
        # one after the other: batches of one, captured as such
        alone = [generate(llm, [p], [s])[0] for p, s in zip(PROMPTS[-2:], PARAMS[-2:])]
        assert_same(alone, found[-2:])
        longer = [sampled(seed, tokens=64, temperature=t) for _, seed, t in REQUESTS]
        again, kernels = decoded(llm, PROMPTS, longer)
        assert_same([(ids[:TOKENS], values[:TOKENS]) for ids, values in again], found)
    captured = mode in ("graphs", "full")
    assert (report["graphs"]["captures"] > 0, report["graphs"]["replays"] > 0) == (captured, captured)
    # with the model, what follows it in the V2 runner is captured too
    ways = {way: n for way, n in report["sampling"].items() if way != "sizes"}
    assert ways == ({"graph" if captured else "direct": report["forwards"]} if runner == "v2" else {})
    drawn = sum(x["count"] for x in report["launches"] if x["kernel"] == "rl_logprob.triton_draw.draw")
    assert drawn >= sum(ways.values())
    assert report["compilation"]["mode"] == ("NONE" if mode == "eager" else "VLLM_COMPILE")
    assert report["compilation"]["passes_on"] == []
    assert ("gpu.model_runner" in report["runner"]) == (runner == "v2")
    paged = {x["kernel"] for x in report["launches"] if x["boundary"] == "attention"}
    assert all(x["layout"] == "paged" for x in report["launches"] if x["boundary"] == "attention")
    ours = {f"rl_attn.triton_{kernel}" for kernel in ("forward", "decode", "hopper", "hopper_decode", "hopper_few")}
    assert paged <= {*ours, "rl_attn.nosplit"}
    # decoding is split by segments, which a fold joins, and never walks; a graph of mixed batches holds both
    decodes = {kernel: plan for kernel, plan in kernels if kernel.endswith(("decode", "few"))}
    if family == "nosplit":
        assert {kernel for kernel, _ in kernels} == {"rl_attn.nosplit"}
    elif mode == "full":
        assert decodes
    else:
        assert kernels
        assert decodes.keys() == {kernel for kernel, _ in kernels}
    assert all("+" in plan and plan.endswith("most4") for plan in decodes.values())
    if ARCH == "sm90" and family != "nosplit":
        # a graph of mixed batches knows no bound on the queries of a request
        assert f"rl_attn.triton_hopper_{'decode' if mode == 'full' else 'few'}" in decodes


@pytest.mark.parametrize("family", ["segments", "nosplit"])
def test_graph_of_whole_prefills_has_the_bits_of_piecewise_ones_and_of_the_operators(checkpoint, weights, family):
    # tokens by request: one prompt, few, few with short ones, and more than any graph holds if they come at once
    steps = [[256], [200], [60, 4], [100, 156], [64, 1, 30, 1, 1, 2, 5, 1], [16] * 9]
    requests = [[(prompt(70 * i + j, n, 4096), j, 0.8) for j, n in enumerate(x)] for i, x in enumerate(steps)]
    found, phases = {}, {}
    for graphs in (True, False):
        given = {"additional_config": {"rl_prefill_graphs": graphs}, **MODES["graphs"]}
        with started(checkpoint, "v2", family, **given) as (llm, profile):
            found[graphs], phases[graphs] = [], []
            for step in requests:
                assert llm.reset_prefix_cache()
                rl_vllm.reset_launches(llm)
                params = [sampled(seed, tokens=1, temperature=t) for _, seed, t in step]
                found[graphs].append(generate(llm, [p for p, _, _ in step], params))
                rows = rl_vllm.assert_strict(llm, profile)[0]["launches"]
                phases[graphs].append({x["phase"] for x in rows if x["boundary"] == "attention"} - {"capture"})
    assert phases[True][:-1] == [{"replay"}] * 5
    assert all("eager" in x for x in phases[False])
    for step, one, other in zip(requests, found[True], found[False]):
        assert_same(one, other)
        assert_same(one, answer(weights, profile, step, 1))


@pytest.mark.parametrize(("runner", "mode"), [("v2", "graphs"), ("v1", "graphs"), ("v2", "eager"), ("v1", "compiled")])
def test_kernels_are_compiled_before_an_engine_serves(checkpoint, monkeypatch, runner, mode):
    from triton import knobs
    from vllm import SamplingParams

    # the engine in this process, whose compiler is watched
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    compiled = []
    with started(checkpoint, runner, **MODES[mode]) as (llm, profile):
        assert rl_vllm.report(llm)[0]["launches"] == []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: compiled.append(given["fn"]))
        generate(llm, PROMPTS, PARAMS)
        for lengths in ([300], [1] * 40, [3, 500, 1, 2, 1, 1, 1], [64] * 8, [50] * 9, [17 + 31 * i for i in range(40)]):
            given = [prompt(7 * i, n, 4096) for i, n in enumerate(lengths)]
            generate(llm, given, [sampled(i, tokens=3, temperature=(0.0, 0.7, 1.0)[i % 3]) for i in range(len(given))])
        score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        raw_generate(llm, PROMPTS, [score] * len(PROMPTS))
        rl_vllm.assert_strict(llm, profile)
    # one that vLLM or Inductor writes is theirs to warm up
    assert [f"{fn.module}.{fn.name}" for fn in compiled if fn.module.startswith("rl_")] == []


@pytest.mark.field_report("R30")
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_batch_of_256_has_the_bits_of_64_and_of_1(checkpoint, weights, runner):
    requests = [(prompt(1000 + i, 1 + (37 * i) % 150, 4096), i, (0.0, 0.7, 1.0)[i % 3]) for i in range(256)]
    params = [sampled(seed, tokens=24, temperature=t) for _, seed, t in requests]
    with started(checkpoint, runner, **MODES["graphs"]) as (llm, profile):
        every = generate(llm, [p for p, _, _ in requests], params)
        rl_vllm.reset_launches(llm)
        assert_same(generate(llm, [p for p, _, _ in requests[:64]], params[:64]), every[:64])
        assert rl_vllm.assert_strict(llm, profile)[0]["graphs"]["replays"] > 0
        for i in (0, 1, 2, 255):
            assert_same(generate(llm, [requests[i][0]], [params[i]]), [every[i]])
        assert_same(every[:32], answer(weights, profile, requests[:32], 24))


@pytest.mark.field_report("R49", "R26")
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_phase_warm_chunked_and_rescored_equal_cold(checkpoint, weights, runner):
    from vllm import SamplingParams

    with started(checkpoint, runner, max_num_batched_tokens=64, max_num_seqs=16, **MODES["graphs"]) as (llm, profile):
        cold = generate(llm, PROMPTS, PARAMS)
        assert_same(cold, answer(weights, profile))
        warm = raw_generate(llm, PROMPTS, PARAMS)
        assert sum(o.num_cached_tokens for o in warm) > 500
        assert_same([tokens_and_logprobs(o) for o in warm], cold)
        score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        whole = [p + ids for p, (ids, _) in zip(PROMPTS, cold)]
        for output, sequence, want in zip(
            raw_generate(llm, whole, [score] * len(whole)), whole,
            packed_logprobs(weights, SHAPE, profile.settings, whole),
        ):  # fmt: skip
            got = torch.tensor([row[t].logprob for t, row in zip(sequence[1:], output.prompt_logprobs[1:])])
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_phase_preempted_equals_undisturbed(checkpoint, weights, runner):
    requests = [(prompt(50 + i, 40 + i, 4096), 200 + i, 0.8) for i in range(4)]
    params = [sampled(seed, tokens=48, temperature=t) for _, seed, t in requests]
    small = {"max_model_len": 160, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with started(checkpoint, runner, **{**small, **MODES["graphs"]}) as (llm, profile):
        found = generate(llm, [p for p, _, _ in requests], params)
        assert metric(llm, "vllm:num_preemptions") > 0
        assert_same(found, answer(weights, profile, requests, 48))


def push(client, directory: Path, tensors, step: int) -> PolicyVersion:
    manifest = Manifest.from_tensors(tensors)
    version = PolicyVersion("gpu", step, manifest.digest)
    path = write_weights(directory / f"push-{step}", tensors, version, manifest)
    client.begin(str(version))
    client.pause()
    assert client.clear_caches()
    client.transfer(path, str(version))
    client.finish(str(version))
    client.resume()
    return version


@pytest.mark.field_report("R56", "R58", "R62")
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_push_sleep_and_wake_keep_the_bits_of_the_served_weights(checkpoint, weights, tmp_path, runner):
    with started(checkpoint, runner, enable_sleep_mode=True, **MODES["graphs"]) as (llm, profile):
        cold = generate(llm, PROMPTS, PARAMS)
        assert_same(cold, answer(weights, profile))
        client = rl_vllm.VllmEngineClient(llm)
        llm.sleep(level=1)
        with pytest.raises(Exception, match="weights are asleep"):
            client.shard_digests()
        llm.wake_up()
        assert_same(generate(llm, PROMPTS, PARAMS), cold)
        other = tiny_weights(CONFIG, seed=9)
        second = push(client, tmp_path, other, 1)
        outputs = raw_generate(llm, PROMPTS, PARAMS)
        assert [o.num_cached_tokens for o in outputs] == [0] * len(PROMPTS)
        changed = [tokens_and_logprobs(o) for o in outputs]
        assert_same(changed, answer({n: w.cuda() for n, w in other.items()}, profile))
        assert rl_vllm.version_spans(outputs[0].outputs[0]) == [(str(second), 0, TOKENS)]
        # level 2 forgets the weights: nothing is served until they are pushed again
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        with pytest.raises(ContractError, match="sleep level 2 dropped its weights"):
            client.resume()
        llm.wake_up(tags=["kv_cache"])
        push(client, tmp_path, WEIGHTS, 2)
        assert_same(generate(llm, PROMPTS, PARAMS), cold)
        rl_vllm.assert_strict(llm, profile)


@pytest.mark.field_report("R17")
def test_trace_of_a_step_shows_no_stock_kernel_inside_the_model(checkpoint, tmp_path):
    from rl_vllm import trace

    traces = []
    for mode in ("eager", "graphs"):
        with started(checkpoint, "v2", **MODES[mode]) as (llm, _):
            # the next pass may begin with the first request alone: the one that needs a walk
            for name, prompts in (("prefill", PROMPTS[::-1]), ("decode", [[7]] * 64)):
                params = PARAMS[::-1] if name == "prefill" else [sampled(i, tokens=4) for i in range(64)]
                generate(llm, prompts, params)
                assert llm.reset_prefix_cache()
                if name == "decode":
                    params = [sampled(i, tokens=1) for i in range(64)]
                rl_vllm.trace_step(llm, str(tmp_path / f"{mode}-{name}"))
                generate(llm, prompts, params)
                traces.append(tmp_path / f"{mode}-{name}.0")
    found = trace.check(traces)
    assert [f.graphs > 0 for f in found][:2] == [False, False]
    assert any(f.graphs for f in found[2:])
    boundaries = ("gemm", "attn_fwd", "norm", "rotary", "swiglu")
    kernels = {name for f in found for name in f.ours}
    assert all(any(b in name for name in kernels) for b in boundaries), kernels
    # rows of one token each: a decode, of which sm90 has its own, and the fold that joins its segments, and no walk
    for f in found[1::2]:
        names = {name for name in f.ours if name.startswith("attn_")}
        assert {name.split("_")[1] for name in names} in ({"segments", "fold"}, {"few", "fold"}), names
