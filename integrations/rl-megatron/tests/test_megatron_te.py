"""TransformerEngine installed: the native arm runs it or says why not, the strict arm keeps its bits."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contract import ContractError, MissingSupport
from rl_megatron import ParallelConfig, TrainerRank, build_model, native_substitutions, te

HERE = Path(__file__).parent
FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@pytest.fixture(scope="module")
def beside_te(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``te_worker.py`` computes in a process that finds the stand-in of ``fake_te``."""
    out = tmp_path_factory.mktemp("te") / "out.pt"
    path = os.pathsep.join([str(HERE / "fake_te"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # what Megatron has torch compile runs as it is written
    env = {**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "te_worker.py"), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(out)
    assert found["HAVE_TE"]
    return found


def local_name(name: str) -> str:
    for fused, local in FUSED.items():
        name = name.replace(fused, local)
    return name


def test_strict_has_the_same_bits_where_transformer_engine_is_installed(
    beside_te: Any, one_rank: None, tiny: Any
) -> None:
    assert "transformer_engine" not in sys.modules
    here, there = tiny.load("te_worker").step(tiny, "strict"), beside_te["strict"]
    assert here["classes"] == there["classes"]
    assert not any(there["config"].values())
    assert torch.equal(here["logprobs"], there["logprobs"])
    for kind in ("grads", "after"):
        assert here[kind].keys() == there[kind].keys()
        assert all(torch.equal(here[kind][name], there[kind][name]) for name in here[kind])
    assert here["grad_norm"] == there["grad_norm"]


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
    arms = [arm for arm in beside_te.values() if isinstance(arm, dict)]
    assert len(arms) == 5
    assert all(arm["round trip"] for arm in arms)


def test_reports_say_what_really_ran(beside_te: Any) -> None:
    report = beside_te["te"]["report"]
    assert report["name"] == "native (TransformerEngine 2.14.1)"
    assert report["attention_asked"] == "auto: NVTE_FLASH_ATTN=1, NVTE_FUSED_ATTN=1, NVTE_UNFUSED_ATTN=1"
    assert not any("attention" in s["stock"] for s in beside_te["te"]["substitutions"])
    local = beside_te["auto on a CPU"]
    assert local["report"] == {"name": "native (no TransformerEngine)", "operators": "local"}
    assert local["substitutions"] == native_substitutions() == native_substitutions("local")
    assert any("DotProductAttention" in s["stock"] for s in local["substitutions"])


def test_te_is_refused_by_name_where_it_cannot_serve(one_rank: None, tiny: Any) -> None:
    gpu = {"device": "cuda", "dtype": "bfloat16"}
    with pytest.raises(MissingSupport, match=r"needs TransformerEngine, and no package .* pip install .* or 'auto'"):
        te.resolve("te", **gpu)
    assert te.resolve("auto", **gpu) == te.resolve("local", **gpu) == "local"
    for wrong, words in (
        ({"device": "cpu"}, "device='cpu'"),
        ({"dtype": "float32"}, "float32"),
        ({"staged": True}, "NCCL"),
    ):
        with pytest.raises(ContractError, match=words):
            te.resolve("te", **(gpu | wrong))
    config = tiny.tiny_config()
    profile = tiny.tiny_profile(config)
    for mode, operators, words in (
        ("native", "te", "device='cpu', TransformerEngine supports: 'cuda'"),
        ("native", "fused", "native_operators='fused', supported: 'auto', 'te', 'local'"),
        ("strict", "te", "native_operators='te' with mode='strict'"),
    ):
        with pytest.raises(ContractError, match=words):
            build_model(config, profile, ParallelConfig(), mode=mode, native_operators=operators)  # type: ignore[arg-type]


def test_a_trainer_refuses_te_before_it_joins_a_world(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    folder = tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config))
    rest: dict[str, Any] = {"rank": 0, "hf_path": folder, "profile": tiny.tiny_profile(config)}
    for kind in ({"mode": "strict", "native_operators": "local"}, {"mode": "native", "native_operators": None}):
        with pytest.raises(ContractError, match="native_operators="):
            TrainerRank(init_method="file:///nowhere", **rest, **kind)
    # a world is not asked for, which the address would hang in
    trainer = TrainerRank(init_method="tcp://192.0.2.1:1", mode="native", native_operators="te", device="cuda", **rest)
    with pytest.raises(MissingSupport, match="TransformerEngine"):
        trainer.init()


def test_a_broken_installation_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingSupport, match=r"importing it fails with OSError: libcudnn\.so\.9"):
        te.resolve("te", device="cuda", dtype="bfloat16")
    assert te.resolve("auto", device="cuda", dtype="bfloat16") == "local"


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
