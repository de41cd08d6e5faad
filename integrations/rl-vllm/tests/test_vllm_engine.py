"""Promises of a strict engine, on real vLLM: batch, phase, layout, pushed weights, refusals, reports."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_helpers import (
    assert_same,
    engine,
    generate,
    metric,
    prompt,
    raw_generate,
    sampled,
    tokens_and_logprobs,
)
from hf_reference import packed_logprobs
from tiny_checkpoint import tiny_config, tiny_weights, write_checkpoint

import rl_vllm
from rl_contract import ContractError, MissingSupport, build_profile
from vime_sync import Manifest, ModelShape, PolicyVersion, shard_digests, write_weights

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

CONFIG = tiny_config()
SHAPE = ModelShape.from_hf_config(CONFIG)
WEIGHTS = tiny_weights(CONFIG)
LENGTHS = [1, 2, 16, 17, 63, 64, 65, 130, 511, 513]
PROMPTS = [prompt(i, n) for i, n in enumerate(LENGTHS)]
PARAMS = [sampled(100 + i) for i in range(len(LENGTHS))]
# fits the small cache of the preempting engine
SHORT = [prompt(50 + i, 40 + i) for i in range(4)]
SHORT_PARAMS = [sampled(200 + i, tokens=48) for i in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def profile(checkpoint):
    return build_profile("tiny", rl_vllm.settings_from_hf(checkpoint, leaves=4))


@pytest.fixture(scope="module")
def strict(checkpoint, profile):
    # so that a test may run a function of its own in the worker
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        with engine(profile, checkpoint, max_num_batched_tokens=2048, max_num_seqs=40) as llm:
            yield llm


@pytest.fixture(scope="module")
def cold(strict):
    """What the engine said first, with an empty cache."""
    assert strict.reset_prefix_cache()
    return generate(strict, PROMPTS, PARAMS), generate(strict, SHORT, SHORT_PARAMS)


def push(client, directory: Path, weights, step: int, shape=SHAPE) -> PolicyVersion:
    """One push, by the protocol; raises where the engine does."""
    manifest = Manifest.from_tensors(weights)
    version = PolicyVersion("test", step, manifest.digest)
    path = write_weights(directory / f"push-{step}", weights, version, manifest)
    client.begin(str(version))
    client.pause()
    assert client.clear_caches()
    client.transfer(path, str(version))
    assert dict(client.shard_digests()) == dict(shard_digests(weights, shape, client.tp))
    client.finish(str(version))
    client.resume()
    return version


@pytest.mark.field_report("R01", "R07", "R17")
def test_report_proves_that_every_boundary_is_strict(strict, profile):
    rl_vllm.reset_launches(strict)
    raw_generate(strict, PROMPTS[:3], PARAMS[:3])
    (report,) = rl_vllm.assert_strict(strict, profile)
    assert report["forwards"] >= 16
    assert report["profile"] == profile.fingerprint
    assert set(report["contracts"]) == set(profile.contracts)
    assert report["pid"] != os.getpid()
    assert report["logprobs"]["mode"] == "processed_logprobs"
    other = build_profile("other", rl_vllm.settings_from_hf(CONFIG, leaves=2))
    with pytest.raises(ContractError, match="is installed, needed is"):
        rl_vllm.assert_strict(strict, other)


@pytest.mark.field_report("R01", "R02")
def test_train_generation_equals_packed_forward(strict, cold, profile):
    generated, short = cold
    sequences = [p + ids for p, (ids, _) in zip(PROMPTS + SHORT, generated + short)]
    expected = packed_logprobs(WEIGHTS, SHAPE, profile.settings, sequences, temperature=0.7)
    expected = [(ids, e[-len(ids) :]) for e, (ids, _) in zip(expected, generated + short)]
    assert assert_same(generated + short, expected) == 16 * len(PROMPTS) + 48 * 4
    # the comparison notices one tree in place of another
    planted = replace(profile.settings, leaves=1)
    wrong = packed_logprobs(WEIGHTS, SHAPE, planted, sequences, temperature=0.7)
    assert not torch.equal(torch.cat([e[-16:] for e in wrong]), torch.cat([v[-16:] for _, v in generated + short]))


@pytest.mark.field_report("R49")
def test_phase_warm_prefix_equals_cold(strict, cold):
    outputs = raw_generate(strict, PROMPTS, PARAMS)
    assert sum(o.num_cached_tokens for o in outputs) > 500
    assert_same([tokens_and_logprobs(o) for o in outputs], cold[0])


@pytest.mark.field_report("R30")
def test_batch_alone_equals_among_33_mates(strict, cold):
    mates = [prompt(1000 + i, 1 + 11 * i) for i in range(33)]
    mate_params = [sampled(i, tokens=20, temperature=0.0 if i % 3 == 0 else 1.3) for i in range(33)]
    together = generate(
        strict, [*mates[:20], PROMPTS[6], *mates[20:]], [*mate_params[:20], PARAMS[6], *mate_params[20:]]
    )
    assert_same([together[20]], [cold[0][6]])
    assert_same(generate(strict, [PROMPTS[6]], [PARAMS[6]]), [cold[0][6]])


def test_what_a_gpu_worker_runs_before_it_serves_leaves_an_engine_as_it_was(strict, cold):
    def warmed(worker):
        """A GPU worker's warm-up, on this one."""
        from unittest import mock

        from rl_vllm import warming
        from rl_vllm.config import profile_of
        from rl_vllm.gpu_sampling import Draws

        worker._draws = Draws(profile_of(worker.vllm_config), torch.device("cpu"))
        caches = [x.kv_cache for x in worker.vllm_config.compilation_config.static_forward_context.values()]
        before = [x.clone() for x in caches]
        served = mock.Mock(side_effect=warming.attention)
        with (
            mock.patch.multiple(torch.cuda, synchronize=mock.DEFAULT, empty_cache=mock.DEFAULT),
            mock.patch.multiple(warming, forward_sizes=lambda config: [16, 100], attention=served),
            mock.patch("gc.freeze"),
        ):
            warming.warm(worker)
        worker.rl_reset_launches()
        same = all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(caches, before))
        return served.call_count, len(served.call_args.args[2]), int(worker._draws._bad), same

    ((calls, batches, bad, same),) = strict.collective_rpc(warmed)
    assert calls == 1
    assert batches > 100
    assert bad == 0
    assert same
    assert rl_vllm.report(strict)[0]["launches"] == []
    outputs = raw_generate(strict, PROMPTS, PARAMS)
    assert_same([tokens_and_logprobs(o) for o in outputs], cold[0])


