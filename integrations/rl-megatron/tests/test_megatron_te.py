"""TransformerEngine installed: the native arm runs it or says why not, the strict arm keeps its bits."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rl_contract import ContractError, MissingSupport
from rl_megatron import ParallelConfig, TrainerRank, build_model, native_substitutions, te, topology

HERE = Path(__file__).parent
FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def run_worker(out: Path, *arguments: str, installed: bool) -> Any:
    stand_in = [str(HERE / "fake_te")] if installed else []
    path = os.pathsep.join([*stand_in, *filter(None, [os.environ.get("PYTHONPATH")])])
    # what Megatron has torch compile runs as it is written
    env = {**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "te_worker.py"), str(out), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(out)
    assert bool(found["HAVE_TE"]) == installed
    return found


@pytest.fixture(scope="module")
def beside_te(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``te_worker.py`` computes in a process that finds the stand-in of ``fake_te``."""
    return run_worker(tmp_path_factory.mktemp("te") / "out.pt", installed=True)


@pytest.fixture(scope="module")
def without_te(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What its strict arm, and Megatron's own optimizer, compute in a process without one, whatever is installed."""
    return run_worker(tmp_path_factory.mktemp("te") / "out.pt", "--hidden", installed=False)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine is not there, whatever is installed."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)


def local_name(name: str) -> str:
    for fused, local in FUSED.items():
        name = name.replace(fused, local)
    return name


def test_strict_has_the_same_bits_where_transformer_engine_is_installed(beside_te: Any, without_te: Any) -> None:
    here, there = without_te["strict"], beside_te["strict"]
    assert here["classes"] == there["classes"]
    assert not any(there["config"].values())
    assert torch.equal(here["logprobs"], there["logprobs"])
    for kind in ("grads", "after"):
        assert here[kind].keys() == there[kind].keys()
        assert all(torch.equal(here[kind][name], there[kind][name]) for name in here[kind])
    assert here["grad_norm"] == there["grad_norm"]


@pytest.mark.parametrize("arm", ["strict", "strict distributed", "local"])
def test_megatrons_optimizer_runs_nothing_of_transformer_engine_but_in_the_te_arm(
    beside_te: Any, without_te: Any, arm: str
) -> None:
    here, there = (found["megatron's optimizer"][arm] for found in (without_te, beside_te))
    assert not there["calls"]
    assert here["ran"] == there["ran"]
    assert there["ran"] == {
        "class": "rl_megatron.megatron_optimizer.MegatronOptimizer",
        "update": "torch.optim.adamw.AdamW",
        "norm": "megatron.core.utils.local_multi_tensor_l2_norm",
        "clip": "megatron.core.utils.local_multi_tensor_scale",
    }
    assert here["figures"] == there["figures"]
    # norm and clip ran
    assert all(0 < step["clip_coef"] < 1 for step in there["figures"])
    assert all(torch.equal(here["after"][name], there["after"][name]) for name in here["after"])


def test_megatrons_optimizer_of_the_te_arm_is_reported_with_what_it_runs(beside_te: Any) -> None:
    found, home = beside_te["megatron's optimizer"]["te"], "transformer_engine.pytorch.optimizers."
    assert found["ran"]["update"] == home + "FusedAdam"
    assert (found["ran"]["norm"], found["ran"]["clip"]) == (home + "multi_tensor_l2norm", home + "multi_tensor_scale")
    assert found["calls"] == {
        "FusedAdam": 2,
        "multi_tensor_l2norm": 2,
        "multi_tensor_scale": 2,
        "multi_tensor_applier": 4,
    }


def test_a_foreign_name_of_megatrons_optimizer_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import clip_grads

    from rl_megatron import own_optimizer

    held = clip_grads.l2_norm_impl
    foreign = type("Scale", (), {"__module__": "transformer_engine_torch"})
    for value in (foreign, foreign()):
        monkeypatch.setattr(clip_grads, "new_scale_impl", value, raising=False)
        with pytest.raises(MissingSupport, match=r"clip_grads has new_scale_impl .* use kind='strict'"):
            own_optimizer.pinned().__enter__()
        assert clip_grads.l2_norm_impl is held
    monkeypatch.delattr(clip_grads, "new_scale_impl")
    monkeypatch.setattr(clip_grads, "l2_norm_impl", foreign)
    seen = []
    with suppress(ZeroDivisionError), own_optimizer.pinned():
        seen.append(clip_grads.l2_norm_impl)
        raise ZeroDivisionError
    assert seen == [own_optimizer.local_multi_tensor_l2_norm]
    assert clip_grads.l2_norm_impl is foreign


@pytest.mark.parametrize(("te_arm", "local_arm"), [("te", "auto on a CPU"), ("te tied", "local tied")])
def test_te_arm_has_the_values_of_the_local_one(beside_te: Any, te_arm: str, local_arm: str) -> None:
    found, local = beside_te[te_arm], beside_te[local_arm]
    assert (found["built"], local["built"]) == ("te", "local")
    assert float((found["logprobs"] - local["logprobs"]).abs().mean()) < 0.03
    assert float((found["cooler"] - local["cooler"]).abs().mean()) < 0.06
    assert float((found["entropy"] - local["entropy"]).abs().mean()) < 0.05
    assert {local_name(name) for name in found["grads"]} == local["grads"].keys()
    for name, grad in found["grads"].items():
        other = local["grads"][local_name(name)]
        assert float(torch.cosine_similarity(grad.flatten(), other.flatten(), 0)) > 0.99, name
        assert float(grad.norm() / other.norm()) == pytest.approx(1, rel=0.06), name
    assert found["grad_norm"] == pytest.approx(local["grad_norm"], rel=0.02)


def test_te_arm_runs_megatrons_own_fused_modules(beside_te: Any) -> None:
    found = beside_te["te"]
    extension = "megatron.core.extensions.transformer_engine."
    assert found["classes"]["qkv"] == extension + "TELayerNormColumnParallelLinear"
    assert found["classes"]["fc2"] == extension + "TERowParallelLinear"
    assert found["classes"]["attention"] == extension + "TEDotProductAttention"
    assert found["classes"]["q_norm"] == found["classes"]["final_norm"] == "transformer_engine.pytorch.RMSNorm"
    assert found["config"]["apply_rope_fusion"]
    assert found["config"]["bias_activation_fusion"]
    # its linear layers add to main_grad by themselves
    assert not any(
        name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")) for name in found["left to autograd"]
    )
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in found["states"]


def test_every_arm_gives_back_the_weights_it_was_given(beside_te: Any) -> None:
    arms = [arm for arm in beside_te.values() if isinstance(arm, dict) and "round trip" in arm]
    assert len(arms) == 5
    assert all(arm["round trip"] for arm in arms)


def test_reports_say_what_really_ran(beside_te: Any) -> None:
    report = beside_te["te"]["report"]
    assert report["name"] == "native (TransformerEngine 2.14.1)"
    assert report["attention_asked"] == "auto: NVTE_FLASH_ATTN=1, NVTE_FUSED_ATTN=1, NVTE_UNFUSED_ATTN=1"
    assert not any("attention" in s["stock"] for s in beside_te["te"]["substitutions"])
    local = beside_te["auto on a CPU"]
    assert local["report"] == {
        "name": "native (no TransformerEngine)",
        "operators": "local",
        "fallback": "device='cpu', TransformerEngine supports: 'cuda'",
    }
    # which was asked for
    assert "fallback" not in beside_te["local tied"]["report"]
    assert local["substitutions"] == native_substitutions() == native_substitutions("local")
    assert any("DotProductAttention" in s["stock"] for s in local["substitutions"])


def test_a_trainer_reports_its_optimizer_and_why_auto_fell_back(beside_te: Any) -> None:
    strict, native = beside_te["reports"]["strict"], beside_te["reports"]["native"]
    optimizer = {"class": "rl_megatron.optimizer.StrictOptimizer"}
    assert strict["optimizer"] == native["optimizer"] == native["native"]["optimizer"] == optimizer
    assert strict["native"] is None
    assert native["native"]["fallback"] == "device='cpu', TransformerEngine supports: 'cuda'"


def test_te_is_refused_by_name_where_it_cannot_serve(one_rank: None, hidden: None, tiny: Any) -> None:
    gpu = {"device": "cuda", "dtype": "bfloat16"}
    with pytest.raises(MissingSupport, match=r"needs TransformerEngine, and no package .* pip install .* or 'auto'"):
        te.choose("te", **gpu)
    assert te.choose("auto", **gpu).operators == te.choose("local", **gpu).operators == "local"
    assert te.choose("auto", **gpu).fallback == (
        "TransformerEngine can't be used, and no package transformer_engine is installed"
    )
    assert te.choose("local", **gpu).fallback is None
    for wrong, words in (
        ({"device": "cpu"}, "device='cpu'"),
        ({"dtype": "float32"}, "float32"),
        ({"staged": True}, "NCCL"),
    ):
        with pytest.raises(ContractError, match=words):
            te.choose("te", **(gpu | wrong))
    config = tiny.tiny_config()
    profile = tiny.tiny_profile(config)
    for mode, operators, words in (
        ("native", "te", "device='cpu', TransformerEngine supports: 'cuda'"),
        ("native", "fused", "native_operators='fused', supported: 'auto', 'te', 'local'"),
        ("strict", "te", "native_operators='te' with mode='strict'"),
        ("native", np.array(["auto", "te"]), r"native_operators=array\(\['auto', 'te'\]"),
        ("native", np.array("local"), r"native_operators=array\('local'"),
        ("native", ["local"], r"native_operators=\['local'\]"),
        (np.array(["strict", "native"]), "auto", r"mode=array\("),
        (np.array("strict"), "local", r"mode=array\("),
    ):
        with pytest.raises(ContractError, match=words):
            build_model(config, profile, ParallelConfig(), mode=mode, native_operators=operators)  # type: ignore[arg-type]


@pytest.mark.parametrize("operators", ["auto", "fused", None, ["te"], np.array(["te", "local"])])
def test_substitutions_of_operators_that_never_run_are_refused(operators: Any) -> None:
    with pytest.raises(ContractError, match=r"operators=.*supported: 'te', 'local'; give model\.rl"):
        native_substitutions(operators)


def test_a_trainer_refuses_te_before_it_joins_a_world(hidden: None, tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    folder = tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config))
    rest: dict[str, Any] = {"rank": 0, "hf_path": folder, "profile": tiny.tiny_profile(config)}
    for kind in (
        {"mode": "strict", "native_operators": "local"},
        {"mode": "native", "native_operators": None},
        {"mode": "native", "native_operators": np.array(["te", "auto"])},
        {"mode": np.array(["native", "strict"]), "native_operators": np.array("te")},
    ):
        with pytest.raises(ContractError, match="native_operators="):
            TrainerRank(init_method="file:///nowhere", **rest, **kind)
    # a world is not asked for, which the address would hang in
    trainer = TrainerRank(init_method="tcp://192.0.2.1:1", mode="native", native_operators="te", device="cuda", **rest)
    with pytest.raises(MissingSupport, match="TransformerEngine"):
        trainer.init()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)


