"""Arguments of an engine: what strict mode sets, what contradicts it, and what is no option; no engine is started."""

import json
import os
import re
from importlib import metadata
from types import SimpleNamespace

import pytest
from tiny_checkpoint import tiny_config, tiny_weights, write_checkpoint

import rl_vllm
from rl_contract import ContractError, MissingSupport, build_profile

pytest.importorskip("vllm")

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def profile():
    return build_profile("tiny", rl_vllm.settings_from_hf(CONFIG, leaves=4))


def test_off_returns_the_overrides_alone(profile):
    assert rl_vllm.engine_args(profile, mode="off", model="m", seed=3) == {"model": "m", "seed": 3}


def test_bad_input_mode_and_excluded_plugin(profile, monkeypatch):
    with pytest.raises(ContractError, match="mode='fast'"):
        rl_vllm.engine_args(profile, mode="fast")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    with pytest.raises(ContractError, match="VLLM_PLUGINS=''"):
        rl_vllm.engine_args(profile, model="m")


def test_bad_input_a_package_that_is_only_importable(profile, monkeypatch):
    """vLLM's processes would refuse one of its parts by a name that tells nothing."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: [SimpleNamespace(name="another")])
    for mode in ("strict", "audit"):
        with pytest.raises(MissingSupport, match=r"not installed.*pip install integrations/rl-vllm"):
            rl_vllm.engine_args(profile, mode=mode, model="m")


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
    ({"rlfused": False}, "'rlfused'"),
    ({"fused": False}, "'fused'"),
    ({"Sampling-Graphs": True}, "'Sampling-Graphs'"),
    ({"rlStrict": "f"}, "'rlStrict'"),
    ({3: 1}, "3"),
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


def test_bad_input_a_model_or_compiler_of_another_type_is_named(profile):
    from vllm.engine.arg_utils import EngineArgs

    from rl_vllm.arguments import apply_strict

    for model in (None, 3):
        with pytest.raises(ContractError, match=f"model={model}, supported: a name or a path"):
            rl_vllm.engine_args(profile, model=model)
    for compilation in (3, None, "O2"):
        arguments = EngineArgs(**rl_vllm.engine_args(profile, model="m", compilation_config=compilation))
        arguments.additional_config = {"fused": True}
        # one error lists it with the others
        words = f"compilation_config={compilation!r}, supported: a mapping.*additional_config has 'fused'"
        with pytest.raises(ContractError, match=words):
            apply_strict(arguments)


@pytest.mark.parametrize("call", ["report", "reset_launches", "assert_strict", "trace_step"])
@pytest.mark.parametrize("llm", [None, 3, "engine"])
def test_bad_input_what_is_no_engine_is_named(profile, call, llm):
    more = {"assert_strict": (profile,), "trace_step": ("trace",)}.get(call, ())
    with pytest.raises(ContractError, match=f"{call} got llm={llm!r}; supported: vllm.LLM"):
        getattr(rl_vllm, call)(llm, *more)


def test_bad_input_the_seed_that_vllm_takes_for_none_is_named():
    from vllm import SamplingParams

    from rl_vllm.sampling import refusals

    for seed in (None, -1):
        (found,) = refusals(SamplingParams(seed=seed, temperature=1.0))
        assert found.startswith("seed=None or -1 (")


def test_bad_input_options_of_strict_mode_do_nothing_in_audit_mode_and_are_refused(profile):
    with pytest.raises(ContractError, match="rl_fused is an option of strict mode"):
        rl_vllm.engine_args(profile, mode="audit", model="m", additional_config={"rl_fused": False})
    for given in ({"rl_fuse": False}, 3):
        with pytest.raises(ContractError, match="audit engine arguments: additional_config"):
            rl_vllm.engine_args(profile, mode="audit", model="m", additional_config=given)


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