@pytest.mark.field_report("R26")
def test_phase_rescoring_equals_generation(strict):
    from vllm import SamplingParams

    params = [sampled(7 + i, temperature=1.0) for i in range(len(PROMPTS))]
    generated = generate(strict, PROMPTS, params)
    score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = raw_generate(strict, [p + ids for p, (ids, _) in zip(PROMPTS, generated)], [score] * len(PROMPTS))
    rescored = []
    for output, p, (ids, _) in zip(scored, PROMPTS, generated):
        rows = output.prompt_logprobs[len(p) :]
        rescored.append((ids, torch.tensor([row[t].logprob for t, row in zip(ids, rows)], dtype=torch.float32)))
    assert_same(rescored, generated)


def test_sampling_continues_where_an_aborted_rollout_stopped(strict, cold):
    ids, logprobs = cold[0][5]
    rest = generate(strict, [PROMPTS[5] + ids[:5]], [sampled(105, tokens=11)])
    assert_same(rest, [(ids[5:], logprobs[5:])])


@pytest.mark.field_report("R04")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 4]}, "allowed_token_ids"),
        ({"min_tokens": 2}, "min_tokens=2"),
        ({"seed": None}, "seed=None"),
        # vLLM would fail to send these to its core, and wait for them at every request after
        ({"seed": 2**70}, f"seed={2**70}"),
        ({"seed": 2**63}, f"seed={2**63}"),
        ({"max_tokens": 2**70}, f"max_tokens={2**70}"),
        ({"prompt_logprobs": 0}, "prompt_logprobs with temperature=0.7"),
    ],
)
def test_bad_input_sampling_parameter_is_named(strict, changes, named):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(**{"temperature": 0.7, "seed": 1, "max_tokens": 2, "detokenize": False, **changes})
    with pytest.raises(VLLMValidationError, match=named):
        raw_generate(strict, [PROMPTS[2]], [params])
    assert len(generate(strict, [PROMPTS[2]], [sampled(1, tokens=1)])) == 1