def test_an_installation_that_broke_after_megatron_was_imported_is_told_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget(monkeypatch)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingSupport, match=r"importing it fails with OSError: libcudnn\.so\.9"):
        te.choose("te", device="cuda", dtype="bfloat16")
    chosen = te.choose("auto", device="cuda", dtype="bfloat16")
    assert chosen.operators == "local"
    assert "importing it fails with OSError: libcudnn.so.9" in str(chosen.fallback)


def test_a_module_that_stands_in_for_it_is_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    with pytest.raises(MissingSupport, match="a module without __spec__"):
        te.choose("te", device="cuda", dtype="bfloat16")
    assert te.choose("auto", device="cuda", dtype="bfloat16").operators == "local"


# what its __init__.py has, if there is one, and what must be told of it
BROKEN = {
    "OSError": ("raise OSError('libcudnn.so.9: cannot open')", "OSError: libcudnn.so.9: cannot open"),
    "ImportError": ("raise ImportError('undefined symbol')", "ImportError: undefined symbol"),
    "AssertionError": ("raise AssertionError('torch 2.9 wanted')", "AssertionError: torch 2.9 wanted"),
    "RuntimeError": ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    "AttributeError": ("import torch\ntorch.no_such_thing", "module 'torch' has no attribute 'no_such_thing'"),
    "namespace": (None, "PackageNotFoundError: No package metadata was found for transformer-engine"),
    "no version": ("", "PackageNotFoundError: No package metadata was found for transformer-engine"),
    "version of no number": (
        "import sys, types\n__version__ = 'dev'\nsys.modules[__name__ + '.pytorch'] = types.ModuleType('pytorch')",
        "InvalidVersion: Invalid version: 'dev'",
    ),
    "SyntaxError": ("__version__ = '2.14.1", "SyntaxError: unterminated string literal"),
    "no pytorch": ("__version__ = '2.14.1'", "ModuleNotFoundError: No module named 'transformer_engine.pytorch'"),
}