@pytest.mark.field_report("R40", "R58")
def test_layout_tp2_in_chunks_of_64_equals_tp1(checkpoint, profile, cold, tmp_path):
    with engine(profile, checkpoint, tp=2, max_num_batched_tokens=64, max_num_seqs=16) as llm:
        assert_same(generate(llm, PROMPTS, PARAMS), cold[0])
        reports = rl_vllm.assert_strict(llm, profile)
        assert [r["rank"] for r in reports] == [0, 1]
        assert reports[0]["pid"] != reports[1]["pid"]
        client = rl_vllm.VllmEngineClient(llm)
        assert client.tp == 2
        assert dict(client.shard_digests()) == dict(shard_digests(WEIGHTS, SHAPE, 2))
        push(client, tmp_path, WEIGHTS, 1)
        assert_same(generate(llm, PROMPTS, PARAMS), cold[0])
        with pytest.raises(Exception, match="temperature"):
            raw_generate(llm, [PROMPTS[2]], [sampled(1, temperature=0.7, prompt_logprobs=0)])


@pytest.mark.field_report("R54")
@pytest.mark.skipif(not shutil.which("g++"), reason="vLLM's compiler needs g++ here")
def test_graph_layers_compiled_by_vllm_equal_the_operators(checkpoint, profile, cold, monkeypatch):
    """What a GPU engine does by default, and a CPU engine must be talked into: one compiled graph of the model."""
    from rl_vllm import platform

    fields = {name: value for name, value in platform.CPU.fields.items() if name != "enforce_eager"}
    monkeypatch.setattr(platform, "CPU", replace(platform.CPU, fields=fields))
    with engine(profile, checkpoint, max_num_batched_tokens=512, max_num_seqs=16) as llm:
        rl_vllm.reset_launches(llm)
        assert_same(generate(llm, PROMPTS, PARAMS), cold[0])
        (report,) = rl_vllm.assert_strict(llm, profile)
    assert report["compilation"]["mode"] == "DYNAMO_TRACE_ONCE"
    assert report["compilation"]["passes_on"] == []


def test_phase_preempted_in_chunks_of_7_equals_undisturbed(checkpoint, profile, cold):
    small = {"max_model_len": 160, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 7, "max_num_seqs": 4}
    with engine(profile, checkpoint, **small) as llm:
        assert_same(generate(llm, SHORT, SHORT_PARAMS), cold[1])
        assert metric(llm, "vllm:num_preemptions") > 0
        rl_vllm.assert_strict(llm, profile)


@pytest.mark.field_report("R40")
def test_layout_tp4_llama_tied_fp32_equals_packed_forward(tmp_path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = tiny_config("LlamaForCausalLM", tied=True, rope_scaling=rope, torch_dtype="float32", vocab_size=203)
    weights = {name: w.float() for name, w in tiny_weights(config, seed=5).items()}
    path = write_checkpoint(tmp_path / "llama", config, weights)
    profile = build_profile("llama", rl_vllm.settings_from_hf(path, leaves=8))
    shape = ModelShape.from_hf_config(config)
    with engine(profile, path, tp=4) as llm:
        generated = generate(llm, PROMPTS, PARAMS)
        rl_vllm.assert_strict(llm, profile)
        digests = rl_vllm.VllmEngineClient(llm).shard_digests()
    assert dict(digests) == dict(shard_digests(weights, shape, 4))
    sequences = [p + ids for p, (ids, _) in zip(PROMPTS, generated)]
    expected = packed_logprobs(weights, shape, profile.settings, sequences, temperature=0.7)
    assert_same(generated, [(ids, e[-len(ids) :]) for e, (ids, _) in zip(expected, generated)])


def one_by_one(llm):
    """vLLM's own operators depend on the batch, which depends on when requests arrive; alone each is repeatable."""
    return [generate(llm, [p], [s])[0] for p, s in zip(PROMPTS[:6], PARAMS)]


@pytest.mark.field_report("R30")
def test_off_native_engine_beside_a_strict_one_is_untouched(strict, checkpoint, profile, tmp_path, monkeypatch):
    """One process starts a strict engine, an audited one and one without our plugin: the last two agree."""
    with engine(profile, checkpoint, mode="audit", enforce_eager=True) as llm:
        (report,) = rl_vllm.report(llm)
        assert not [label for label in report["modules"] if "rl_vllm" in label]
        assert report["sampler"].startswith("vllm.")
        with pytest.raises(ContractError, match="mode is 'audit'"):
            rl_vllm.assert_strict(llm, profile)
        audited = one_by_one(llm)
        assert not rl_vllm.report(llm)[0]["launches"]
        client = rl_vllm.VllmEngineClient(llm)
        with pytest.raises(Exception, match="push weights first"):
            client.shard_digests()
        push(client, tmp_path, tiny_weights(CONFIG, seed=1), 1)
        assert [ids for ids, _ in one_by_one(llm)] != [ids for ids, _ in audited]
        push(client, tmp_path, WEIGHTS, 2)
        assert_same(one_by_one(llm), audited)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    alone = {"logprobs_mode": "processed_logprobs", "worker_cls": "stock_worker.StockCPUWorker"}
    with engine(profile, checkpoint, mode="native", **alone) as llm:
        assert_same(one_by_one(llm), audited)
        with pytest.raises(MissingSupport, match="engine_args"):
            rl_vllm.assert_strict(llm, profile)


@pytest.mark.field_report("R57", "R58", "R61", "R62")
def test_push_own_weights_other_weights_and_a_broken_one(strict, cold, profile, tmp_path):
    client = rl_vllm.VllmEngineClient(strict)
    assert client.weight_version() == "default"
    first = push(client, tmp_path, WEIGHTS, 1)
    outputs = raw_generate(strict, PROMPTS, PARAMS)
    assert_same([tokens_and_logprobs(o) for o in outputs], cold[0])
    assert rl_vllm.version_spans(outputs[0].outputs[0]) == [(str(first), 0, 16)]

    other = tiny_weights(CONFIG, seed=9)
    second = push(client, tmp_path, other, 2)
    outputs = raw_generate(strict, PROMPTS, PARAMS)
    # no block that old weights filled is read
    assert [o.num_cached_tokens for o in outputs] == [0] * len(PROMPTS)
    generated = [tokens_and_logprobs(o) for o in outputs]
    expected = packed_logprobs(
        other, SHAPE, profile.settings, [p + ids for p, (ids, _) in zip(PROMPTS, generated)], temperature=0.7
    )
    assert_same(generated, [(ids, e[-len(ids) :]) for e, (ids, _) in zip(expected, generated)])
    assert rl_vllm.version_spans(outputs[0].outputs[0]) == [(str(second), 0, 16)]

    client.begin("a")
    with pytest.raises(Exception, match="open for session 'a'"):
        client.begin("b")
    client.cancel("a")

    lacking = {name: w for name, w in WEIGHTS.items() if name != "model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        push(client, tmp_path, lacking, 3)
    # nothing was written, and still it does not serve
    assert dict(client.shard_digests()) == dict(shard_digests(other, SHAPE, 1))
    with pytest.raises(ContractError, match="poisoned"):
        client.resume()
    assert client.weight_version() == str(second)

    fourth = push(client, tmp_path, WEIGHTS, 4)
    outputs = raw_generate(strict, PROMPTS, PARAMS)
    assert_same([tokens_and_logprobs(o) for o in outputs], cold[0])
    assert rl_vllm.version_spans(outputs[0].outputs[0]) == [(str(fourth), 0, 16)]