APEX = {
    "apex RuntimeError": "raise RuntimeError('apex broken')",
    "apex OSError": "raise OSError('amp_C.so: undefined symbol')",
    "apex SyntaxError": "apex = '",
}


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How the import of ``TrainerRank`` ended beside each of ``BROKEN``: the error's class and words."""
    folder, out = tmp_path_factory.mktemp("broken"), tmp_path_factory.mktemp("said") / "out.json"
    for case, (text, _) in BROKEN.items():
        (folder / case / "transformer_engine").mkdir(parents=True)
        if text is not None:
            (folder / case / "transformer_engine" / "__init__.py").write_text(text)
    for case, text in APEX.items():
        (folder / case / "apex").mkdir(parents=True)
        (folder / case / "apex" / "__init__.py").write_text(text)
    (folder / "megatron itself" / "megatron").mkdir(parents=True)
    (folder / "megatron itself" / "megatron" / "__init__.py").write_text("import torch\ntorch.no_such_thing")
    command = [sys.executable, "-W", "ignore", str(HERE / "broken_te_worker.py"), str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_installation_is_named_where_megatron_is_first_imported(imports: Any, case: str) -> None:
    if case == "namespace" and find_spec("transformer_engine"):
        pytest.skip("an installed TransformerEngine goes before a folder without __init__.py")
    if case == "no version" and list(metadata.distributions(name="transformer-engine")):
        pytest.skip("an installed TransformerEngine lends it its version")
    kind, words = imports[case]
    assert kind == "MissingSupport"
    assert words.startswith("rl_megatron.TrainerRank: megatron-core imports TransformerEngine, whose installation (")
    assert f"{case}/transformer_engine" in words
    # later versions of Megatron ask the module itself
    asked = "AttributeError: module 'transformer_engine' has no attribute '__version__'"
    assert BROKEN[case][1] in words or (case in ("namespace", "no version") and asked in words)
    assert "pip uninstall transformer-engine" in words


@pytest.mark.parametrize("case", APEX)
def test_a_broken_apex_is_not_told_as_a_broken_transformer_engine(imports: Any, case: str) -> None:
    kind, words = imports[case]
    assert kind == "MissingSupport", words
    assert words.startswith("rl_megatron.TrainerRank: megatron-core imports Apex, whose installation (")
    assert f"{case}/apex" in words
    assert f"is broken: {case.removeprefix('apex ')}: " in words
    assert "pip uninstall apex" in words
    assert "transformer" not in words.lower()


def test_a_broken_installation_is_named_whichever_module_is_imported_first(imports: Any) -> None:
    modules = {statement: said for statement, said in imports.items() if statement.startswith("import ")}
    assert modules.pop("import rl_megatron.te") is None
    assert len(modules) == 4
    for statement, (kind, words) in modules.items():
        name = statement.removeprefix("import ")
        assert kind == "MissingSupport", words
        assert words.startswith(f"{name}: megatron-core imports TransformerEngine, whose installation (")
        assert "AssertionError: torch 2.9 wanted" in words


def test_an_error_of_an_attribute_inside_a_module_is_not_taken_for_a_missing_name(imports: Any) -> None:
    kind, words = imports["megatron itself"]
    assert kind == "ImportError"
    assert words.startswith("importing rl_megatron.trainer failed: AttributeError: module 'torch' has no attribute")


def test_a_cut_that_the_process_was_not_started_with_is_refused(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config()
    for wrong, words in (
        (ParallelConfig(tp=2), r"parallel=ParallelConfig\(tp=2, cp=1\), this process was started with .*tp=1, cp=1"),
        ({"tp": 1}, "parallel={'tp': 1}, supported: a ParallelConfig"),
    ):
        with pytest.raises(ContractError, match=words):
            build_model(config, tiny.tiny_profile(config), wrong)
        if not isinstance(wrong, ParallelConfig):
            with pytest.raises(ContractError, match=words):
                topology.start(0, wrong, "file:///nowhere")


def test_a_strict_model_with_a_module_of_transformer_engine_is_refused() -> None:
    foreign = type("RMSNorm", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.rmsnorm"})
    derived = type("Ours", (foreign,), {"__module__": "elsewhere"})
    te.refuse_in(torch.nn.Sequential(torch.nn.Linear(2, 2)).named_modules())
    for kind in (foreign, derived):
        with pytest.raises(ContractError, match=rf"0 \({kind.__qualname__}\)"):
            te.refuse_in(torch.nn.Sequential(kind()).named_modules())


def test_a_tracker_that_recomputation_left_without_states_gets_the_one_that_layers_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    added: list[str] = []
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(tracker, "add", lambda name, seed: (added.append(name), tracker.states_.update({name: seed})))
    te.name_random_state()
    # one that nobody used is not asked
    assert not added
    tracker.set_states({})
    te.name_random_state()
    te.name_random_state()
    assert added == ["model-parallel-rng"]
